"""Rows of a parameter over ranks: every row is on one rank, in order, as FSDP2 has them."""

from __future__ import annotations

import pytest
import torch

from zero_compiler.layout import layout_of, second_runs, tiled_rows

SHAPES = [(7, 3), (8,), (1, 5), (2, 2)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_rows_are_those_that_torch_chunks(shape, world):
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    layout = layout_of(full, world, stage=3)
    chunks = [*full.chunk(world), *[full[:0]] * world][:world]
    for rank, chunk in enumerate(chunks):
        assert layout.local_shape(rank) == tuple(chunk.shape)
        padded = layout.shard_rows(full, rank)
        assert padded.shape == layout.padded_shape
        assert torch.equal(padded[: len(chunk)], chunk)
        assert not padded[len(chunk) :].any()
    # A single weight is gathered straight into place.
    gathered = torch.cat([layout.shard_rows(full, rank) for rank in range(world)])
    assert torch.equal(gathered.flatten()[: full.numel()].view(shape), full)


def test_what_has_no_rows_stays_whole():
    for tensor, stage in ((torch.tensor(1.0), 3), (torch.empty(0, 4), 3), (torch.ones(4, 2), 0)):
        layout = layout_of(tensor, 4, stage)
        assert not layout.sharded
        assert layout.chunk_numel == tensor.numel()
        assert layout.local_shape(3) == tuple(tensor.shape)


def test_rows_of_tiles_are_all_rows_once():
    full = torch.arange(14.0).reshape(7, 2)
    layout = layout_of(full, 3, stage=3)  # chunks of three rows
    seen = []
    for begin in range(layout.chunk_rows):
        for whole, tile in tiled_rows(layout, begin * layout.row_numel, layout.world):
            seen += range(7)[whole]
            assert tile.stop - tile.start == whole.stop - whole.start
    assert sorted(seen) == list(range(7))


def test_a_second_shard_is_the_part_behind_those_of_the_ranks_before():
    # Three ranks of a host have two rows of four each, of five.
    assert [second_runs(20, 8, place) for place in range(3)] == [[(0, 0, 8)], [(0, 8, 8)], [(0, 16, 4)]]
    assert second_runs(8, 4, 3) == []


def test_of_tiles_it_has_the_part_of_each_in_one_piece():
    # Four ranks with chunks of 3, in tiles of 2 and 1; two of them are on this rank's host, and share with the others.
    runs = second_runs(11, 6, 1, chunk=3, tile=2)
    assert runs == [(0, 6, 2), (2, 9, 2), (4, 8, 1)]  # element 11 is padding
    taken = sorted(at for _, begin, size in runs for at in range(begin, begin + size))
    assert taken == [6, 7, 8, 9, 10]
