"""A memory budget on two ranks: what it keeps, that it holds when measured, and what does not fit."""

import gc

import pytest
import torch
from dist.spawn import run_ranks
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import MemoryBudgetError
from zero_compiler.runtime import _C

pytestmark = pytest.mark.dist
WIDTH, LAYERS, BATCH = 256, 6, 32


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.h:
            x = torch.tanh(layer(x))
        return x.square().mean()


def _run(budget):
    torch.manual_seed(0)
    # Over shared memory weights are read in place: there would be nothing to keep.
    model = zero.shard(Net(), stage=3, memory_budget_bytes=budget, bucket_bytes=0, transport="c10d")
    gc.collect()
    _C.meter_reset_peak()  # the whole model, which stood here before it was cut, is no part of training
    step = torch.compile(model, backend="zero", options={"compute": "aten"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    torch.manual_seed(1 + model._zero.policy.group.rank)
    losses = []
    for _ in range(4):
        loss = step(torch.randn(BATCH, WIDTH))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    kept = sum(model._zero.policy.kept.values())
    gathers = model._zero.policy.runtime.engine.counters()["gathers"]
    return losses, kept, gathers, zero.inspect(model).memory


def _rank(rank, world):
    _C.meter_install()
    losses, kept, gathers, memory = _run(None)
    assert kept == 0
    rows = []
    # From just enough for stage 3 to all weights kept; the batch and eager code stand beside the budget.
    outside = BATCH * WIDTH * 4 * 2 + 4096
    for layers in (0, 2, LAYERS):
        budget = memory.peak + layers * WIDTH * WIDTH * 4 + 1024
        torch._dynamo.reset()
        gc.collect()
        base = _C.meter_current()
        got, kept, n, planned = _run(budget)
        measured = _C.meter_peak() - base
        rows.append((layers, kept, n, measured, budget))
        assert got == losses
        assert planned.peak <= budget
        assert measured <= budget + outside, (measured, budget)
    return rows, gathers


def test_room_keeps_weights_and_the_measured_peak_stays_within_the_budget():
    for rows, gathers in run_ranks(_rank, 2):
        kept = [k for _, k, *_ in rows]
        assert kept[0] == 0
        assert kept == sorted(kept)
        # Backward does not read the first weight: its input needs no gradient.
        assert kept[-1] == LAYERS - 1
        done = [n for _, _, n, *_ in rows]
        assert done[0] == gathers
        # A kept weight is gathered once a step, not twice; four steps were run.
        assert [gathers - n for n in done] == [4 * k for k in kept]


def _too_small(rank, world):
    with pytest.raises(MemoryBudgetError, match="bytes too small"):
        _run(100_000)
    return True


def test_what_does_not_fit_is_an_error_on_every_rank_before_step_one():
    assert run_ranks(_too_small, 2) == [True, True]


def _uneven(rank, world):
    """Ranks whose batches differ have different room; what is kept is decided once, for all."""
    global BATCH
    BATCH = 32 if rank == 0 else 96
    memory = _run(None)[3]
    sizes = [None] * world
    torch.distributed.all_gather_object(sizes, memory.peak)
    return _run(max(sizes) + 3 * WIDTH * WIDTH * 4)[1]


def test_ranks_with_different_room_keep_the_same_weights():
    first, second = run_ranks(_uneven, 2)
    assert first == second > 0


def _looks(rank, world):
    """Rank 1 alone looks at a plan, of a batch so small that all weights could be kept."""
    budget = _run(None)[3].peak + 2 * WIDTH * WIDTH * 4 + 1024
    torch._dynamo.reset()
    model = zero.shard(Net(), stage=3, memory_budget_bytes=budget, bucket_bytes=0, transport="c10d")
    policy = model._zero.policy
    if rank == 1:
        frames = zero.inspect(model, (torch.randn(1, WIDTH),)).frames
        assert any(g.kept for f in frames for p in f.programs.values() for g in p.gathers)
        assert (policy.kept, policy.tile_bytes, policy.runtime) == ({}, {}, None)
    torch.distributed.barrier()
    torch.compile(model, backend="zero", options={"compute": "aten"})(torch.randn(BATCH, WIDTH)).backward()
    return sorted(name for name, kept in policy.kept.items() if kept)


def test_one_rank_alone_looks_at_a_plan_and_settles_nothing():
    first, second = run_ranks(_looks, 2, timeout=60, group_timeout=15)
    assert first == second != []
