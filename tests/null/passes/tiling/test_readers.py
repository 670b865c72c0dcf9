"""Operators that read weights: which of them a tile of the weight can do."""

from __future__ import annotations

from null.graphs import Build, aten

from zero_compiler.passes.tiling.readers import plain_convolution


def test_convolutions_that_a_tile_of_channels_can_do():
    b = Build()
    x, w = b.input("x", 1, 4, 8), b.input("w", 6, 4, 3)
    plain = b.op(aten.convolution.default, x, w, None, [1], [0], [1], False, [0], 1)
    turned = b.op(aten.convolution.default, x, b.input("v", 4, 6, 3), None, [1], [0], [1], True, [0], 1)
    assert plain_convolution(plain)
    assert not plain_convolution(turned)
