"""Ranks hold to the plan that rank 0 has found in its cache folder, whatever lies in theirs."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch
from dist.spawn import run_ranks
from torch import nn

import zero_compiler as zero
from zero_compiler.compile import stored_plans

pytestmark = pytest.mark.dist


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))
        self.head = nn.Linear(32, 512)

    def forward(self, x):
        for layer in self.h:
            x = torch.tanh(layer(x))
        return self.head(x).square().mean()


def start(rows):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = zero.shard(Net(), compute="aten", memory_budget_bytes=500_000)
    step, losses = torch.compile(model, backend="zero", dynamic=False), []
    for _ in range(2):
        loss = step(torch.ones(rows, 32))
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=-0.1)
        model.zero_grad()
    return losses, model, step


def two_starts(rank, world):
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
    first, model, _ = start(8)
    before = zero.inspect(model)
    (frame,) = before.frames
    assert not frame.stored
    assert len(list(stored_plans.folder().glob("*.json"))) == (1 if rank == 0 else 0)
    second, model, step = start(8)
    after = zero.inspect(model)
    assert second == first
    assert after.frames[0].stored
    assert after.decisions == before.decisions
    backward, as_before = (told.frames[0].programs["backward"].text() for told in (after, before))
    assert backward == as_before
    # A rank that compiles for other sizes, alone, asks nobody.
    x = torch.ones(8 if rank == 0 else 4, 32)
    step(x).backward()
    # Damaged on rank 0: all search.
    if rank == 0:
        (file,) = stored_plans.folder().glob("*.json")
        file.write_text("{}")
    third, model, _ = start(8)
    assert third == first
    assert not zero.inspect(model).frames[0].stored
    return after.decisions.digest


def test_ranks_hold_to_what_rank_0_has_found():
    first, second = run_ranks(two_starts, 2, timeout=100.0)
    assert first == second
