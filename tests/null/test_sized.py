"""Calls at other sizes than those of the plan, under a memory budget, on one rank."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import MemoryBudgetError
from zero_compiler.runtime import _C

WIDTH, LAYERS = 32, 3
FEW, SOME, MANY = 8, 16, 4096

pytestmark = pytest.mark.slow


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def sharded() -> nn.Module:
    torch._dynamo.reset()
    return zero.shard(net(), stage=3)


def compiled(model: nn.Module, budget: int | None = None, compute: str = "aten", **how):
    options = {"compute": compute} | ({} if budget is None else {"memory_budget_bytes": budget})
    return torch.compile(model, backend="zero", options=options, **how)


def step(call, count: int) -> None:
    call(torch.ones(count, WIDTH)).square().mean().backward()


def peak_of(count: int) -> int:
    """Of the plan for so many rows."""
    model = sharded()
    return zero.inspect(model, (torch.ones(count, WIDTH),)).memory.peak


@pytest.fixture
def meter():
    _C.meter_install()
    gc.collect()
    return _C


@pytest.mark.parametrize("compute", ["aten", "inductor"])
def test_a_call_that_passes_the_budget_is_refused_before_it_begins(meter, compute):
    budget = peak_of(64)
    model = sharded()
    call = compiled(model, budget, compute)
    for count in (FEW, SOME):
        step(call, count)
        model.zero_grad()
    frames = zero.inspect(model).frames
    assert len(frames) == 2  # the second one's sizes are symbolic
    large = torch.ones(MANY, WIDTH)
    meter.meter_reset_peak()
    before = meter.meter_current()
    for _ in range(2):
        with pytest.raises(MemoryBudgetError):
            call(large).square().mean().backward()
    assert meter.meter_peak() - before < MANY * WIDTH * 4
    step(call, FEW)
