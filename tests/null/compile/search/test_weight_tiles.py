"""Tiles of weights as small as a budget asks for, and all of them counted before a plan is taken."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from zero_compiler.compile.search.weight_tiles import WeightTiles


@pytest.mark.parametrize("fits_from", [0, 1, 2, 5, 9, None, "once"])
@pytest.mark.parametrize("alike", [True, False])
def test_tiles_of_weights_are_as_small_as_the_budget_asks_for(fits_from, alike, monkeypatch):
    """Each size is looked at where the smallest are more work, and else a few: one that fits is found where any does."""
    limits, tried = [1 << (20 - k) for k in range(10)], []

    def peak(graphs) -> int:
        size = limits.index(state.limit) if state.limit is not None else -1
        tried.append(size)
        if fits_from == "once":  # smaller tiles take more again
            return 100 if size == 4 else 200 + abs(size - 4)
        return 100 if fits_from is not None and size >= fits_from else 200 - size

    state = SimpleNamespace(limit=None)
    state.try_tiles = lambda tiles: setattr(state, "limit", tiles["w"])
    lowering = SimpleNamespace(trial_peak=peak, counts_some_tiles=lambda graphs: alike)
    weight_tiles = WeightTiles(state, lowering, None)
    monkeypatch.setattr(weight_tiles, "_halved", lambda undecided: limits)
    left = weight_tiles._shrink_tiles({}, ["w"], 100)
    if fits_from is None:
        assert left == 200 - 9
        assert state.limit == limits[9]
    else:
        assert left == 100
        assert state.limit == limits[4 if fits_from == "once" else fits_from]
    if alike and fits_from != "once":
        assert len(set(tried)) <= 8
    elif not alike and isinstance(fits_from, int):
        assert max(tried) == fits_from
