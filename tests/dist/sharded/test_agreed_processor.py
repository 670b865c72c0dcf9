"""Ranks on machines that nobody has calibrated plan for one kind of processor, whichever they have."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch
from dist.spawn import run_ranks
from torch import nn

import zero_compiler as zero
from zero_compiler.cost import hardware, processors
from zero_compiler.params.modules import sharded_models_of

pytestmark = pytest.mark.dist


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x):
        return self.b(self.a(x)).square().mean()


def on_different_processors(rank, world):
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
    processors.here = lambda: ("AMD Zen 5", "Intel Xeon with AMX")[rank]
    wanted = hardware.uncalibrated("AMD Zen 5")
    torch.manual_seed(0)
    built = zero.shard(Net(), compute="aten")
    with zero.init(compute="aten"):
        made = Net()
    for model in (built, made):
        (sharded_model,) = sharded_models_of(model)
        assert sharded_model.hardware == wanted
        assert f"hardware = {wanted.name}, " in sharded_model.protocol.describe()
        torch.compile(model, backend="zero")(torch.ones(512, 256)).backward()
    # What the user names is planned for.
    (named,) = sharded_models_of(zero.shard(Net(), hardware="laptop"))
    assert named.hardware == hardware.load("laptop")
    return str(zero.inspect(built).step)


def test_ranks_on_different_processors_plan_for_that_of_rank_0():
    first, second = run_ranks(on_different_processors, 2, timeout=60.0)
    assert first == second
