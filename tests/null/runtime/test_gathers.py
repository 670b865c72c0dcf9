"""Kept weights beside the rows that they were gathered from: which must be gathered again."""

from __future__ import annotations

import pytest
import torch

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
    assert gathers._equal([None, (same, same), (same, same + 1)]) == [False, True, False]
