"""Which way bytes take between the ranks of one sharded model: chosen by rule, once, by all ranks together.

"shared": ranks are CPU processes of one host. What lies at rest lies in one memory file that all of them map,
rank after rank for each parameter, so that the full weight is there already: a gather in the parameter's own
dtype moves nothing. "shared+c10d": of several hosts, equally many on each; what crosses to a host does so once, and
its ranks copy it, or add it up, in memory. "c10d": the process group's collectives, on any device. "local": one rank.
"""

from __future__ import annotations

import ctypes
import functools
import json
import logging
import mmap
import os
import secrets
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..alignment import arena_aligned
from ..errors import ShardError, TransferError
from ..layout import Layout
from ..torch_cpp import move_if_shared
from .agreement import post_text, read_texts
from .group import DESTROYED, Group, first_rank, group_timeout_s, store_of
from .peer_waits import answered

log = logging.getLogger("zero_compiler")

# Spaces of the memory file, which is sparse: see csrc/include/zero/shared_transport.h.
SPACE_BYTES = 1 << 40
_HOME = 1 * SPACE_BYTES
_MAGIC = b"zero shared segment\0"


class Segment:
    """This rank's end of the memory file of one sharded model: the chunks at rest of every rank.

    Every rank allocates the same parameters in the same order. The file has no name, so nothing is left of it
    when the last rank is gone. Tensors made here keep their memory mapped.
    """

    def __init__(self, fd: int, home: mmap.mmap, rank: int, pids: list[int], timeout_s: float) -> None:
        self.fd, self.rank, self.pids, self.timeout_s = fd, rank, pids, timeout_s
        self._home = home  # what lies at rest there
        self._end = 0
        # Of each parameter, where they lie: the full weight, with every rank's rows as they are now, and this
        # rank's flat padded chunk, with its offset in the file.
        self.fulls: dict[str, torch.Tensor] = {}
        self.chunks: dict[str, torch.Tensor] = {}
        self._begins: dict[str, int] = {}

    def __del__(self) -> None:
        os.close(self.fd)

    def allocate(self, name: str, layout: Layout) -> None:
        """Give a parameter that is sharded its place. It takes no memory there until :meth:`back`: what is to lie in it
        lies elsewhere yet, and would count twice."""
        size = layout.bytes_local()
        whole = self._at(self._end, layout.world * size, layout.dtype)
        # A storage of its own: what is written past the end of a chunk is an error, and not the next rank's.
        self._begins[name] = self._end + self.rank * size
        self.chunks[name] = self._at(self._begins[name], size, layout.dtype)
        self._end += home_bytes(layout)
        self.fulls[name] = whole[: layout.numel].view(layout.shape)

    def back(self, name: str) -> torch.Tensor:
        """This rank's flat padded chunk of a parameter, to be written, with memory behind it from here on; zeros at
        first.

        What lies there is left to whoever still holds it, in other memory: another parameter, where two have exchanged
        places or one was put into another model, a state_dict, or what autograd has saved.

        Raises:
            ShardError: there is no memory. (A touch would end the process then.)
        """
        chunk = self.chunks[name]
        if move_if_shared(chunk):
            chunk = self.chunks[name] = self._at(self._begins[name], chunk.nbytes, chunk.dtype)
        try:
            os.posix_fallocate(self.fd, _HOME + self._begins[name], chunk.nbytes)
        except OSError as error:
            raise ShardError(
                f"parameter {name}: {chunk.nbytes:,} bytes of shared memory could not be had ({error.strerror}); free "
                'some, or give zero.shard transport="c10d"'
            ) from None
        return chunk

    def _at(self, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.frombuffer(self._home, dtype=torch.uint8, offset=offset, count=nbytes).view(dtype)

    def for_engine(self) -> tuple[int, int, list[int], float, int]:
        rest = sum(c.nbytes for c in self.chunks.values())
        return (self.fd, SPACE_BYTES, self.pids, self.timeout_s, rest)


class Hosts:
    """This rank's end of what the ranks of several hosts talk over.

    Args:
        segment: memory of the ranks of this host; nothing lies at rest in it.
        across: process group of the ranks with the same place, one a host. Nobody else holds it.
        pg: the model's process group, with which ``across`` ends.
    """

    def __init__(self, segment: Segment, across: object, pg: dist.ProcessGroup) -> None:
        self.segment = segment
        self._across = held = [across]
        self._until = weakref.ref(pg, lambda _: held.clear())

    def for_engine(self) -> tuple[object, int, tuple[int, int, list[int], float, int]]:
        if not self._across:
            raise TransferError(DESTROYED)
        return (self._across[0], self.segment.rank, self.segment.for_engine())


@dataclass(frozen=True)
class Transport:
    """What was chosen ("shared", "shared+c10d", "c10d" or "local"), why, and what it works with; ``between``: of
    "shared+c10d", how many hosts."""

    name: str
    reason: str
    segment: Segment | None = None
    hosts: Hosts | None = None
    between: int = 1

    @property
    def shared(self) -> bool:
        """Whether every rank maps what lies at rest on all of them."""
        return self.name == "shared"


LOCAL = Transport("local", "one rank")
COPIED = Transport("c10d", "a copy of a sharded model has its shards in memory of its own")


def home_bytes(layout: Layout) -> int:
    """Bytes that a parameter takes in the segment: none where it is not sharded."""
    return arena_aligned(layout.world * layout.bytes_local()) if layout.sharded else 0


def choose(
    group: Group,
    asked: str,
    key: str,
    layouts: Iterable[Layout],
    unplanned: str | None = None,
    per_host: int | None = None,
) -> Transport:
    """The transport of one sharded model. Collective: every rank chooses the same, through the store.

    Args:
        asked: "auto", "c10d" or "shared" (``Config.transport``).
        key: names the model in the store.
        layouts: those of its parameters.
        unplanned: why no plan can be made for "shared", in words; between several hosts c10d is planned for.
        per_host: of ranks that are only planned for, how many lie on a host; None: not known.

    Raises:
        ShardError: on every rank, when "shared" was asked for and cannot be.
    """
    if group.world == 1:
        return LOCAL
    if group.link is None:  # ranks that are planned for, and do not run
        if asked == "auto":
            where = "any hosts" if per_host is None else hosts_text(group.mesh.size(), per_host)
            return Transport("c10d", f"planned for ranks on {where}")
        if asked == "shared" and per_host is not None and group.world > per_host:
            return _planned_between(group.world, per_host)
        return Transport(asked, "asked for")
    if asked == "c10d":
        return Transport("c10d", "asked for")
    problem: str | None = None
    if group.device.type != "cpu":
        problem = f"the compute device is {group.device}"
    else:
        found = _set_up_together(group, key, sum(home_bytes(x) for x in layouts), unplanned)
        if isinstance(found, Transport):
            return found
        problem = found
    if asked == "shared":
        raise ShardError(f'transport="shared" is not possible: {problem}; use "auto" or "c10d"')
    if _UNWATCHED in problem and group.everyone.rank == 0:
        _say_slower(problem)
    return Transport("c10d", f"no shared memory: {problem}")


def hosts_text(ranks: int, per_host: int) -> str:
    """On how many hosts so many ranks lie, in words."""
    hosts = -(-ranks // per_host)
    return "one host" if hosts == 1 else f"{hosts:,} hosts, {per_host} on each"


def rank_hosts(group: Group, key: str) -> dict[int, int] | None:
    """On which host each rank of the mesh is, by its number in the job; None where a rank cannot tell. Collective.

    Args:
        key: as for :func:`choose`.
    """
    everyone = group.everyone
    try:
        host = _host()
    except OSError:
        host = ""  # peers wait to hear
    post_text(everyone, f"{key}/where", json.dumps([dist.get_rank(), host]))
    found = [json.loads(text) for text in read_texts(everyone, f"{key}/where", _CHOOSING).values()]
    names = {name: at for at, name in enumerate(dict.fromkeys(name for _, name in found))}
    return None if "" in names else {rank: names[name] for rank, name in found}


@functools.cache
def _say_slower(problem: str) -> None:
    """Once: nothing else would show that the faster way is closed here."""
    log.warning("ranks of one host share no memory, and use the process group: %s", problem)


def _set_up_together(group: Group, key: str, nbytes: int, unplanned: str | None) -> Transport | str:
    """The first rank of each host makes a memory file, the others open it; a sentence where one of them could not."""
    timeout_s = group_timeout_s(group)
    fd, home = -1, None
    inside: list[int] = []
    hosts = 0
    mine: dict[str, object] = {"pid": os.getpid(), "problem": None}
    try:
        inside, hosts = _neighbours(group, key)
        if hosts == 1 and unplanned is not None:
            raise ValueError(unplanned)
        _check_watching()
        # What lies at rest is shared where all ranks can map it.
        nbytes = nbytes if hosts == 1 else 0
        if group.rank == inside[0]:
            token = secrets.token_hex(16)
            fd = _make(token, nbytes)
            post_text(group, f"{key}/file", json.dumps({"fd": fd, "pid": os.getpid(), "token": token}))
        else:
            found = read_texts(group, f"{key}/file", _CHOOSING, ranks=inside[:1])
            fd = _open(json.loads(found[inside[0]]), inside[0])
        home = mmap.mmap(fd, max(nbytes, 1), offset=_HOME)
    except (OSError, AttributeError, ValueError) as error:
        mine["problem"] = str(error)
        if inside and group.rank == inside[0]:
            post_text(group, f"{key}/file", json.dumps({"problem": str(error)}))
    # Whoever shares no memory with this rank must choose the same, too.
    everyone = group.everyone
    mine |= {"first": first_rank(group), "rank": group.rank, "hosts": hosts}
    post_text(everyone, key, json.dumps(mine))
    said = {r: json.loads(t) for r, t in read_texts(everyone, key, _CHOOSING).items()}
    problem = _first_problem(said)
    if problem is not None:
        if fd >= 0:
            os.close(fd)
        return problem
    pids = {s["rank"]: s["pid"] for s in said.values() if s["first"] == first_rank(group)}
    place = inside.index(group.rank)
    assert home is not None
    segment = Segment(fd, home, place, [pids[r] for r in inside], timeout_s)
    if hosts == 1:
        return Transport("shared", f"{group.world} CPU ranks of one host", segment)
    name, host = f"zero/{key}/{first_rank(group)}/{place}", inside[0] // len(inside)
    with answered(group, _CHOOSING):
        across = store_of(group).ask(lambda store: _gloo(store, name, host, hosts, timeout_s))
    reason = f"{hosts} hosts with {len(inside)} CPU ranks each"
    return Transport("shared+c10d", reason, hosts=Hosts(segment, across, group.pg), between=hosts)


def segment_within(group: Group, key: str, inside: list[int]) -> Segment:
    """Another memory file of the ranks ``inside``, which are on one host; nothing lies at rest in it. Collective over
    them."""
    fd, mine = -1, dict[str, object](pid=os.getpid())
    if group.rank == inside[0]:
        token = secrets.token_hex(16)
        fd = _make(token, 0)
        mine |= {"fd": fd, "token": token}
    post_text(group, f"{key}/second", json.dumps(mine))
    found = read_texts(group, f"{key}/second", _CHOOSING, ranks=inside)
    said = {rank: json.loads(text) for rank, text in found.items()}
    if fd < 0:
        fd = _open(said[inside[0]], inside[0])
    home = mmap.mmap(fd, 1, offset=_HOME)
    pids = [said[rank]["pid"] for rank in inside]
    return Segment(fd, home, inside.index(group.rank), pids, group_timeout_s(group))


def _planned_between(world: int, per_host: int) -> Transport:
    """What ranks would take that are asked to share memory, and are only planned for.

    Raises:
        ShardError: they could not.
    """
    if per_host == 1 or world % per_host:
        raise ShardError(
            f'transport="shared" is not possible for {world} ranks with {per_host} on a host, as the hardware file '
            'says: several hosts must have equally many, and more than one; use "auto" or "c10d"'
        )
    hosts = world // per_host
    return Transport("shared+c10d", f"{hosts} hosts with {per_host} CPU ranks each", between=hosts)


def _gloo(store: dist.Store, name: str, rank: int, world: int, timeout_s: float) -> dist.ProcessGroup:
    """A process group of one model, which ends with it: transfers of two models may overlap in any order.

    Not by ``dist.new_group``, whose groups last until they are destroyed, and whose names come from their ranks.
    """
    prefix = dist.PrefixStore(name, store)
    group = dist.ProcessGroup(prefix, rank, world)
    backend = dist.ProcessGroupGloo(prefix, rank, world, timedelta(seconds=timeout_s))
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def _neighbours(group: Group, key: str) -> tuple[list[int], int]:
    """The ranks of this rank's host, and how many hosts there are.

    Raises:
        OSError: a rank cannot tell on which host it runs; or hosts have one rank each, or different numbers of them, or
            ranks are not numbered host by host.
    """
    try:
        host = _host()
    except OSError:
        host = ""  # peers wait to hear
    post_text(group, f"{key}/host", host)
    found = read_texts(group, f"{key}/host", _CHOOSING)
    for rank in range(group.world):
        if not found[rank]:
            raise OSError(f"rank {rank} cannot tell on which host it runs (it reads /proc)")
    by_host: dict[str, list[int]] = {}
    for rank in range(group.world):
        by_host.setdefault(found[rank], []).append(rank)
    places = group.world // len(by_host)
    if places == 1:
        raise OSError(f"each of {len(by_host)} hosts has one rank")
    for ranks in by_host.values():
        if ranks != list(range(ranks[0], ranks[0] + places)):
            listed = "; ".join(", ".join(map(str, r)) for r in by_host.values())
            raise OSError(
                f"of {len(by_host)} hosts each must have as many ranks as the others, with numbers that follow each "
                f"other, and they have ranks {listed}"
            )
    return by_host[host], len(by_host)


def _first_problem(said: dict[int, dict[str, object]]) -> str | None:
    for rank in sorted(said):
        if said[rank]["problem"]:
            return f"rank {rank}: {said[rank]['problem']}"
    if len({s["hosts"] for s in said.values()}) > 1:
        return "groups of ranks along one dimension of the mesh lie on different numbers of hosts"
    return None


_CHOOSING = "choice of the transport"
_UNWATCHED = "processes cannot be watched here"
_PIDFD_OPEN = 434  # Python has no name for it where it was built on an older kernel


def _check_watching() -> None:
    """The engine asks the kernel whether a peer that it waits for still runs.

    Raises:
        OSError: a kernel before Linux 5.3, or a sandbox, does not let it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(ctypes.c_long(_PIDFD_OPEN), ctypes.c_int(os.getpid()), ctypes.c_uint(0))
    if fd < 0:
        why = os.strerror(ctypes.get_errno())
        raise OSError(f"{_UNWATCHED} (pidfd_open: {why}), which takes Linux 5.3 and a sandbox that allows it")
    os.close(fd)


def _host() -> str:
    """Equal on ranks that can open each other's files through /proc: of one host, in one namespace of processes."""
    with open("/proc/sys/kernel/random/boot_id") as f:
        boot = f.read().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _make(token: str, nbytes: int) -> int:
    """A memory file of a size for the shards, without memory for them; its first page tells it from any other file."""
    available = _available_bytes()
    if available is not None and nbytes > available:
        raise OSError(
            f"the parameters need {nbytes:,} bytes of shared memory, and {available:,} are available"
        )
    fd = os.memfd_create("zero-segment", os.MFD_CLOEXEC)
    try:
        os.pwrite(fd, _MAGIC + token.encode(), 0)
        os.ftruncate(fd, _HOME + max(nbytes, 1))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open(file: dict[str, Any], maker: int) -> int:
    if "problem" in file:
        raise OSError(f"rank {maker} could make no memory file ({file['problem']})")
    fd = os.open(f"/proc/{file['pid']}/fd/{file['fd']}", os.O_RDWR | os.O_CLOEXEC)
    mark = _MAGIC + file["token"].encode()
    if os.pread(fd, len(mark), 0) != mark:
        os.close(fd)
        raise OSError(f"what rank {maker} made is not what this rank finds under its name")
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
