"""Blocking gathers, reductions and scatters of one parameter over the ranks of a group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from ..layout import Layout
from ..quantised_blocks import pack, unpack
from ..ranks.failing import noticed
from ..ranks.group import Group, first_rank
from ..ranks.peer_waits import answered, wait
from ..torch_versions import all_gather_flat, reduce_scatter_flat

_SCATTERED_BYTES = 64 << 20  # of the rows of all ranks, at a time


def flat_chunk(layout: Layout, local: torch.Tensor) -> torch.Tensor:
    """The flat padded chunk that ``local`` (this rank's rows) is a prefix of; a padded copy where it is not."""
    numel = layout.chunk_numel
    local = local.detach()
    if local.is_contiguous():
        if local.numel() == numel:
            return local.view(-1)
        storage = local.untyped_storage().nbytes() // max(local.element_size(), 1)
        if storage >= local.storage_offset() + numel:
            return local.as_strided((numel,), (1,))
    chunk = torch.zeros(numel, dtype=local.dtype, device=local.device)
    chunk[: local.numel()].copy_(local.reshape(-1))
    return chunk


def gather(
    group: Group, layout: Layout, local: torch.Tensor, dtype: torch.dtype, wire: torch.dtype | None = None
) -> torch.Tensor:
    """The full weight in ``dtype`` on the compute device, newly allocated where there is more than one rank.

    Args:
        wire: of 8 bits, that it travels in (see `quantised_blocks.py`); None: in ``dtype``.
    """
    device = local.device if local.is_meta else group.device
    if not layout.sharded or group.world == 1:
        full = local.detach().to(device, dtype)
        return full.view(layout.shape) if layout.sharded else full
    out = torch.empty(group.world * layout.chunk_numel, dtype=dtype, device=device)
    if wire is None:
        _all_gather(group, out, flat_chunk(layout, local).to(device, dtype))
    else:
        packed = pack(flat_chunk(layout, local).to(device), layout.row_numel, wire)
        arrived = packed.new_empty(group.world * packed.numel())
        _all_gather(group, arrived, packed)
        for rows, of in zip(out.chunk(group.world), arrived.chunk(group.world), strict=True):
            unpack(of, layout.chunk_numel, layout.row_numel, wire, rows)
    return out[: layout.numel].view(layout.shape)


def _all_gather(group: Group, out: torch.Tensor, chunk: torch.Tensor) -> None:
    with answered(group, "gather of a weight"):
        wait(all_gather_flat(out, chunk, group=group.pg, async_op=True), group)


def reduce(group: Group, layout: Layout, grad: torch.Tensor, reduce_dtype: torch.dtype) -> torch.Tensor:
    """This rank's rows of the mean over ranks of ``grad``, in the dtype of the parameter."""
    grad = grad.detach().to(reduce_dtype)
    if group.data_ranks == 1:
        return grad.to(layout.dtype, copy=True)  # autograd may have given this tensor to others as well
    if not layout.sharded or group.world == 1:
        total = grad.clone(memory_format=torch.contiguous_format)
        if group.world > 1:
            with answered(group, "reduction of a gradient"):
                wait(dist.all_reduce(total, group=group.pg, async_op=True), group)
    else:
        padded = torch.zeros(group.world * layout.chunk_numel, dtype=reduce_dtype, device=grad.device)
        padded[: layout.numel].copy_(grad.reshape(-1))
        with answered(group, "reduction of a gradient"):
            if group.device.type == "cpu":
                # All that gloo does for a reduce-scatter, whose own work can be waited for to its end alone.
                wait(dist.all_reduce(padded, group=group.pg, async_op=True), group)
                out = padded.view(group.world, -1)[group.rank].clone()
            else:
                out = torch.empty(layout.chunk_numel, dtype=reduce_dtype, device=grad.device)
                reduce_scatter_flat(out, padded, group=group.pg)
        total = out[: layout.rows(group.rank) * layout.row_numel].view(layout.local_shape(group.rank))
    if group.across is not None and total.numel():
        with answered(group, "reduction of a gradient"):
            wait(dist.all_reduce(total, group=group.across.pg, async_op=True), group)
    return total.div_(group.data_ranks).to(layout.dtype)


def scatter_from_first(group: Group, layout: Layout, full: torch.Tensor, away: bool = False) -> torch.Tensor:
    """This rank's padded chunk of the first rank's ``full``, on the compute device.

    Args:
        away: it is to rest elsewhere, and may be where ``full`` is: the device need not have room for it.
    """
    if full.is_meta or isinstance(full, FakeTensor):
        return full.detach().new_empty(layout.padded_shape)
    full = full.detach()
    if group.link is None:
        return layout.shard_rows(full if away else full.to(group.device), group.rank)
    if group.across is None:
        return _scatter(group, layout, full)
    # The first of the ranks with the same rows has them from the first rank, the others from it.
    if group.across.rank == 0:
        chunk = _scatter(group, layout, full)
    else:
        chunk = torch.empty(layout.padded_shape, dtype=full.dtype, device=group.device)
    if chunk.numel():
        sent(group, dist.broadcast(chunk, first_rank(group.across), group=group.across.pg, async_op=True))
    return chunk


def sent(group: Group, work: dist.Work) -> None:
    """Wait until values have been sent between the ranks of a model that is made.

    Raises:
        TransferError: a rank is gone, or did not come in time.
        ZeroError: of one that has failed.
    """
    with answered(group, "sending of the values of parameters"):
        wait(work, group, noticed)


def from_first(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of the first rank, copied."""
    if tensor.is_meta or isinstance(tensor, FakeTensor) or not tensor.numel():
        return tensor
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    sent(group, dist.broadcast(tensor, first_rank(group), group=group.pg, async_op=True))
    return tensor


def _scatter(group: Group, layout: Layout, full: torch.Tensor) -> torch.Tensor:
    if group.world == 1:
        return layout.shard_rows(full.to(group.device), group.rank)
    first = first_rank(group)
    if not layout.sharded:
        whole = full.to(group.device).clone(memory_format=torch.contiguous_format)
        if whole.numel():
            sent(group, dist.broadcast(whole, first, group=group.pg, async_op=True))
        return whole
    chunk = torch.empty(layout.padded_shape, dtype=full.dtype, device=group.device)
    # Some rows at a time: the first rank's device has its chunk and these of all ranks, and not the whole twice.
    step = max(1, _SCATTERED_BYTES // max(1, group.world * layout.row_numel * full.dtype.itemsize))
    for rows in chunk.split(step):
        begin = rows.storage_offset() // max(1, layout.row_numel)
        parts = None
        if group.rank == 0:
            parts = [
                layout.shard_rows(full, r, begin, begin + rows.shape[0]).to(group.device)
                for r in range(group.world)
            ]
        sent(group, dist.scatter(rows, parts, src=first, group=group.pg, async_op=True))
    return chunk
