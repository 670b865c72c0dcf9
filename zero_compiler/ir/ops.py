"""Schemas, fakes and eager meaning of the graph operators.

Two *markers* stand in captured graphs: ``zero.unshard`` where a full weight is read and
``zero.reduce_grad`` where a full gradient is born. Passes lower them to *transfers*: ``zero.gather`` and
``zero.reduce`` start one, ``zero.wait`` ends it, and ``zero.release`` ends the life of gathered weights.

Markers have an eager meaning, given by the owner that registers itself with :func:`bind_owner`: so a
marker in a graph that another backend runs is right too, only slower. Transfers run in Programs alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ..errors import ShardError


class Owner(Protocol):
    """What a marker needs of the sharded model that it belongs to."""

    @property
    def tiers(self) -> OwnerTiers: ...

    @property
    def gradients(self) -> OwnerGradients: ...

    def gather_now(self, name: str, shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor: ...

    def reduce_now(self, name: str, grad: torch.Tensor) -> torch.Tensor: ...


class OwnerTiers(Protocol):
    """The same of where its parameters rest."""

    def computes_on(self, name: str, shard: torch.Tensor) -> torch.device: ...


class OwnerGradients(Protocol):
    """The same of its gradients."""

    def landing(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None: ...


# Markers carry their owner by name, since a graph can hold no Python object. Weak: a name dies with its model.
_owners: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def bind_owner(key: str, owner: Owner) -> None:
    _owners[key] = owner


def owner_of(key: str) -> Any:
    owner = _owners.get(key)
    if owner is None:
        raise ShardError(f"the sharded model {key!r} of this graph no longer exists")
    return owner


def owners() -> list[Any]:
    """All sharded models of this process that still exist."""
    return list(_owners.values())


_lib = torch.library.Library("zero", "DEF")
_lib.define("unshard(Tensor shard, SymInt[] size, ScalarType dtype, str owner, str name) -> Tensor")
_lib.define("reduce_grad(Tensor grad, SymInt[] size, ScalarType dtype, str owner, str name) -> Tensor")
# dims[i] is the number of entries of `sizes` that belong to tensor i: schemas have no list of lists.
# A gather names the parameters at rest, as a load names memory: shards on other tiers are no graph inputs.
# With over="host" it is one among the ranks of a host, of the second shards that `keep_part` has left in forward.
_lib.define(
    "gather(str[] names, int[] sizes, int[] dims, ScalarType dtype, Device device, str over='') -> Tensor[]"
)
_lib.define("reduce(Tensor[] grads, int[] sizes, int[] dims, ScalarType dtype, bool replicated) -> Tensor[]")
_lib.define("wait(Tensor[] pending) -> Tensor[]")
_lib.define("release(Tensor(a!)[] fulls) -> ()")
# This rank's part of each of these full weights, which the ranks of a host share, is kept for backward.
_lib.define("keep_part(Tensor[] fulls) -> ()")
# A computation that is done tile by tile: what one tile does is a graph of its own (`facts.tiling`), and `body` names
# it, so that no two are equal. `cut` ends a compute segment: the tiles of one computation share what one compiles to.
_lib.define("tiled(Tensor[] inputs, str body) -> Tensor[]")
_lib.define("cut() -> ()")
# input @ weight.T + bias by oneDNN, in float32 on a CPU; any strides (see `passes/pick_kernels.py`).
_lib.define(
    "onednn_linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor", tags=(torch.Tag.flexible_layout,)
)
# a @ b, in memory from which the owner writes to files (see `passes/land_products.py`).
_lib.define("land_mm(Tensor a, Tensor b, str owner) -> Tensor", tags=(torch.Tag.flexible_layout,))
# This rank's part of a tensor that is the same on all ranks of a process group: flat, equally long on each.
_lib.define("part(Tensor whole, str group, int ranks) -> Tensor")

# A tensor that waits on another tier between forward and backward: `where` is its place there, `name` what it is
# called. The ticket stands for it meanwhile. `offloaded` waits until it is there, `restored` until it is back;
# `discard` ends its life where it came back to. Between an accelerator and a file it stops on the host: `write` waits
# until it is there and sends it on to the file, `bring` waits until it is read and sends it on to the device.
_lib.define("offload(Tensor value, str name, int where) -> Tensor")
_lib.define("offloaded(Tensor(a!) ticket) -> ()")
_lib.define(
    "restore(Tensor ticket, str name, int where, int[] size, int[] stride, ScalarType dtype, Device device) -> Tensor"
)
_lib.define("restored(Tensor(a) pending) -> Tensor(a)")
_lib.define("write(Tensor(a!) ticket) -> ()")
_lib.define("bring(Tensor read) -> Tensor")
_lib.define("discard(Tensor(a!) value) -> ()")

unshard = torch.ops.zero.unshard.default
reduce_grad = torch.ops.zero.reduce_grad.default
gather = torch.ops.zero.gather.default
reduce = torch.ops.zero.reduce.default
wait = torch.ops.zero.wait.default
release = torch.ops.zero.release.default
keep_part = torch.ops.zero.keep_part.default
tiled = torch.ops.zero.tiled.default
cut = torch.ops.zero.cut.default
offload = torch.ops.zero.offload.default
offloaded = torch.ops.zero.offloaded.default
restore = torch.ops.zero.restore.default
restored = torch.ops.zero.restored.default
write = torch.ops.zero.write.default
bring = torch.ops.zero.bring.default
discard = torch.ops.zero.discard.default
onednn_linear = torch.ops.zero.onednn_linear.default
land_mm = torch.ops.zero.land_mm.default
part = torch.ops.zero.part.default

TRANSFERS = frozenset({gather, reduce, wait, release})
# Where one compute segment ends and the next begins.
BORDERS = TRANSFERS | {keep_part, cut, offload, write, offloaded, restore, bring, restored, discard}


def flat_sizes(shapes: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """``(sizes, dims)`` as the transfer schemas take them."""
    return [int(n) for shape in shapes for n in shape], [len(shape) for shape in shapes]


def unflat_sizes(sizes: Sequence[int], dims: Sequence[int]) -> list[tuple[int, ...]]:
    out, at = [], 0
    for d in dims:
        out.append(tuple(sizes[at : at + d]))
        at += d
    return out


@torch.library.register_fake("zero::unshard", lib=_lib)
def _(shard: torch.Tensor, size: Sequence[int], dtype: torch.dtype, owner: str, name: str) -> torch.Tensor:
    model = _owners.get(owner)
    device = shard.device if model is None else model.tiers.computes_on(name, shard)
    return torch.empty(size, dtype=dtype, device=device)


@torch.library.register_fake("zero::reduce_grad", lib=_lib)
def _(grad: torch.Tensor, size: Sequence[int], dtype: torch.dtype, owner: str, name: str) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=grad.device)


@torch.library.register_fake("zero::gather", lib=_lib)
def _(
    names: Sequence[str],
    sizes: Sequence[int],
    dims: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    over: str = "",
) -> list[torch.Tensor]:
    return [torch.empty(s, dtype=dtype, device=device) for s in unflat_sizes(sizes, dims)]


@torch.library.register_fake("zero::reduce", lib=_lib)
def _(
    grads: Sequence[torch.Tensor],
    sizes: Sequence[int],
    dims: Sequence[int],
    dtype: torch.dtype,
    replicated: bool,
) -> list[torch.Tensor]:
    return [torch.empty(s, dtype=dtype, device=grads[0].device) for s in unflat_sizes(sizes, dims)]


@torch.library.register_fake("zero::wait", lib=_lib)
def _(pending: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(pending)


@torch.library.register_fake("zero::part", lib=_lib)
def _(whole: torch.Tensor, group: str, ranks: int) -> torch.Tensor:
    return whole.new_empty((-(-whole.numel() // ranks),))


@torch.library.register_fake("zero::release", lib=_lib)
def _(fulls: Sequence[torch.Tensor]) -> None:
    return None


@torch.library.register_fake("zero::keep_part", lib=_lib)
def _(fulls: Sequence[torch.Tensor]) -> None:
    return None


@torch.library.register_fake("zero::onednn_linear", lib=_lib)
def _(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return input.new_empty((input.shape[0], weight.shape[0]))


@torch.library.impl(_lib, "onednn_linear", "CPU")
def _(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(input, weight, bias, "none", [], "")


@torch.library.register_fake("zero::land_mm", lib=_lib)
def _(a: torch.Tensor, b: torch.Tensor, owner: str) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


@torch.library.impl(_lib, "land_mm", "CPU")
def _(a: torch.Tensor, b: torch.Tensor, owner: str) -> torch.Tensor:
    model = _owners.get(owner)  # none where a Program is run by itself, to be looked at
    out = None if model is None else model.gradients.landing((a.shape[0], b.shape[1]), a.dtype)
    return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)


@torch.library.impl(_lib, "unshard", "CompositeExplicitAutograd")
def _(shard: torch.Tensor, size: Sequence[int], dtype: torch.dtype, owner: str, name: str) -> torch.Tensor:
    return _fresh(owner_of(owner).gather_now(name, shard, dtype), shard)


@torch.library.impl(_lib, "reduce_grad", "CompositeExplicitAutograd")
def _(grad: torch.Tensor, size: Sequence[int], dtype: torch.dtype, owner: str, name: str) -> torch.Tensor:
    return _fresh(owner_of(owner).reduce_now(name, grad), grad)


@torch.library.impl(_lib, "part", "CompositeExplicitAutograd")
def _(whole: torch.Tensor, group: Any, ranks: int) -> torch.Tensor:
    from torch.distributed.distributed_c10d import _resolve_process_group

    return part_of(whole, _resolve_process_group(group).rank(), ranks)


def part_of(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The part of ``rank``, newly allocated; zeros behind the end of the tensor."""
    out = whole.new_empty(-(-whole.numel() // ranks))
    mine = whole.reshape(-1)[rank * out.numel() : (rank + 1) * out.numel()]
    out[: mine.numel()].copy_(mine)
    out[mine.numel() :].zero_()
    return out


def _fresh(out: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """A functional operator returns no alias of its input: a compiler may write over either of them."""
    shared = out.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
    return out.clone() if shared and out.numel() else out


class _Unsharded(Protocol):
    """What the forward of ``zero.unshard`` keeps for its backward."""

    owner: str
    name: str
    local_size: tuple[int, ...]
    local_dtype: torch.dtype
    rests_on: torch.device


def _save(
    ctx: _Unsharded, inputs: tuple[torch.Tensor, Sequence[int], torch.dtype, str, str], output: torch.Tensor
) -> None:
    shard, _, _, ctx.owner, ctx.name = inputs
    ctx.local_size, ctx.local_dtype, ctx.rests_on = tuple(shard.shape), shard.dtype, shard.device


def _backward(ctx: _Unsharded, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
    local = torch.ops.zero.reduce_grad(grad, ctx.local_size, ctx.local_dtype, ctx.owner, ctx.name)
    return local.to(ctx.rests_on), None, None, None, None


torch.library.register_autograd("zero::unshard", _backward, setup_context=_save, lib=_lib)
