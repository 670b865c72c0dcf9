"""How many processes of this host hold a connection to the store of the process group, as the kernel lists them.

Every rank holds one from ``init_process_group`` on, as long as its process lives. So this tells that a rank is gone
which has not come to its first call of this package, where the backend of the group has nothing that would.
"""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

_ESTABLISHED, _LISTENS = "01", "0A"


class _KernelRow(NamedTuple):
    """One connection of the kernel's list: addresses with ports, as it writes them."""

    local: str
    remote: str
    state: str
    inode: str


def clients_of(store: object) -> int | None:
    """Processes that are connected to ``store``; None where that cannot be known: it is served by another host or to
    one, it is no TCPStore, or the kernel does not show whose a connection is."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    port = getattr(store, "port", None)
    if not port:
        return None
    try:
        rows = _rows()
        here = f":{port:04X}"
        serves = [row for row in rows if row.local.endswith(here)]
        if not any(row.state == _LISTENS for row in serves):
            return None
        others = {(row.local, row.remote): row for row in rows}
        inodes = set()
        for row in serves:
            if row.state == _ESTABLISHED:
                client = others.get((row.remote, row.local))
                if client is None:
                    return None
                if client.state == _ESTABLISHED:
                    inodes.add(client.inode)
        owners = _owners(inodes)
    except OSError:
        return None
    return None if len(owners) < len(inodes) else len(set(owners.values()))


def _rows() -> list[_KernelRow]:
    rows = []
    for name in ("tcp", "tcp6"):
        with open(f"/proc/net/{name}") as f:
            for line in list(f)[1:]:
                words = line.split()
                rows.append(_KernelRow(_mapped(words[1]), _mapped(words[2]), words[3], words[9]))
    return rows


def _mapped(address: str) -> str:
    """An address of IPv4 that is written as one of IPv6 is the same."""
    return address.removeprefix("0000000000000000FFFF0000")


def _owners(inodes: set[str]) -> dict[str, int]:
    """The process that holds each of these sockets; of several, which share one after a fork, the first."""
    found: dict[str, int] = {}
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            fds = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue  # it has ended, or is another user's
        for fd in fds:
            # Some are closed by now: that of the listing itself, where this process is the one that is listed.
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.startswith("socket:[") and target[8:-1] in inodes:
                    found.setdefault(target[8:-1], pid)
    return found
