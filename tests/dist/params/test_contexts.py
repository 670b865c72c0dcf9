"""``zero.gathered`` that ends on one rank, or on all, while it still gathers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dist.soon import GROUP_TIMEOUT_S, raised, ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import zero_compiler as zero
from zero_compiler.errors import RankMismatchError, TransferError
from zero_compiler.sharded import blocking_transfers

pytestmark = pytest.mark.dist


def gather_whole(model: nn.Module, write: bool) -> None:
    with zero.gathered(model, write=write):
        pass


def broken_off(rank: int, write: bool, failing: tuple[int, ...], error: type[BaseException]) -> str:
    """What this rank raises as the second gather fails on some ranks, which live on."""
    group = dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    torch.manual_seed(0)
    model = zero.shard(nn.Linear(16, 16), mesh=DeviceMesh.from_group(group, "cpu"), device="cpu")
    real, calls = blocking_transfers._all_gather, []

    def gather(*args: Any) -> None:
        calls.append(args)
        if rank in failing and len(calls) == 2:
            raise error("out of luck")
        real(*args)

    with mock.patch.object(blocking_transfers, "_all_gather", gather):
        text = raised(error if rank in failing else RankMismatchError, gather_whole, model, write)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert " broke off on " in raised(TransferError, gather_whole, model, write)
    return text


ENDS = [
    (write, failing, error)
    for write in (False, True)
    for failing, error in (((1,), MemoryError), ((1,), KeyboardInterrupt), ((0, 1), KeyboardInterrupt))
]


def all_ends(rank: int, world: int) -> list[str]:
    return [broken_off(rank, *end) for end in ENDS]


def test_gathered_ends_on_all_ranks_while_it_gathers():
    texts = ranks(all_ends, 2)
    for rank in range(2):
        for text, (_, failing, error) in zip(texts[rank], ENDS, strict=True):
            assert text == (
                "out of luck"
                if rank in failing
                else f"rank 1 of 2 could not complete its part of this call: {error.__name__}: out of luck; "
                "its own traceback says where"
            )
