"""Sizes are rounded up to blocks of a file and to the alignment of an arena, and by less than one of them."""

from __future__ import annotations

import pytest

from zero_compiler.alignment import ARENA_BYTES, BLOCK_BYTES, arena_aligned, block_aligned


@pytest.mark.parametrize(("aligned", "unit"), [(block_aligned, BLOCK_BYTES), (arena_aligned, ARENA_BYTES)])
def test_sizes_are_rounded_up_to_whole_units(aligned, unit):
    assert [aligned(n) for n in (0, 1, unit, unit + 1)] == [0, unit, unit, 2 * unit]
