"""Tiles of tokens as small as a budget asks for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from zero_compiler.compile.search import overrun as overrun_module
from zero_compiler.compile.search.overrun import Overrun


@pytest.mark.parametrize("fits_from", [1, 2, 4, 8, 16, 32, 64])
def test_tiles_are_as_small_as_the_budget_asks_for(fits_from, monkeypatch):
    """Found between the first and the smallest without a look at each; what was looked at before costs nothing."""
    tiles = [1]
    looked = []

    def finer(graphs):
        before, tiles[0] = tiles[0], min(32, 2 * tiles[0])
        return tiles[0] > before

    def over(graphs, budget_bytes):
        looked.append(tiles[0])
        return fits_from - tiles[0]

    overrun = Overrun(SimpleNamespace(), None, None)
    monkeypatch.setattr(overrun_module.passes, "finer", finer)
    monkeypatch.setattr(overrun_module.passes, "tiles_in", lambda graph: tiles[0])
    monkeypatch.setattr(overrun_module.passes, "set_tiles", lambda graph, n: tiles.__setitem__(0, n))
    monkeypatch.setattr(overrun, "over", over)
    left = overrun.over_in_small_tiles({"forward": SimpleNamespace(graph=None)}, 1)
    assert tiles == [min(32, fits_from)]
    assert left == fits_from - tiles[0]
    assert len(set(looked)) <= 4 + (fits_from > 1)
