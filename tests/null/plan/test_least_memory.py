"""A lower bound of every plan, without a search: what rests, and the largest operator that nothing takes apart."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from zero_compiler.compile import budget_search
from zero_compiler.errors import MemoryBudgetError
from zero_compiler.plan import budget, least_memory
from zero_compiler.tools.planning import report, rest

WIDTH, HEADS, TOKENS = 32, 2, 4096
ROW = TOKENS * WIDTH * 4  # bytes of one value of that many tokens


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).view(1, TOKENS, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(heads.transpose(1, 2).reshape(1, TOKENS, WIDTH)).square().mean()


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return self.second(self.first(x)).square().mean()


def bounds(monkeypatch, model, inputs, **fields):
    """Every bound that planning asks for, and the report."""
    found = []

    def noted(memory, graph):
        found.append(least_memory.least_bytes(memory, graph))
        return found[-1]

    monkeypatch.setattr(budget, "least_bytes", noted)
    torch._dynamo.reset()
    made = report(model, inputs, 2, compute="aten", memory_budget_bytes=1 << 40, **fields)
    return found, made


def test_attention_lies_in_memory_with_all_of_its_operands(monkeypatch):
    """Forward: q, k and v, which are one storage, the result and a number a token and head. Backward: the gradient of the
    result beside them, and three gradients."""
    ((nbytes, node),), made = bounds(monkeypatch, Attention(), (torch.ones(1, TOKENS, WIDTH),))
    numbers = TOKENS * HEADS * 4
    memory = made.memory
    assert "scaled_dot_product" in str(node.target)
    assert "backward" in str(node.target)
    # q, k, v; the result with its numbers; its gradient; gradients of q, k and v.
    assert nbytes == memory.parameters + memory.optimizer + (3 + 1 + 1 + 3) * ROW + numbers
    assert nbytes <= memory.peak


def test_a_convolution_has_its_images_whole(monkeypatch):
    ((nbytes, node),), made = bounds(monkeypatch, Images(), (torch.ones(2, 3, 64, 64),))
    image = 2 * 8 * 64 * 64 * 4
    memory = made.memory
    assert node.target is torch.ops.aten.convolution.default
    assert nbytes == memory.parameters + memory.optimizer + 2 * image
    assert nbytes <= memory.peak


def test_products_with_weights_may_be_done_in_tiles_and_do_not_count(monkeypatch):
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    ((nbytes, node),), made = bounds(monkeypatch, model, (torch.ones(64, 64),))
    assert (nbytes, node) == (made.memory.parameters + made.memory.gradients + made.memory.optimizer, None)


def test_what_is_below_the_bound_is_refused_before_anything_is_tried(monkeypatch):
    tried = []
    lower = budget_search.Lowering.trial_peak
    monkeypatch.setattr(
        budget_search.Lowering, "trial_peak", lambda self, *args: tried.append(1) or lower(self, *args)
    )
    model, x = Attention(), torch.ones(1, TOKENS, WIDTH)
    resting = rest(model, 2).at_rest
    with pytest.raises(MemoryBudgetError, match="one operator runs, which nothing takes apart") as refused:
        report(model, (x,), 2, compute="aten", memory_budget_bytes=resting + 2 * ROW)
    assert refused.value.peak_bytes is None
    torch._dynamo.reset()
    mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    with pytest.raises(MemoryBudgetError, match="before anything is gathered or computed"):
        report(mlp, (torch.ones(2, 64),), 2, compute="aten", memory_budget_bytes=rest(mlp, 2).at_rest - 1)
    assert tried == []


@pytest.mark.slow
def test_a_search_that_finds_nothing_says_the_peak_of_the_best_plan():
    model, x = Attention(), torch.ones(1, TOKENS, WIDTH)
    with pytest.raises(MemoryBudgetError, match="the predicted peak is") as refused:
        report(model, (x,), 2, compute="aten", memory_budget_bytes=8 * ROW + 200_000)
    least = refused.value.peak_bytes
    assert least > 8 * ROW + 200_000
    torch._dynamo.reset()
    assert report(model, (x,), 2, compute="aten", memory_budget_bytes=least).memory.peak <= least
