"""Kept weights beside the rows that they were gathered from: which must be gathered again."""

from __future__ import annotations

import pytest
import torch

from zero_compiler.quantised_blocks import round_trip
from zero_compiler.runtime import gathers


@pytest.mark.parametrize("numel", [1, gathers._BLOCK, gathers._BLOCK + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_device_tells_the_same_as_the_host(numel, dtype):
    local = torch.randn(numel)
    kept = local.to(dtype)
    assert gathers._equal_here(kept, local)
    assert not gathers._differ(kept, local)
    for at in (0, numel - 1):
        other = local.clone()
        other[at] += 1.0
        assert not gathers._equal_here(kept, other)
        assert gathers._differ(kept, other)
    other = kept.clone()
    other[-1] = float("nan")  # as a shard with one: gathered again, whatever it was
    assert not gathers._equal_here(other, other)
    assert gathers._differ(other, other)


def test_what_is_not_there_differs():
    same = torch.ones(3)
    assert gathers._equal([None, (same, same, None), (same, same + 1, None)]) == [False, True, False]


@pytest.mark.parametrize("shape", [(1, 1), (3, 300), (2, 5, 7)], ids=str)
@pytest.mark.parametrize("wire", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_what_has_travelled_in_8_bits_is_beside_what_would_arrive_now(shape, wire):
    local = torch.randn(shape)
    kept = round_trip(local, wire, torch.bfloat16)
    assert gathers._equal_here(kept, local, wire)
    assert not gathers._differ(kept, local, wire)
    for at in (0, -1):
        other = local.clone()
        other.view(-1)[at] += 10.0
        assert not gathers._equal_here(kept, other, wire)
        assert gathers._differ(kept, other, wire)
