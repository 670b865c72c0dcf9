"""How large tiles are that a budget asks for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zero_compiler.ir.facts import ParamRef
from zero_compiler.plan import tiling
from zero_compiler.tools.planning import report

ROW = 1 << 10


def tiled(sizes, limit):
    """Plans of weights of so many rows each, in tiles of at most so many bytes."""
    return {
        ParamRef("m", f"w{i}"): SimpleNamespace(
            gather_bytes=rows * ROW, chunk_rows=rows, tile_rows=limit // ROW if rows * ROW > limit else 0
        )
        for i, rows in enumerate(sizes)
    }


def held(limits, plans):
    """Bytes that each weight takes at a time."""
    return {ref: min(p.gather_bytes, limits[ref] or p.gather_bytes) for ref, p in plans.items()}


SIZES = st.lists(st.sampled_from([8, 64, 256, 1024]), min_size=1, max_size=6)


@given(SIZES, st.lists(st.integers(0, 1 << 21), min_size=6, max_size=6), st.booleans())
def test_no_weight_could_have_larger_tiles(sizes, beside, together):
    """Weights are there with others, or each alone with something that differs from place to place."""
    limit = 16 * ROW
    plans = tiled(sizes, limit)

    def peak(limits):
        now = held(limits, plans).values()
        return sum(now) if together else max(b + n for b, n in zip(beside, now, strict=False))

    budget = peak(dict.fromkeys(plans, limit)) + (beside[0] if together else 0)

    def fits(limits):
        return peak(limits) <= budget

    found = tiling.coarsen(plans, limit, fits)
    assert fits(found)
    for nbytes in {p.gather_bytes for p in plans.values() if p.tile_rows}:
        same = [ref for ref, p in plans.items() if p.gather_bytes == nbytes]
        now = found[same[0]]
        assert all(found[ref] == now for ref in same)
        if now is not None:
            assert not fits({**found, **dict.fromkeys(same, 2 * now if 2 * now < nbytes else None)})


@pytest.mark.parametrize("small_first", [False, True])
def test_room_goes_to_the_weights_with_the_most_transfers(small_first):
    """Eight of 64 rows are 32 tiles, one of 256 rows is 16."""
    sizes = [64] * 8 + [256]
    limit, plans = 16 * ROW, tiled(sizes[::-1] if small_first else sizes, 16 * ROW)
    least = sum(held(dict.fromkeys(plans, limit), plans).values())
    budget = least + 8 * 48 * ROW  # what the eight take more when they are whole

    found = tiling.coarsen(plans, limit, lambda limits: sum(held(limits, plans).values()) <= budget)
    chosen = {p.gather_bytes: found[ref] for ref, p in plans.items()}
    assert chosen == {64 * ROW: None, 256 * ROW: 16 * ROW}


def test_what_fits_whole_is_not_touched():
    found = tiling.coarsen(tiled([8, 1024], 16 * ROW), 16 * ROW, lambda limits: True)
    assert list(found.values()) == [16 * ROW, None]


def test_no_more_of_the_classes_is_tried_than_bisection_needs():
    tried = []
    found = tiling.coarsen(tiled([1024] * 40, 2 * ROW), 2 * ROW, lambda limits: tried.append(1) or False)
    assert set(found.values()) == {2 * ROW}
    assert len(tried) <= 5


class Ends(nn.Module):
    """A table, and a wide layer that is twice as large."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4096, 128)
        self.wide = nn.Linear(128, 8192, bias=False)

    def forward(self, ids):
        return self.wide(self.table(ids)).tanh().square().mean()


@pytest.mark.slow
def test_a_smaller_weight_stays_whole_where_the_arena_has_room():
    with torch.device("meta"):
        model, ids = Ends(), torch.empty(16, dtype=torch.long)

    def planned(**fields):
        found = report(model, (ids,), 2, stage=3, hardware="laptop", **fields)
        return {ref.name: p.tile_rows for ref, p in found.frames[0].params.items()}, found.memory.peak

    rows, peak = planned()
    assert rows == {"table.weight": 0, "wide.weight": 0}
    budget = peak * 84 // 100
    rows, peak = planned(memory_budget_bytes=budget)
    # The limit of the wide layer's tiles would make tiles of the table, too, which has room where two of them lie.
    assert rows == {"table.weight": 0, "wide.weight": 1024}
    assert peak <= budget
