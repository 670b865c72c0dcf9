"""Where weights alone pass a budget, tiles of them come first; where they do at nearly no cost, alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from zero_compiler.compile.phase_lowering import Lowering
from zero_compiler.compile.search.measures import Measures
from zero_compiler.tools.planning import report

ROOT = Path(__file__).resolve().parents[4]


def step_us(told) -> float:
    return sum(line.total_us for frame in told.frames for line in frame.timelines.values())


@pytest.mark.slow
def test_tiles_of_weights_alone_do_where_it_is_weights_that_do_not_fit(monkeypatch):
    """Nothing else is given up for a budget that tiles of weights keep at nearly no cost; a user who knew it set them
    by hand."""
    monkeypatch.syspath_prepend(ROOT)
    from examples.gpt import GPT, GPTConfig

    def planned(**fields):
        torch._dynamo.reset()
        with torch.device("meta"):
            model = GPT(GPTConfig(layers=2, width=25600, heads=160, context=1024, vocabulary=50304))
            tokens = torch.zeros(1, 1024, dtype=torch.long)
        return report(model, (tokens, tokens), 512, hardware="dgx-h100", param_dtype=torch.bfloat16, **fields)

    budget = 49_500_000_000
    by_hand = planned(memory_budget_bytes=budget, tile_bytes=2_700_000_000)
    found = planned(memory_budget_bytes=budget)
    assert found.memory.peak <= budget
    assert step_us(found) <= 1.05 * step_us(by_hand)


class Thick(nn.Module):
    """Weights alone pass a budget, in many tiles of which some tell the bytes of all."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(64, 2048) for _ in range(3))
        self.back = nn.ModuleList(nn.Linear(2048, 64) for _ in range(3))

    def forward(self, x):
        for up, down in zip(self.h, self.back, strict=True):
            x = torch.tanh(down(torch.tanh(up(x))))
        return x.square().mean()


def thick(**fields):
    torch._dynamo.reset()
    torch.manual_seed(0)
    return report(Thick(), (torch.randn(4, 64),), 8, bucket_bytes=0, compute="aten", **fields)


def thick_budget() -> int:
    free = thick().memory
    return free.at_rest - free.arena + (free.peak - free.at_rest + free.arena) // 3


@pytest.mark.slow
def test_where_weights_alone_pass_the_budget_tiles_of_them_come_first(monkeypatch):
    """Every other measure would be in vain, and take most of the time of the search."""
    budget = thick_budget()
    monkeypatch.setattr(Measures, "weights_last", None)
    told = thick(memory_budget_bytes=budget)
    assert told.memory.peak <= budget
    assert any(plan.tile_rows for plan in told.frames[0].params.values())


@pytest.mark.slow
def test_all_tiles_of_weights_are_counted_before_a_plan_is_taken(monkeypatch):
    """Some of them tell nearly what all take: a plan that some say fits by no byte is made to fit by all."""
    peak, tried = Lowering.trial_peak, []

    def too_low(self, graphs):
        some = self.counts_some_tiles(graphs)
        tried.append(some)
        return peak(self, graphs) - some * 20_000

    monkeypatch.setattr(Lowering, "trial_peak", too_low)
    budget = thick_budget()
    assert thick(memory_budget_bytes=budget).memory.peak <= budget
    assert any(tried)
