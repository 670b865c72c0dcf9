"""Past Dynamo's ``recompile_limit`` on one rank: ranks go on to meet, or all of them say why they cannot."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from dist.faulty import ATEN, expect, ranks
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import MemoryBudgetError, RankMismatchError
from zero_compiler.params.modules import sharded_models_of

pytestmark = [pytest.mark.dist]

LIMIT, STEPS = 2, 5


class Net(nn.Module):
    """``breaks``: its graph breaks in the forward, or in a function that is none of its methods."""

    def __init__(self, breaks):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4)
        self.breaks = breaks

    def forward(self, x, word=""):
        if self.breaks == "in a function":
            return behind_a_break(self, x)
        h = self.second(torch.relu(self.first(x)))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.third(h) * (len(word) + 1 if word != "three" else 7)


def behind_a_break(net, x):
    h = net.second(torch.relu(net.first(x)))
    torch._dynamo.graph_break()
    return net.third(h)


def made(breaks="", how="torch.compile", **fields):
    torch._dynamo.config.recompile_limit = LIMIT
    torch.manual_seed(0)
    plain = Net(breaks)
    call = model = zero.shard(copy.deepcopy(plain), device="cpu", **ATEN, **fields)
    if how == "torch.compile":
        call = torch.compile(model, backend="zero", dynamic=False)
    else:
        model.compile(backend="zero", dynamic=False)
    return plain, model, call


def step(call, plain, model, *given):
    for m in (model, plain):
        m.zero_grad()
    call(*given).square().mean().backward()
    plain(*given).square().mean().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        dist.all_reduce(q.grad)
        torch.testing.assert_close(p.grad.full_tensor(), q.grad / dist.get_world_size())


def sizes_differ(rank, world, breaks, how, fields):
    plain, model, call = made(breaks, how, **fields)
    for k in range(STEPS):
        step(call, plain, model, torch.randn(8 + k if rank == world - 1 else 8, 8))
    if fields:
        expect(MemoryBudgetError, lambda: call(torch.randn(20_000 if rank == world - 1 else 8, 8)), "20,000")
    return len(sharded_models_of(model)[0].frames)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"memory_budget_bytes": 60_000}], ids=["", "budget"])
@pytest.mark.parametrize("how", ["torch.compile", "module.compile"])
@pytest.mark.parametrize("breaks", ["", "in the forward", "in a function"])
def test_a_rank_of_many_sizes_meets_one_of_few(breaks, how, fields):
    frames = 2 if breaks else 1
    assert ranks(sizes_differ, 2, breaks, how, fields) == [frames, (LIMIT + 1) * frames]


WORDS = ["", "a", "bb", "three", "dddd", "eeeee", "ffffff"]


def values_differ(rank, world, fields):
    plain, model, call = made(**fields)
    x = torch.randn(8, 8)
    for word in WORDS[: 3 * LIMIT]:
        step(call, plain, model, x, word if rank else "")
    kind = MemoryBudgetError if fields else RankMismatchError
    parts = ["runs eagerly, since torch._dynamo.config.recompile_limit (2) was met"]
    expect(kind, lambda: call(x, WORDS[-1] if rank else ""), *parts)
    step(call, plain, model, x, "")  # the next one is as if nothing had been
    return True


def all_eager(rank, world):
    plain, model, call = made()
    x = torch.randn(8, 8)
    for word in WORDS:
        step(call, plain, model, x, word)
    return len(sharded_models_of(model)[0].frames)


@pytest.mark.slow
def test_ranks_that_all_run_eagerly_meet():
    assert ranks(all_eager, 2) == [3 * LIMIT] * 2


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("fields", [{}, {"memory_budget_bytes": 60_000}], ids=["", "budget"])
def test_ranks_that_cannot_meet_all_say_why(fields):
    assert all(ranks(values_differ, 2, fields))
