"""Random numbers that are drawn into a shard: torch calls the watcher where it is given a DTensor, and it leaves the operator alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import zero_compiler as zero
from zero_compiler.tensors import random_rows


@pytest.mark.parametrize("draw", ["uniform_", "normal_", "bernoulli_"])
def test_drawing_for_the_only_rank_is_plain_and_says_nothing(draw, caplog):
    """Of one rank the rows are the whole tensor, and its numbers those of the plain one."""
    net = nn.Linear(4, 3)
    plain = torch.empty(3, 4)
    zero.shard(net)
    assert isinstance(net.weight, DTensor)
    with torch.no_grad():
        torch.manual_seed(1)
        getattr(net.weight, draw)()
        torch.manual_seed(1)
        getattr(plain, draw)()
    assert torch.equal(net.weight.to_local(), plain)
    assert not random_rows._said
    assert not caplog.records
