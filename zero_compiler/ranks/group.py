"""The ranks over which a model is partitioned, and what they talk over."""

from __future__ import annotations

import atexit
import functools
import gc
import math
import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ..errors import ShardError, TransferError
from .store_requests import StoreRequests

# The engine says the same of a transfer (csrc/src/c10d_transport.cc).
DESTROYED = (
    "the process group over which the model was sharded has been destroyed; call "
    "torch.distributed.destroy_process_group after the last use of the model, or make the model again over a new group"
)


FORKED = (
    "this is a forked child of a process with a process group, which has no part in it: call sharded models of several "
    'ranks in the process that made them, or start the child by "spawn" and make a process group in it'
)
# Of the process from which this one was forked. Their threads are not here, and their sockets are the parent's.
_inherited: weakref.WeakSet[object] = weakref.WeakSet()


def _forked() -> None:
    if dist.is_available() and dist.is_initialized():
        _inherited.update(pg for pg in dist.distributed_c10d._world.pg_map if _is_group(pg))


def _is_group(pg: object) -> bool:
    return isinstance(pg, dist.ProcessGroup)


os.register_at_fork(after_in_child=_forked)


def check_own(pg: dist.ProcessGroup) -> None:
    """Raise where ``pg`` is a process group of the process from which this one was forked: it would wait for ever.

    Raises:
        TransferError: it is.
    """
    if _inherited and pg in _inherited:
        raise TransferError(FORKED)


def link_to(pg: dist.ProcessGroup) -> weakref.ref[dist.ProcessGroup]:
    """What a :class:`Group` keeps of a process group, which is to end where the user destroys it.

    Until then torch keeps the object itself, by which it knows a group.
    """
    check_own(pg)
    _linked.add(pg)
    return weakref.ref(pg)


_linked: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


@atexit.register
def release_destroyed() -> None:
    """Have torch let go of groups that were destroyed: their threads would run on while the interpreter ends, and one
    that drops a tensor then aborts the process.

    A mesh holds its groups as long as it lives, that of each parameter and the copies that Dynamo compares it with.
    """
    left = [pg for pg in _linked if not is_registered(pg)]
    if not left:
        return
    gc.unfreeze()  # it does not list what a training loop has frozen
    for mesh in gc.get_objects():
        if type(mesh) is DeviceMesh:
            held = getattr(mesh, "_pg_registry", {})
            for name in [n for n, pg in held.items() if any(pg is one for one in left)]:
                del held[name]


def is_registered(pg: dist.ProcessGroup) -> bool:
    """Whether torch knows a process group, which it does until it is destroyed. Others may hold it for longer, and it
    may go on sending."""
    try:
        dist.get_global_rank(pg, 0)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Group:
    """The ranks over which a model is partitioned, and what is needed to talk over them.

    Args:
        mesh: on which parameters lie at rest; ``roles`` says what each of its dimensions is for (see `mesh.py`).
        link: :func:`link_to` the process group of the ranks; None at world size 1 without one, where
            ``dist.is_initialized()`` stays False, and for ranks that are only planned for.
        rank, world: the ranks that hold parts of the same parameters.
        across: the ranks that hold the same rows as this one (hybrid sharding); None where there is no other.
        whole: all ranks of the mesh, where those are more than ``world``.
        tensor: the ranks over which tensor parallelism has placed parameters, on a mesh of their own; None where there
            are none.
    """

    mesh: DeviceMesh
    link: weakref.ref[dist.ProcessGroup] | None
    rank: int
    world: int
    device: torch.device
    roles: tuple[str, ...] = ("shard",)
    across: Group | None = None
    whole: Group | None = None
    tensor: Group | None = None

    @property
    def pg(self) -> Any:
        """The process group, for one call; None where there never was one.

        Raises:
            TransferError: it has been destroyed.
        """
        if self.link is None:
            return None
        pg = self._found()
        if pg is None:
            raise TransferError(DESTROYED)
        check_own(pg)
        return pg

    @property
    def destroyed(self) -> bool:
        """Whether there was a process group, and is none any more."""
        return self.link is not None and self._found() is None

    def _found(self) -> dist.ProcessGroup | None:
        pg = None if self.link is None else self.link()
        return pg if pg is not None and is_registered(pg) else None

    @property
    def everyone(self) -> Group:
        """All ranks of the mesh: those that must agree."""
        return self.whole or self

    @property
    def one_rank(self) -> bool:
        """Whether there is no other rank to agree with."""
        return self.everyone.link is None or self.everyone.world == 1

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the mesh, by their numbers in the job."""
        with torch._C.DisableTorchFunction():  # of a construction, say, which looks at every use of a tensor
            return tuple(sorted(self.mesh.mesh.flatten().tolist()))

    @property
    def copies(self) -> int:
        """How many ranks hold the same rows."""
        return self.across.world if self.across is not None else 1

    @property
    def data_ranks(self) -> int:
        """Over how many ranks gradients are averaged."""
        return self.world * self.copies

    def placements(self, sharded: bool, over: Placement | None = None) -> tuple[Placement, ...]:
        """Of a parameter on the mesh.

        Args:
            over: its placement over the tensor-parallel dimension.
        """
        out: list[Placement] = [Replicate()] * len(self.roles)
        if "tensor" in self.roles:
            out[self.roles.index("tensor")] = over or Replicate()
        if sharded:
            at = self.roles.index("shard")
            out[at] = Shard(0)
            if self.tensor is not None and over == Shard(0) and self.roles.index("tensor") > at:
                # A DTensor is sharded over the dimensions of its mesh from left to right, and this one was not.
                out[at] = _StridedShard(0, split_factor=self.tensor.world)
        return tuple(out)

    def placed(self, sharded: bool, over: Placement | None = None) -> str:
        """The same as text."""
        return ", ".join(
            "Replicate()" if p.is_replicate() else _text(p) for p in self.placements(sharded, over)
        )

    def check_still_valid(self) -> None:
        if self.link is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ShardError(
                "a process group was made after zero.shard, which had sharded for one process; "
                "call dist.init_process_group before zero.shard"
            )

    def name_of(self, rank: int) -> str:
        """A rank of this group, for messages; with its number in the job where that is another one."""
        pg = self._found()
        if pg is not None:
            everywhere = dist.get_global_rank(pg, rank)
            if everywhere != rank:
                return f"rank {rank} of {self.world} (rank {everywhere} of the job)"
        return f"rank {rank} of {self.world}"

    def __deepcopy__(self, memo: dict[int, object]) -> Group:
        return self  # ranks and links are not part of a model's value


def by_ranks(sharded_models: Iterable[Any]) -> list[Any]:
    """Sharded models that compute together, the one of the most ranks first, the others in the order in which they were
    made, which is the same on all ranks."""
    sharded_models = sorted(sharded_models, key=lambda p: p.identity.made)
    first = max(sharded_models, key=lambda p: p.group.everyone.world, default=None)
    return sorted(sharded_models, key=lambda p: p is not first)


def group_of(sharded_models: Iterable[object]) -> Group | None:
    """All ranks of sharded models that belong together; None where there is no model."""
    return next((p.group.everyone for p in by_ranks(sharded_models)), None)


def speaking(sharded_models: Iterable[object]) -> list[Any]:
    """The same. The ranks of the first one meet before they begin a call, and read each other's memory until it ends:
    those of the others are among them.

    Raises:
        ShardError: they are not.
    """
    sharded_models = by_ranks(sharded_models)
    known = [set(p.group.mesh.mesh.flatten().tolist()) for p in sharded_models]
    for sharded_model, ranks in zip(sharded_models, known, strict=True):
        if not ranks <= known[0]:
            titles = sharded_models[0].identity.title(), sharded_model.identity.title()
            raise ShardError(
                f"{titles[0]} is sharded over ranks {sorted(known[0])} and {titles[1]}, which computes with it, over "
                f"ranks {sorted(ranks)}; give zero.shard a mesh for the one that has all ranks of the other"
            )
    return sharded_models


def _text(placement: Any) -> str:
    return f"Shard({placement.dim})"


def store_of(group: Group, within_s: float = math.inf) -> StoreRequests:
    """The store that the group's ranks share, for requests that end when its timeout is over.

    Args:
        within_s: seconds after which they end, if those are fewer.

    Raises:
        TransferError: the process group has been destroyed. There may be a new one, with another store.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    if group.link is not None and group.pg is None:
        raise TransferError(DESTROYED)
    return StoreRequests(_get_default_store(), min(within_s, group_timeout_s(group)))


def in_store(group: Group, key: str) -> str:
    """The name in the store of what the ranks of the group call ``key``."""
    pg = group.pg
    first = 0 if pg is None else dist.get_global_rank(pg, 0)
    return f"zero/{getattr(pg, 'group_name', '0')}.{first}/{key}"


def first_rank(group: Group) -> int:
    """Number in the job of the first rank of a group: tells apart the groups along one dimension of a mesh."""
    pg = group.pg
    return dist.get_global_rank(pg, 0) if pg is not None else 0


def group_timeout_s(group: Group) -> float:
    try:
        return float(group.pg._get_backend(torch.device(group.device.type)).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return 1800.0
