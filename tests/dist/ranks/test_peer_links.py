"""A rank that cannot start a thread for its peers when it first needs one: all learn why, and a later call works."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch
from dist.soon import raised, ranks
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import TransferError

pytestmark = pytest.mark.dist


def sharded() -> nn.Module:
    torch.manual_seed(0)
    return zero.shard(nn.Linear(16, 16), device="cpu")


def without_threads(rank: int, world: int, failing: int) -> str:
    if rank == failing:
        with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
            text = raised(TransferError, sharded)
    else:
        text = raised(TransferError, sharded)
    x = torch.ones(4, 16)
    model = sharded()
    torch.manual_seed(0)
    torch.testing.assert_close(model(x), nn.Linear(16, 16)(x))
    return text


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_start_a_thread(failing):
    texts = ranks(without_threads, 2, failing)
    reason = texts[failing]
    assert reason.startswith("no thread can be started that looks after other ranks (can't start new thread)")
    assert texts[1 - failing] == f"rank {failing} of 2 could not complete its zero.shard: {reason}"
