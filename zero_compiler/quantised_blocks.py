"""Rows of numbers as blocks of 8 bits a number with a scale each: how weights travel in fewer bytes.

A block is at most :data:`BLOCK` numbers of one row, so what comes out does not depend on how many ranks hold the rows,
in which tiles they travel, or what lies in padding. A number ``x`` of a block becomes ``q``, the nearest to
``x / scale`` that the 8 bits can hold, and comes back as ``q * scale``, computed in float32. The scale is the largest
magnitude of the block over the largest that the 8 bits hold (block-wise quantisation, Dettmers et al. 2022, section
2.1). A block with an infinity or a NaN comes back as NaN throughout; one whose scale would be no normal float32 comes
back as zeros.

The engine does the same (`csrc/src/quantise.cc`), to the bit. This is what it is held to, and what eager code runs.
"""

from __future__ import annotations

import torch
from torch.nn import functional

BLOCK = 256  # numbers, at most, that share a scale
# The dtypes that numbers can travel in, by name, with the largest magnitude that each holds.
DTYPES = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}
_MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_SCALE_BYTES = 4
# Packing and unpacking compute as long as memory takes to move what they read and write so often.
_PASSES = 1
# What can be told from its float32 value, and loses nothing by it.
FROM = frozenset({torch.float32, torch.bfloat16, torch.float16})


def blocks_in(row_numel: int) -> int:
    """In how many blocks a row is."""
    return -(-row_numel // BLOCK)


def _width(row_numel: int) -> int:
    """Numbers of a block, once all blocks of a row are as long as the first."""
    return min(BLOCK, row_numel)


def packed_bytes(numel: int, row_numel: int) -> int:
    """Bytes of so many numbers, in whole rows, on their way: the numbers, and behind them the scales."""
    if not numel:
        return 0
    return _scales_at(numel) + numel // row_numel * blocks_in(row_numel) * _SCALE_BYTES


def moved_bytes(numel: int, itemsize: int) -> int:
    """Bytes of memory that packing so many numbers of ``itemsize`` bytes, or unpacking to such, takes the time of."""
    return _PASSES * numel * (itemsize + 1)


def _scales_at(numel: int) -> int:
    """Where the scales begin: at a multiple of their size."""
    return -(-numel // _SCALE_BYTES) * _SCALE_BYTES


def quantise(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``[n, row_numel]`` as numbers of 8 bits, and the scale of each block, ``[n, blocks]``."""
    n, row_numel = rows.shape
    blocks = blocks_in(row_numel)
    width = _width(row_numel)
    wide = functional.pad(rows.detach().float(), (0, blocks * width - row_numel)).view(n, blocks, width)
    most = wide.abs().amax(dim=-1)
    finite = most.isfinite()
    # Tensors divide: torch makes a number a factor, on accelerators, or takes the reciprocal first. Both round twice.
    largest = torch.full_like(most, _MOST[dtype])
    scales = most / largest
    usable = finite & (scales >= torch.finfo(torch.float32).tiny)
    scales = scales.masked_fill(~usable, 0.0).masked_fill(~finite, torch.nan)
    numbers = (wide * (largest / most)[..., None]).masked_fill(~usable[..., None], 0.0)
    if dtype is torch.int8:
        numbers = numbers.round()
    return numbers.to(dtype).view(n, -1)[:, :row_numel].contiguous(), scales


def dequantise(numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of :func:`quantise`, as nearly as 8 bits can hold it."""
    n, row_numel = numbers.shape
    blocks = blocks_in(row_numel)
    width = _width(row_numel)
    wide = functional.pad(numbers.float(), (0, blocks * width - row_numel)).view(n, blocks, width)
    return (wide * scales[..., None]).view(n, -1)[:, :row_numel].to(dtype)


def round_trip(rows: torch.Tensor, wire: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """What rows of any shape are, in ``dtype``, once they have travelled in ``wire``."""
    if not rows.numel():
        return rows.detach().to(dtype)
    flat = rows.reshape(rows.shape[0], -1)
    return dequantise(*quantise(flat, wire), dtype).reshape(rows.shape)


def pack(chunk: torch.Tensor, row_numel: int, wire: torch.dtype) -> torch.Tensor:
    """A flat chunk of whole rows as the bytes that travel."""
    out = torch.zeros(packed_bytes(chunk.numel(), row_numel), dtype=torch.uint8, device=chunk.device)
    if chunk.numel():
        numbers, scales = quantise(chunk.view(-1, row_numel), wire)
        out[: chunk.numel()].copy_(numbers.view(torch.uint8).view(-1))
        out[_scales_at(chunk.numel()) :].copy_(scales.view(-1).view(torch.uint8))
    return out


def unpack(packed: torch.Tensor, numel: int, row_numel: int, wire: torch.dtype, out: torch.Tensor) -> None:
    """The inverse of :func:`pack`, into the flat tensor ``out`` of ``numel`` numbers."""
    if numel:
        numbers = packed[:numel].view(wire).view(-1, row_numel)
        scales = packed[_scales_at(numel) :].view(torch.float32).view(-1, blocks_in(row_numel))
        out.view(-1, row_numel).copy_(dequantise(numbers, scales, out.dtype))
