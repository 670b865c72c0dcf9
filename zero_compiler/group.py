"""The ranks over which a model is partitioned, and the agreement between them.

Agreement comes before any collective that could hang. What ranks must share is described through the process group's
store. Before a call, headers of one size are exchanged, in which ranks find out that they are in different calls: by
messages between CPU ranks, and on a group without gloo by one all-gather, which fits that of a peer whatever call the
peer is in, since each begins with it.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from .errors import RankMismatchError, ShardError, TransferError, ZeroError
from .failing import Failure

# torch 2.13 renamed both and warns of the old names.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Group:
    """The ranks over which a model is partitioned, and what is needed to talk over them.

    ``pg`` is None at world size 1 without a process group; ``dist.is_initialized()`` then stays False.

    Args:
        mesh: on which parameters lie at rest; ``roles`` says what each of its dimensions is for (see `mesh.py`).
        pg, rank, world: the ranks that hold parts of the same parameters.
        across: the ranks that hold the same rows as this one (hybrid sharding); None where there is no other.
        whole: all ranks of the mesh, where those are more than ``world``.
        tensor: the ranks over which tensor parallelism has placed parameters, on a mesh of their own; None where there
            are none.
    """

    mesh: DeviceMesh
    pg: Any
    rank: int
    world: int
    device: torch.device
    roles: tuple[str, ...] = ("shard",)
    across: Group | None = None
    whole: Group | None = None
    tensor: Group | None = None

    @property
    def everyone(self) -> Group:
        """All ranks of the mesh: those that must agree."""
        return self.whole or self

    @property
    def copies(self) -> int:
        """How many ranks hold the same rows."""
        return self.across.world if self.across is not None else 1

    @property
    def data_ranks(self) -> int:
        """Over how many ranks gradients are averaged."""
        return self.world * self.copies

    def placements(self, cut: bool, over: Placement | None = None) -> tuple[Placement, ...]:
        """Of a parameter on the mesh.

        Args:
            over: its placement over the tensor-parallel dimension.
        """
        out: list[Placement] = [Replicate()] * len(self.roles)
        if "tensor" in self.roles:
            out[self.roles.index("tensor")] = over or Replicate()
        if cut:
            at = self.roles.index("shard")
            out[at] = Shard(0)
            if self.tensor is not None and over == Shard(0) and self.roles.index("tensor") > at:
                # A DTensor is cut over the dimensions of its mesh from left to right, and this one was not.
                out[at] = _StridedShard(0, split_factor=self.tensor.world)
        return tuple(out)

    def placed(self, cut: bool, over: Placement | None = None) -> str:
        """The same as text."""
        return ", ".join("Replicate()" if p.is_replicate() else _text(p) for p in self.placements(cut, over))

    def check_still_valid(self) -> None:
        if self.pg is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ShardError(
                "a process group was made after zero.shard, which had sharded for one process; "
                "call dist.init_process_group before zero.shard"
            )

    def name_of(self, rank: int) -> str:
        """A rank of this group, for messages; with its number in the job where that is another one."""
        if self.pg is not None and dist.is_initialized():
            everywhere = dist.get_global_rank(self.pg, rank)
            if everywhere != rank:
                return f"rank {rank} of {self.world} (rank {everywhere} of the job)"
        return f"rank {rank} of {self.world}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # ranks and links are not part of a model's value

    def __reduce__(self) -> Any:
        if self.mesh.ndim > 1:
            from .mesh import find_again

            return (
                find_again,
                (self.mesh, self.roles, self.everyone.rank, self.everyone.world, str(self.device)),
            )
        return (_find_again, (self.mesh, self.pg is not None, self.rank, self.world, str(self.device)))


def _find_again(mesh: DeviceMesh, has_pg: bool, rank: int, world: int, device: str) -> Group:
    """The group of a pickled model, in the process that loads it.

    Raises:
        ShardError: the file holds the shards of another rank, or of a job of another size.
    """
    other_way = (
        "; to go to another number of ranks, save model.state_dict() with torch.distributed.checkpoint and load it "
        "into a model that was sharded there"
    )
    there = dist.is_available() and dist.is_initialized()
    if not has_pg:
        if there and dist.get_world_size() > 1:
            raise ShardError(
                "this sharded model was pickled in one process without a process group, and is loaded on rank "
                f"{dist.get_rank()} of {dist.get_world_size()}{other_way}"
            )
        return Group(mesh, None, rank, world, torch.device(device))
    if not there:
        raise ShardError(
            f"this sharded model was pickled on rank {rank} of {world}, and there is no process group: call "
            f"torch.distributed.init_process_group with {world} ranks before loading{other_way}"
        )
    try:
        pg = mesh.get_group()
        ranks = dist.get_process_group_ranks(pg)
        here = dist.get_group_rank(pg, dist.get_rank())
    except (RuntimeError, ValueError, KeyError):
        raise ShardError(
            f"this sharded model was pickled on rank {rank} of {world} of a mesh that this job does not have: make "
            "the same device mesh before loading"
        ) from None
    if here != rank or ranks != mesh.mesh.flatten().tolist():
        raise ShardError(
            f"this sharded model was pickled on rank {rank} of {world}, and is loaded on rank {here} of {len(ranks)}: "
            f"every rank loads what it saved itself{other_way}"
        )
    return Group(mesh, pg, rank, world, torch.device(device))


def _text(placement: Any) -> str:
    return f"Shard({placement.dim})"


def digest(text: str) -> bytes:
    """32 bytes that stand for ``text`` in the agreement between ranks."""
    return hashlib.sha256(text.encode()).digest()


def store_of(group: Group) -> Any:
    """The store that the group's ranks share."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def post_text(group: Group, key: str, text: str) -> None:
    """Lay ``text`` where the other ranks of the group can read it."""
    store_of(group).set(f"zero/{_group_name(group)}/{key}/{group.rank}", text)


def read_texts(
    group: Group, key: str, timeout_s: float, ranks: Iterable[int] | None = None
) -> dict[int, str]:
    """Texts that the ranks (default: all) posted under ``key``; a rank that posted none in time is left out."""
    store = store_of(group)
    out: dict[int, str] = {}
    for rank in range(group.world) if ranks is None else ranks:
        name = f"zero/{_group_name(group)}/{key}/{rank}"
        try:
            store.wait([name], timedelta(seconds=timeout_s))
            out[rank] = store.get(name).decode()
        except (RuntimeError, dist.DistStoreError):
            continue
    return out


def first_rank(group: Group) -> int:
    """Number in the job of the first rank of a group: tells apart the groups along one dimension of a mesh."""
    return dist.get_global_rank(group.pg, 0) if group.pg is not None else 0


def _group_name(group: Group) -> str:
    return f"{getattr(group.pg, 'group_name', '0')}.{first_rank(group)}"


def first_difference(a_text: str, b_text: str, a_name: str, b_name: str) -> str:
    """The first line in which two descriptions differ, and who said what."""
    a, b = a_text.splitlines(), b_text.splitlines()
    for left, right in zip(a, b, strict=False):
        if left != right:
            return f"{left.strip()!r} on {a_name}, {right.strip()!r} on {b_name}"
    if len(a) == len(b):
        return "nothing in their text"
    longer, who = (a, a_name) if len(a) > len(b) else (b, b_name)
    return f"{longer[min(len(a), len(b))].strip()!r} only on {who}"


def agree(group: Group, key: str, what: str, text: str) -> None:
    """Every rank of the mesh must say the same ``text`` under ``key``; blocks until all have spoken.

    Raises:
        RankMismatchError: on every rank, naming the first difference.
        ShardError: a rank did not speak within the process group's timeout.
    """
    group = group.everyone
    if group.pg is None or group.world == 1:
        return
    texts = show(group, key, text, what)
    # The same two ranks on every rank, so that all say the same.
    for rank in range(1, group.world):
        if texts[rank] != texts[0]:
            found = first_difference(texts[0], texts[rank], group.name_of(0), group.name_of(rank))
            raise RankMismatchError(f"ranks disagree about {what}: first difference: {found}")


# Headers -------------------------------------------------------------------------------------------------------

HEADER_BYTES = 32
_DIGEST_BYTES = 16
# Far from the small tags that people choose for their own messages, and not one of the engine's. One tag for all
# headers of a group, whichever model or eager weight they speak for: what arrives next is the peer's next call.
_HEADER_TAG = 0x59000000


def short_digest(text: str) -> bytes:
    """The first half of a header: what a rank is about to do."""
    return digest(text)[:_DIGEST_BYTES]


def meet(group: Group, doing: bytes, text: Callable[[], str], what: str, more: bytes = b"") -> list[bytes]:
    """Exchange headers before the first collective of a call; each rank's ``more``.

    A header has the same size whatever a rank is up to, so that ranks in different calls find out here, and
    not in collectives that do not fit together.

    Args:
        doing: :func:`short_digest` of ``text``, the description that ranks must share.
        what: the call, for messages.
        more: at most 16 bytes that may differ.

    Raises:
        RankMismatchError: on every rank, naming the first difference.
        TransferError: a peer did not answer.
        ZeroError: of a peer that could not compile its part of the call; see :func:`fail`.
    """
    group = group.everyone
    headers = _exchange(group, (doing + more).ljust(HEADER_BYTES, b"\0"), what)
    failed = next((h for h in headers if h.startswith(_FAILED)), None)
    if failed is not None:
        _failures[_group_name(group)] += 1
        raise _told(group, failed)
    if any(h[:_DIGEST_BYTES] != doing for h in headers):
        _explain(group, [h[:_DIGEST_BYTES] for h in headers], text())
    return [h[_DIGEST_BYTES:] for h in headers]


def _exchange(group: Group, mine: bytes, what: str) -> list[bytes]:
    """The headers of all ranks, in order, given this rank's.

    An accelerator's backend has no tags that would keep these messages apart from others, and reads no host memory:
    there an all-gather on the device carries them, and reading it waits for what the device was given before.
    """
    peer: int | None = None
    try:
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        if not _has_gloo(group):
            out = torch.empty(group.world * len(mine), dtype=torch.uint8, device=group.device)
            all_gather_flat(out, sent.to(group.device), group=group.pg)
            return [bytes(row) for row in out.view(group.world, -1).tolist()]
        got = torch.empty(group.world, len(mine), dtype=torch.uint8)
        got[group.rank] = sent
        others = [r for r in range(group.world) if r != group.rank]
        receives = []
        sends = []
        for peer in others:
            receives.append(group.pg.recv([got[peer]], peer, _HEADER_TAG))
        for peer in others:
            sends.append(group.pg.send([sent], peer, _HEADER_TAG))
        for whom, work in zip([*others, *others], [*receives, *sends], strict=True):
            peer = whom
            work.wait()
        return [row.numpy().tobytes() for row in got]
    except RuntimeError as error:
        who = "its peers" if peer is None else group.name_of(peer)
        reason = str(error).splitlines()[0]
        raise TransferError(
            f"{what}: {group.name_of(group.rank)} got no answer from {who}: {reason}"
        ) from error


def lay_text(group: Group, text: str, nbytes: int) -> bytes:
    """Lay ``text`` where peers find it (:func:`laid_text`) that are told what is returned, a part of a header."""
    group, name = group.everyone, digest(text)[:nbytes]
    store_of(group).set(f"zero/{_group_name(group)}/call/{name.hex()}", text)
    return name


def laid_text(group: Group, told: bytes) -> str | None:
    """What a peer laid there; None where it is not to be had."""
    group = group.everyone
    store, name = store_of(group), f"zero/{_group_name(group)}/call/{told.hex()}"
    try:
        store.wait([name], timedelta(seconds=min(10.0, group_timeout_s(group))))
        return str(store.get(name).decode())
    except (RuntimeError, dist.DistStoreError):
        return None


def _has_gloo(group: Group) -> bool:
    try:
        return group.pg._get_backend(torch.device("cpu")).name() == "gloo"
    except RuntimeError:
        return False


def _explain(group: Group, digests: list[bytes], text: str) -> NoReturn:
    store, prefix = store_of(group), f"zero/{_group_name(group)}/call"
    store.set(f"{prefix}/{digests[group.rank].hex()}", text)
    # The same two ranks on every rank, so that all say the same.
    other = next(r for r, d in enumerate(digests) if d != digests[0])
    texts = []
    for rank in (0, other):
        try:
            name = f"{prefix}/{digests[rank].hex()}"
            store.wait([name], timedelta(seconds=min(10.0, group_timeout_s(group))))
            texts.append(store.get(name).decode())
        except (RuntimeError, dist.DistStoreError):
            texts.append("a call that it does not describe")
    found = first_difference(texts[0], texts[1], group.name_of(0), group.name_of(other))
    raise RankMismatchError(f"ranks are in different calls; first difference: {found}")


# Failures ------------------------------------------------------------------------------------------------------

_FAILED = bytes(_DIGEST_BYTES)  # in a header: this rank cannot make the call, and the rest names the reason
_LOOK_S = 0.5  # so often a rank that waits for another one's text looks whether that has failed
# Calls of each group that ended because a rank could not compile its part. All ranks of a call count it, each once: so
# what one says of a failure is not found by a later attempt.
_failures: Counter[str] = Counter()


def _failure_key(group: Group) -> str:
    name = _group_name(group.everyone)
    return f"zero/{name}/failed/{_failures[name]}"


def _alone(group: Group) -> bool:
    return group.everyone.pg is None or group.everyone.world == 1


def warn_others(group: Group, failure: Failure) -> None:
    """Let ranks that wait for a text of this rank know that none will come."""
    if not _alone(group):
        store_of(group).set(_failure_key(group), failure.text())


def fail(group: Group, failure: Failure, new: bool) -> bool:
    """End a call that this rank cannot make, together with its peers: those that can make it are in :func:`meet`.

    Args:
        new: this rank holds no Program of the model yet.

    Returns whether no rank can make it, and it is ``new`` to all.

    Raises:
        TransferError: a peer did not answer.
    """
    if _alone(group):
        return new
    group = group.everyone
    warn_others(group, failure)
    said = lay_text(group, failure.text(), HEADER_BYTES - _DIGEST_BYTES - 1)
    headers = _exchange(group, _FAILED + bytes([new]) + said, "a call that could not be compiled")
    _failures[_group_name(group)] += 1
    return all(h.startswith(_FAILED + bytes([True])) for h in headers)


def _told(group: Group, header: bytes) -> ZeroError:
    """The error of a rank whose peer sent the ``header`` of a failure."""
    text = laid_text(group, header[_DIGEST_BYTES + 1 :])
    if text is None:
        return RankMismatchError("another rank could not compile its part of this call, and did not say why")
    return Failure.read(text).error()


def _await_text(group: Group, name: str, timeout_s: float, calls: Group) -> str | None:
    """What is posted under ``name``; None where nothing is in time.

    Args:
        calls: all ranks of the call; that of one which has failed may not come.

    Raises:
        ZeroError: that of such a rank.
    """
    store, end = store_of(group), time.monotonic() + timeout_s
    failed = _failure_key(calls)
    while (left := end - time.monotonic()) > 0:
        try:
            store.wait([name], timedelta(seconds=max(0.01, min(_LOOK_S, left))))
            return str(store.get(name).decode())
        except (RuntimeError, dist.DistStoreError):
            pass
        try:
            text = store.get(failed).decode() if store.check([failed]) else None
            if text is not None and store.check([name]):
                continue  # both came since: what was said before the failure holds
        except (RuntimeError, dist.DistStoreError):
            return None  # the store is gone
        if text is not None:
            raise Failure.read(text).error()
    return None


# Decisions -----------------------------------------------------------------------------------------------------


def decide(group: Group, key: str, text: str) -> str:
    """Rank 0's ``text``, for all ranks: a choice that may depend on local sizes is made once.

    Raises:
        RankMismatchError: rank 0 did not speak within the process group's timeout.
        ZeroError: of a rank that could not compile its part of the call.
    """
    group = group.everyone
    if group.pg is None or group.world == 1:
        return text
    if group.rank == 0:
        post_text(group, key, text)
        return text
    timeout_s = group_timeout_s(group)
    said = _await_text(group, f"zero/{_group_name(group)}/{key}/0", timeout_s, group)
    if said is None:
        raise RankMismatchError(f"{key}: rank 0 did not decide within {timeout_s:.0f} s")
    return said


def show(group: Group, key: str, text: str, what: str, calls: Group | None = None) -> list[str]:
    """Texts of all ranks of the group under ``key``, in order, given this rank's; blocks until all have spoken.

    Args:
        calls: all ranks of the call in which this is asked, where those are more than ``group``.

    Raises:
        RankMismatchError: a rank did not speak within the process group's timeout.
        ZeroError: of a rank that could not compile its part of the call.
    """
    post_text(group, key, text)
    timeout_s = group_timeout_s(group)
    texts = []
    for rank in range(group.world):
        said = _await_text(group, f"zero/{_group_name(group)}/{key}/{rank}", timeout_s, calls or group)
        if said is None:
            raise RankMismatchError(f"{what}: {group.name_of(rank)} did not arrive within {timeout_s:.0f} s")
        texts.append(said)
    return texts


def group_timeout_s(group: Group) -> float:
    try:
        return float(group.pg._get_backend(torch.device(group.device.type)).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return 1800.0
