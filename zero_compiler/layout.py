"""How one parameter is sharded over the ranks: FSDP2's layout, so that DTensor, DCP and torch.optim fit.

A parameter of shape ``[n, ...]`` is sharded along dimension 0 into ``world`` chunks of ``ceil(n / world)``
rows. The rank-major concatenation of the padded chunks has the full tensor as its first elements: a
single weight is gathered straight into place, with no copy before or after.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Layout:
    """Layout of one parameter.

    Args:
        shape: full shape.
        dtype: dtype at rest.
        world: number of ranks that hold a part.
        sharded: True for ``Shard(0)``; False for ``Replicate()`` (scalars, zero-sized tensors, stage 0).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    world: int
    sharded: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def row_numel(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def chunk_rows(self) -> int:
        """Rows of one padded chunk."""
        return -(-self.shape[0] // self.world) if self.sharded else 0

    @property
    def chunk_numel(self) -> int:
        """Elements of one padded chunk; of the whole tensor where it is replicated."""
        return self.chunk_rows * self.row_numel if self.sharded else self.numel

    def start(self, rank: int) -> int:
        """First row that ``rank`` holds."""
        return min(rank * self.chunk_rows, self.shape[0])

    def rows(self, rank: int) -> int:
        """Rows that ``rank`` holds, without padding; may be 0."""
        return min((rank + 1) * self.chunk_rows, self.shape[0]) - self.start(rank)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        return (self.rows(rank), *self.shape[1:]) if self.sharded else self.shape

    @property
    def padded_shape(self) -> tuple[int, ...]:
        return (self.chunk_rows, *self.shape[1:]) if self.sharded else self.shape

    def bytes_full(self, dtype: torch.dtype | None = None) -> int:
        return self.numel * (dtype or self.dtype).itemsize

    def bytes_local(self) -> int:
        """Bytes at rest on one rank, padding included."""
        return self.chunk_numel * self.dtype.itemsize

    def shard_rows(
        self, full: torch.Tensor, rank: int, begin: int = 0, end: int | None = None
    ) -> torch.Tensor:
        """The padded chunk of ``rank``, or its rows from ``begin`` to ``end``, newly allocated: its unpadded rows are a
        prefix of its storage."""
        if not self.sharded:
            return full.detach().clone(memory_format=torch.contiguous_format)
        end = self.chunk_rows if end is None else end
        chunk = torch.empty((end - begin, *self.shape[1:]), dtype=full.dtype, device=full.device)
        rows = min(max(self.rows(rank) - begin, 0), end - begin)
        with torch.no_grad():
            chunk[:rows].copy_(full.detach()[self.start(rank) + begin : self.start(rank) + begin + rows])
            chunk[rows:].zero_()
        return chunk


def layout_of(tensor: torch.Tensor, world: int, stage: int) -> Layout:
    """The layout that ``zero.shard`` gives a parameter: sharded where there are rows to shard."""
    sharded = stage > 0 and tensor.dim() > 0 and tensor.numel() > 0
    return Layout(tuple(tensor.shape), tensor.dtype, world, sharded)


def tiled_rows(layout: Layout, begin: int, rows: int) -> list[tuple[slice, slice]]:
    """Which rows of the full tensor are which rows of a tile; padding is in neither.

    Args:
        begin: elements of each rank's chunk before the tile.
        rows: of the tile, from all ranks together.
    """
    first, each = begin // layout.row_numel, rows // layout.world
    out = []
    for rank in range(layout.world):
        low = layout.start(rank) + first
        high = min(low + each, layout.start(rank) + layout.rows(rank))
        if low < high:
            out.append((slice(low, high), slice(rank * each, rank * each + high - low)))
    return out


def second_runs(
    numel: int, part: int, place: int, chunk: int = 0, tile: int = 0
) -> list[tuple[int, int, int]]:
    """Which elements of a full weight of ``numel`` a rank keeps as its second shard, of ``part`` elements with padding:
    runs, each as where it begins there, where it begins in the weight, and how long it is.

    It is the part of the weight that is as far behind its begin as the rank's ``place`` on its host says. Of a weight
    that is gathered in tiles, of ``tile`` elements of every rank's ``chunk``, it has that part of each tile, one after
    the other, so that each is one piece of memory.
    """
    if not tile:
        return _inside(numel, [(0, place * part, part)])
    ranks, runs = part // chunk, []
    for begin in range(0, chunk, tile):
        size = min(tile, chunk - begin)
        for k in range(ranks):
            runs.append((ranks * begin + k * size, (place * ranks + k) * chunk + begin, size))
    return _inside(numel, runs)


def _inside(numel: int, runs: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The same without what lies behind the end of the weight."""
    return [(to, begin, min(size, numel - begin)) for to, begin, size in runs if begin < numel]
