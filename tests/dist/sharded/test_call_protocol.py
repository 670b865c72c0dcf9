"""Eager collectives: one that ends on one rank alone ends soon on all, with the reason; and threads take turns."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dist.soon import GROUP_TIMEOUT_S, raised, ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zero_compiler as zero
from zero_compiler.errors import RankMismatchError, TransferError
from zero_compiler.sharded import blocking_transfers

pytestmark = pytest.mark.dist


def made() -> nn.Module:
    """A model over a process group of its own: what breaks off in another one is nothing to it."""
    group = dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    torch.manual_seed(0)
    return zero.shard(nn.Linear(16, 16), mesh=DeviceMesh.from_group(group, "cpu"), device="cpu")


def step(model: nn.Module) -> None:
    model(torch.ones(4, 16)).square().mean().backward()


def fails(name: str, error: BaseException) -> Any:
    """A transfer fails before it has begun."""
    return mock.patch.object(blocking_transfers, name, side_effect=error)


@contextlib.contextmanager
def interrupted() -> Iterator[None]:
    """Ctrl-C while this rank waits in a collective."""
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    real = blocking_transfers.wait

    def wait(*args: Any) -> None:
        timer.start()
        real(*args)

    with mock.patch.object(blocking_transfers, "wait", wait):
        yield


@contextlib.contextmanager
def late() -> Iterator[None]:
    """This rank has met the others, and comes to the collective later."""
    real = blocking_transfers._all_gather

    def gather(*args: Any) -> None:
        time.sleep(1.0)
        real(*args)

    with mock.patch.object(blocking_transfers, "_all_gather", gather):
        yield


# What happens on rank 1, and meanwhile on rank 0; and what rank 1 raises.
CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any], type[BaseException]]] = {
    "gather": (lambda: fails("_all_gather", MemoryError("no room")), contextlib.nullcontext, MemoryError),
    "reduction": (lambda: fails("reduce", MemoryError("no room")), contextlib.nullcontext, MemoryError),
    "Ctrl-C": (interrupted, late, KeyboardInterrupt),
}


def break_off(rank: int, world: int) -> list[tuple[str, str]]:
    texts = []
    for there, here, error in CASES.values():
        model = made()
        with there() if rank == 1 else here():
            first = raised(error if rank == 1 else RankMismatchError, step, model)
        texts.append((first, raised(TransferError, step, model)))
        step(made())
    return texts


def test_a_collective_that_ends_on_one_rank_alone():
    told, own = ranks(break_off, 2)
    for (first, later), (reason, own_later), case in zip(told, own, CASES.values(), strict=True):
        what = f"{case[2].__name__}: {reason}".removesuffix(": ")
        assert (
            first
            == f"rank 1 of 2 could not complete its part of this call: {what}; its own traceback says where"
        )
        assert f" broke off on rank 0 of 2: RankMismatchError: {first}" in later or later.endswith(first)
        assert own_later.startswith(f"an earlier call of the model broke off on rank 1 of 2: {what}")


def two_threads(rank: int, world: int) -> list[str]:
    """While a thread is between its meeting and the end of its gather, another one comes."""
    torch.manual_seed(0)
    models = [zero.shard(nn.Linear(16, 16, bias=False), device="cpu") for _ in range(2)]
    order: list[str] = []
    met = threading.Event()
    meet, gather = type(models[0]._zero.sharded_model).meet, blocking_transfers._all_gather

    def note_meeting(*args: Any) -> None:
        order.append(f"{threading.current_thread().name} meets")
        meet(*args)

    def note_gather(*args: Any) -> None:
        met.set()
        time.sleep(0.5)
        gather(*args)
        order.append(f"{threading.current_thread().name} has gathered")

    with (
        mock.patch.object(type(models[0]._zero.sharded_model), "meet", note_meeting),
        mock.patch.object(blocking_transfers, "_all_gather", note_gather),
        torch.no_grad(),
    ):
        threads = [
            threading.Thread(target=model, args=(torch.ones(4, 16),), name=name)
            for model, name in zip(models, ("first", "second"), strict=True)
        ]
        threads[0].start()
        assert met.wait(10.0)
        threads[1].start()
        for thread in threads:
            thread.join()
    return order


def test_threads_take_turns():
    for order in ranks(two_threads, 2):
        assert order == ["first meets", "first has gathered", "second meets", "second has gathered"]
