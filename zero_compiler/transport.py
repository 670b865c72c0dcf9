"""Which way bytes take between the ranks of one sharded model: chosen by rule, once, by all ranks together.

"shared": ranks are CPU processes of one host. What lies at rest lies in one memory file that all of them map,
rank after rank for each parameter, so that the full weight is there already: a gather in the parameter's own
dtype moves nothing. "c10d": the process group's collectives, on any device, across hosts. "local": one rank.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from .arena import aligned
from .errors import ShardError
from .group import Group, first_rank, group_timeout_s, post_text, read_texts
from .layout import Layout

# Spaces of the memory file, which is sparse: see csrc/include/zero/shared_transport.h.
SPACE_BYTES = 1 << 40
_HOME = 1 * SPACE_BYTES
_MAGIC = b"zero shared segment\0"


class Segment:
    """This rank's end of the memory file of one sharded model: the chunks at rest of every rank.

    Every rank allocates the same parameters in the same order. The file has no name, so nothing is left of it
    when the last rank is gone. Tensors made here keep their memory mapped.
    """

    def __init__(self, fd: int, rank: int, pids: list[int], nbytes: int, timeout_s: float) -> None:
        self.fd, self.rank, self.pids, self.timeout_s = fd, rank, pids, timeout_s
        self._home = mmap.mmap(fd, max(nbytes, 1), offset=_HOME)
        self._end = 0
        # Of each parameter, where they lie: the full weight, with every rank's rows as they are now, and this
        # rank's flat padded chunk.
        self.fulls: dict[str, torch.Tensor] = {}
        self.chunks: dict[str, torch.Tensor] = {}

    def __del__(self) -> None:
        os.close(self.fd)

    def allocate(self, name: str, layout: Layout) -> torch.Tensor:
        """This rank's padded chunk of a parameter that is cut; zeros at first."""
        size = layout.bytes_local()
        whole = self._at(self._end, layout.world * size, layout.dtype)
        # A storage of its own: what is written past the end of a chunk is an error, and not the next rank's.
        chunk = self._at(self._end + self.rank * size, size, layout.dtype)
        self._end += home_bytes(layout)
        self.fulls[name] = whole[: layout.numel].view(layout.shape)
        self.chunks[name] = chunk
        return chunk.view(layout.padded_shape)

    def _at(self, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.frombuffer(self._home, dtype=torch.uint8, offset=offset, count=nbytes).view(dtype)

    def for_engine(self) -> tuple[int, int, list[int], float, int]:
        rest = sum(c.nbytes for c in self.chunks.values())
        return (self.fd, SPACE_BYTES, self.pids, self.timeout_s, rest)


@dataclass(frozen=True)
class Transport:
    """What was chosen ("shared", "c10d" or "local"), why, and the segment where it is "shared"."""

    name: str
    reason: str
    segment: Segment | None = None

    @property
    def shared(self) -> bool:
        return self.segment is not None


LOCAL = Transport("local", "one rank")
COPIED = Transport("c10d", "a copy of a sharded model has its shards in memory of its own")


def home_bytes(layout: Layout) -> int:
    """Bytes that a parameter takes in the segment: none where it is not cut."""
    return aligned(layout.world * layout.bytes_local()) if layout.cut else 0


def choose(group: Group, asked: str, key: str, layouts: Iterable[Layout]) -> Transport:
    """The transport of one sharded model. Collective: every rank chooses the same, through the store.

    Args:
        asked: "auto", "c10d" or "shared" (``Config.transport``).
        key: names the model in the store.
        layouts: those of its parameters.

    Raises:
        ShardError: on every rank, when "shared" was asked for and cannot be.
    """
    if group.world == 1 or group.pg is None:
        return LOCAL
    if asked == "c10d":
        return Transport("c10d", "asked for")
    if group.device.type != "cpu":
        problem: str | None = f"the compute device is {group.device}"
        segment = None
    else:
        segment, problem = _meet(group, key, sum(home_bytes(x) for x in layouts))
    if segment is not None:
        reason = f"{group.world} CPU ranks of one host" + (", asked for" if asked == "shared" else "")
        return Transport("shared", reason, segment)
    if asked == "shared":
        raise ShardError(f'transport="shared" is not possible: {problem}; use "auto" or "c10d"')
    return Transport("c10d", f"no shared memory: {problem}")


def _meet(group: Group, key: str, nbytes: int) -> tuple[Segment | None, str | None]:
    """Rank 0 makes the memory file, the others open it; a sentence instead where one of them could not."""
    timeout_s = group_timeout_s(group)
    fd = -1
    mine: dict[str, Any] = {"pid": os.getpid(), "problem": None}
    try:
        host = _host()
        if group.rank == 0:
            token = secrets.token_hex(16)
            fd = _make(token, nbytes)
            post_text(
                group, f"{key}/file", json.dumps({"fd": fd, "pid": os.getpid(), "token": token, **host})
            )
        else:
            found = read_texts(group, f"{key}/file", timeout_s, ranks=(0,))
            if 0 not in found:
                mine["problem"] = "rank 0 made no memory file"
            else:
                fd = _open(json.loads(found[0]), host)
    except (OSError, AttributeError, ValueError) as error:
        mine["problem"] = str(error)
        if group.rank == 0:
            post_text(group, f"{key}/file", json.dumps({"problem": str(error)}))
    # Whoever shares no memory with this rank must choose the same, too.
    everyone = group.everyone
    post_text(everyone, key, json.dumps(mine | {"first": first_rank(group), "rank": group.rank}))
    said = {r: json.loads(t) for r, t in read_texts(everyone, key, timeout_s).items()}
    problem = next(
        (
            f"rank {r}: {said[r]['problem'] if r in said else 'did not arrive in time'}"
            for r in range(everyone.world)
            if r not in said or said[r]["problem"]
        ),
        None,
    )
    if problem is None:
        pids = {s["rank"]: s["pid"] for s in said.values() if s["first"] == first_rank(group)}
        return Segment(fd, group.rank, [pids[r] for r in range(group.world)], nbytes, timeout_s), None
    if fd >= 0:
        os.close(fd)
    return None, problem


def _host() -> dict[str, str]:
    with open("/proc/sys/kernel/random/boot_id") as f:
        return {"boot": f.read().strip(), "name": os.uname().nodename}


def _make(token: str, nbytes: int) -> int:
    """A memory file with room for the shards; its first page tells it from any other file."""
    available = _available_bytes()
    if available is not None and nbytes > available:
        raise OSError(
            f"the parameters need {nbytes:,} bytes of shared memory, and {available:,} are available"
        )
    fd = os.memfd_create("zero-segment", os.MFD_CLOEXEC)
    try:
        os.pwrite(fd, _MAGIC + token.encode(), 0)
        os.posix_fallocate(fd, _HOME, max(nbytes, 1))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open(file: dict[str, Any], host: dict[str, str]) -> int:
    if "problem" in file:
        raise OSError(f"rank 0 could make no memory file ({file['problem']})")
    if file["boot"] != host["boot"]:
        raise OSError(f"it runs on {host['name']!r}, another host than rank 0 on {file['name']!r}")
    fd = os.open(f"/proc/{file['pid']}/fd/{file['fd']}", os.O_RDWR | os.O_CLOEXEC)
    # In another namespace of processes the same number may be another process.
    mark = _MAGIC + file["token"].encode()
    if os.pread(fd, len(mark), 0) != mark:
        os.close(fd)
        raise OSError("rank 0 is in another namespace of processes")
    return fd


def _available_bytes() -> int | None:
    try:
        with open("/proc/meminfo") as f:
            for line in f:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
