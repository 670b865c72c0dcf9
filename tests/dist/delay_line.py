"""Carries packets between two network namespaces, each a fixed time after it came, until it is ended.

    python delay_line.py FIRST SECOND SECONDS

Each namespace gets a device "eth0", which is down at first. ``tc ... netem`` does the same where the kernel has it.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import os
import select
import struct
import sys
import time

_LIBC = ctypes.CDLL(None, use_errno=True)
_SET_NAME, _PACKETS_ALONE = 0x400454CA, 0x0001 | 0x1000  # TUNSETIFF; IFF_TUN | IFF_NO_PI


def device_in(namespace: str) -> int:
    with open(f"/run/netns/{namespace}") as file:
        if _LIBC.setns(file.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _SET_NAME, struct.pack("16sH22x", b"eth0", _PACKETS_ALONE))
    return fd


def carry(first: int, second: int, delay_s: float) -> None:
    ways = {first: (second, collections.deque()), second: (first, collections.deque())}
    while True:
        now, wait = time.monotonic(), None
        for to, packets in ways.values():
            while packets and packets[0][0] <= now:
                with contextlib.suppress(OSError):  # the other device is not up yet
                    os.write(to, packets.popleft()[1])
            if packets:
                left = max(0.0, packets[0][0] - now)
                wait = left if wait is None else min(wait, left)
        for fd in select.select(list(ways), [], [], wait)[0]:
            due = time.monotonic() + delay_s
            with contextlib.suppress(BlockingIOError):
                while True:
                    ways[fd][1].append((due, os.read(fd, 1 << 16)))


if __name__ == "__main__":
    devices = [device_in(name) for name in sys.argv[1:3]]
    print("ready", flush=True)
    carry(*devices, float(sys.argv[3]))
