"""A rank that fails amid a forward or backward, and goes on living: the others learn soon why, whatever they wait for.

The group's timeout is far above what a call takes here: an error that comes sooner was told, not waited for.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
from dist.soon import raised, ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zero_compiler as zero
from zero_compiler.errors import RankMismatchError, ShardError, StorageError, TransferError
from zero_compiler.params.modules import sharded_models_of
from zero_compiler.ranks import peer_waits
from zero_compiler.ranks.failing import STEP
from zero_compiler.ranks.failure_broadcast import fail_later
from zero_compiler.runtime import pools
from zero_compiler.storage.stores import FileStore

pytestmark = pytest.mark.dist
_fails: set[str] = set()
_slow: list[float] = []


@torch.library.custom_op("user::breaks", mutates_args=())
def breaks(x: torch.Tensor, phase: str) -> torch.Tensor:
    if phase in _fails:
        raise ValueError(f"out of luck in {phase}")
    if _slow:
        time.sleep(_slow.pop())
    return x.clone()


@breaks.register_fake
def _(x, phase):
    return torch.empty_like(x)


breaks.register_autograd(lambda ctx, grad: (breaks(grad, "backward"), None))


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 24), nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(breaks(torch.tanh(self.first(x)), "forward")).square().mean()


def made(transport: str, stage: int = 3, **fields: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = zero.shard(Breaking(), stage=stage, transport=transport, **fields)
    return model, torch.compile(
        model, backend="zero", dynamic=False, options={"compute": "aten", "bucket_bytes": 1}
    )


def step(call: Any) -> float:
    loss = call(torch.ones(4, 16))
    loss.backward()
    return loss.item()


def fails_in_a_call(rank: int, world: int, stage: int, transport: str, where: str) -> list[str]:
    """What this rank is told as rank 1 fails, and of the next two calls of the model. Another model goes on."""
    _, call = made(transport, stage)
    want = [step(call) for _ in range(2)]
    if rank == 1:
        _fails.add(where)
    texts = [raised(ValueError if rank == 1 else RankMismatchError, step, call)]
    _fails.clear()
    texts += [raised(TransferError, step, call) for _ in range(2)]
    if stage > 0:  # else an all-reduce has begun on some ranks alone, and gloo tells those apart by counting
        _, other = made(transport, stage)
        # So many that their numbers pass those of the transfers that broke off.
        assert [step(other) for _ in range(6)] == want * 3
    return texts


@pytest.mark.parametrize(
    ("world", "stage", "transport", "where"),
    [
        (2, 3, "c10d", "forward"),
        (2, 3, "c10d", "backward"),
        (3, 3, "c10d", "backward"),
        (3, 2, "c10d", "forward"),
        (2, 0, "c10d", "backward"),  # waits for an all-reduce
        (2, 3, "shared", "forward"),
        (3, 3, "shared", "backward"),
    ],
)
def test_a_rank_that_fails_in_a_call(world, stage, transport, where):
    results = ranks(fails_in_a_call, world, stage, transport, where)
    reason = f"ValueError: out of luck in {where}"
    for rank, (first, *later) in enumerate(results):
        if rank == 1:
            assert first == f"out of luck in {where}"
        else:
            assert first == (
                f"rank 1 of {world} could not complete its part of this call: {reason}; its own traceback says where"
            )
        for text in later:
            assert f" on rank {rank} of {world}" in text  # an earlier call broke off, or a transfer
            assert reason in text


def between_replicas(rank: int, world: int) -> str:
    """Rank 1 fails before its gradients are added to those of rank 3, which has the same rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    _, call = made("c10d", mesh=mesh)
    step(call)
    if rank == 1:
        _fails.add("backward")
    return raised(ValueError if rank == 1 else RankMismatchError, step, call)


def test_ranks_that_add_up_rows_of_replicas():
    told = "rank 1 of 4 could not complete its part of this call: ValueError: out of luck in backward"
    for rank, text in enumerate(ranks(between_replicas, 4)):
        assert text.startswith("out of luck" if rank == 1 else told)


def cannot_read(rank: int, world: int, folder: str) -> str:
    """The file of rank 1 gives an error in the middle of a backward; the process is gone soon after."""
    _, call = made("c10d", offload_params="nvme", nvme_dir=folder)
    step(call)
    loss = call(torch.ones(4, 16))
    if rank == 0:
        return raised(StorageError, loss.backward)

    def read(store: FileStore, span: Any, buffer: Any) -> Any:
        raise StorageError(f"read of {span.label}: {os.strerror(errno.EIO)}", errno=errno.EIO)

    FileStore.read = read  # type: ignore[method-assign]
    try:
        loss.backward()
    finally:
        os._exit(1)


def test_a_rank_that_cannot_read_its_file_and_is_gone(tmp_path):
    first, _ = ranks(cannot_read, 2, str(tmp_path), may_die=(1,))
    assert first.startswith("rank 1 of 2 could not complete its part of this call: read of ")
    assert first.endswith("Input/output error")


def fails_after_a_call(rank: int, world: int) -> str:
    """Rank 0 is still in a forward when rank 1, which has made its part, fails in what comes behind it: rank 0
    completes that, and its next call is told."""
    model, call = made("c10d")
    step(call)
    if rank == 1:
        call(torch.ones(4, 16))
        group = sharded_models_of(model)[0].group
        fail_later(group, ValueError("out of luck"), STEP)
        return ""
    _slow.append(3 * peer_waits.LOOK_S)
    loss = call(torch.ones(4, 16))
    return raised(RankMismatchError, loss.backward)


def test_a_rank_that_fails_after_its_part_of_a_call_ends_no_call():
    first, _ = ranks(fails_after_a_call, 2)
    assert first.startswith(
        "rank 1 of 2 could not complete a step of its zero.optimizer: ValueError: out of luck"
    )


def waits_too_long(rank: int, world: int) -> str:
    """Another thread of rank 1 has the memory of its transfers: no rank begins, and the next call does."""
    model, call = made("c10d")
    want = step(call)
    if rank == 0:
        text = raised(ShardError, step, call)
    else:
        with mock.patch.object(pools, "_LONGEST_S", 0.2), sharded_models_of(model)[0].runtime.pools.turn:
            text = raised(ShardError, step, call)
    assert step(call) == want
    return text


def test_a_rank_whose_call_waits_too_long_for_its_turn():
    first, second = ranks(waits_too_long, 2)
    assert "waited 0 s for another one, of another thread" in second
    assert first.startswith("rank 1 of 2 could not begin")
    assert second in first


def ends(rank: int, world: int) -> None:
    """What looks after a call is gone soon after it."""
    _, call = made("c10d")
    step(call)
    deadline = time.monotonic() + 10.0
    while any(t.name == "zero-watch" for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_no_thread_stays_when_nothing_is_called():
    ranks(ends, 2)
