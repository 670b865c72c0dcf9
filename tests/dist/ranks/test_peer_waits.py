"""Ranks of which one waits in the store while another waits in a header, or for another text: each would wait for ever.

The group's timeout is far above what they may wait: so what ends them is that they know of each other.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from dist.spawn import run_ranks
from marks import slow
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import RankMismatchError

pytestmark = [pytest.mark.dist, pytest.mark.alone]
LONG_S, SOON_S = 120.0, 20.0


def step(call: Any) -> None:
    call(torch.ones(4, 16)).square().mean().backward()


def evaluate(call: Any) -> None:
    with torch.no_grad():
        call(torch.ones(4, 16))


def crosses(rank: int, world: int, odd: int, before: bool) -> tuple[float, str, int]:
    """Under a memory budget the graphs that follow are decided on together: rank ``odd`` evaluates, the others train."""
    torch.manual_seed(0)
    model = zero.shard(
        nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)),
        device="cpu",
        transport="c10d",
        memory_budget_bytes=1 << 20,
        compute="aten",
    )
    call = torch.compile(model, backend="zero", dynamic=False)
    if before:
        step(call)
    start = time.monotonic()
    with pytest.raises(RankMismatchError) as error:
        evaluate(call) if rank == odd else step(call)
    seconds = time.monotonic() - start
    if not before:  # no rank has compiled anything: all go on from here
        step(call)
        evaluate(call)
    return seconds, str(error.value), model[0].weight.shape[0]


@pytest.mark.parametrize(
    ("world", "odd", "before"),
    [(2, 1, True), *slow((2, 0, True), (2, 1, False), (3, 1, True), (3, 2, False))],
)
def test_a_rank_evaluates_while_others_train_under_a_budget(world, odd, before):
    for seconds, text, _ in run_ranks(crosses, world, odd, before, timeout=90.0, group_timeout=LONG_S):
        assert seconds < SOON_S, text
        assert "different calls" in text, text
        if odd and before:  # what rank 0 decides for itself the others need not be there for
            assert "decision on the plan" in text, text
