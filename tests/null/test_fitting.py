"""Plans within budgets: what is decided once, two budgets together, and what cannot fit whatever is tried."""

from __future__ import annotations

import pytest
import torch
from harness import SimulatedModel
from null.test_tile_mlp import Net as Mlps
from null.test_tile_mlp import x
from torch import nn

from zero_compiler.errors import MemoryBudgetError
from zero_compiler.fitting import Fitting
from zero_compiler.planning import report

WIDTH = 256


class Wide(nn.Module):
    """Weights make the peak: a budget has them gathered in tiles."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.h = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))

    def forward(self, x):
        for layer in self.h:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Asked(SimulatedModel):
    """Notes what the first rank is asked, and holds to it."""

    asked: tuple[str, ...] = ()

    def decide(self, policy, key, text):
        self.asked = (*self.asked, key)
        policy.distances[key] = text
        return text


def rows(count: int) -> tuple[torch.Tensor]:
    return (torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(0)),)


@pytest.mark.slow
def test_a_rank_that_compiles_again_asks_nobody():
    """It may be alone in that, and would wait for an answer for as long as the group does."""
    budget = int(0.9 * report(Wide(), rows(32), 2, bucket_bytes=0).memory.peak)
    model = Asked(Wide(), 2, stage=3, memory_budget_bytes=budget, bucket_bytes=0)
    model.check([rows(32), rows(32)], lambda out: out)
    assert any(model.policy.tile_bytes.values())
    assert model.asked
    model.asked = ()
    model.check([rows(24), rows(24)], lambda out: out)
    assert len(model.frames) == 2
    assert model.asked == ()


def planned(tokens: int = 512, layers: int = 8, **fields):
    torch._dynamo.reset()
    return report(Mlps(layers=layers), x(0, tokens), 2, **fields)


@pytest.mark.slow
def test_a_budget_for_activations_is_kept_beside_one_for_all_memory():
    """MLPs in tiles may keep the one with more activations than the other allows."""
    free = planned(layers=4)
    allowed = free.frames[0].held_bytes * 2 // 5
    alone = planned(layers=4, activation_budget_bytes=allowed)
    peak = alone.memory.peak
    both = planned(layers=4, activation_budget_bytes=allowed, memory_budget_bytes=peak * 4 // 5)
    assert both.memory.peak <= peak * 4 // 5
    assert both.frames[0].held_bytes <= allowed


def test_what_rests_alone_does_not_fit_and_nothing_is_tried(monkeypatch):
    """Half of what rests: no cut helps, and none is made."""
    rest = planned(layers=1).memory
    rest_bytes = rest.parameters + rest.gradients + rest.optimizer
    for cut in ("_joint", "_inferred"):  # what every cut begins with
        monkeypatch.setattr(Fitting, cut, None)
    for grad in (True, False):
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(
                MemoryBudgetError,
                match=rf"memory_budget_bytes={rest_bytes - 1:,} is more than 1 bytes too small.*{rest_bytes:,} bytes are at "
                r"rest \(parameters .*more ranks than 2 would help most",
            ),
        ):
            planned(layers=1, memory_budget_bytes=rest_bytes - 1)
