"""MLPs in tiles of tokens on two ranks: the losses of the whole, and what it takes, measured beside what was planned."""

from __future__ import annotations

import pytest
import torch
from dist.measured import train
from dist.spawn import run_ranks

import zero_compiler as zero
from zero_compiler.runtime import _C

pytestmark = pytest.mark.dist
WIDTH, LAYERS, ROWS = 32, 2, 2048
INTERMEDIATE = ROWS * 4 * WIDTH * 4  # bytes
NET = {"width": WIDTH, "layers": LAYERS}


def _run(rank, rows=ROWS, **fields):
    """Losses, the measured peak of the steps in bytes, and the report."""
    losses, peak, model = train(rank, NET, rows, **fields)
    return losses, peak, zero.inspect(model)


def _budgets(rank, world):
    _C.meter_install()
    outside = ROWS * WIDTH * 4 * 2 + 65536  # the batch and eager code
    want, free, told = _run(rank)
    assert free <= told.memory.peak + outside
    rows = []
    for budget in (told.memory.peak * 2 // 3, told.memory.peak * 2 // 5):
        got, measured, less = _run(rank, memory_budget_bytes=budget)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
        assert measured <= less.memory.peak + outside <= budget + outside
        rows.append((measured, "tiled: intermediate of h.1.up.weight, made again" in str(less)))
    return rows


def test_the_measured_peak_falls_below_one_whole_intermediate_with_its_gradient():
    for (whole, was), (tiled, is_) in run_ranks(_budgets, 2):
        assert (was, is_) == (False, True)
        assert whole - tiled >= INTERMEDIATE
        assert tiled < whole


def _uneven(rank, world):
    """Rank 0 has the long batch, and asks for tiles; rank 1 follows with its short one."""
    _, _, told = _run(rank)
    budget = told.memory.peak * 2 // 5
    _, _, told = _run(rank, rows=ROWS if rank == 0 else ROWS // 8, memory_budget_bytes=budget)
    return "tiled: intermediate of h.1.up.weight, made again" in str(told)


def test_ranks_with_batches_of_different_sizes():
    assert run_ranks(_uneven, 2) == [True, True]
