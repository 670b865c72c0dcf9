"""A layer of hidden size 64K: the bytes of its largest operator, and its tiles."""

from __future__ import annotations

from null.tools.figures.given import GivenPlanner

from zero_compiler.tools.figures import wide_layer


def test_pieces_and_tiles():
    both, each, tiles = wide_layer.wide_layer(GivenPlanner()).rows
    assert both.here == 2 * each.here == 2 * 2 * 4 * 65536**2
    assert both.fact.deviation(both.here) == each.fact.deviation(each.here) == 0
    assert tiles.here == 16
