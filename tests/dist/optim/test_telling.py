"""A rank that fails in a step of its optimizer, or while it is made: no peer waits for it there, and all learn soon why.

The group's timeout is far above what a step takes here: an error that comes sooner was told, not waited for.
"""

from __future__ import annotations

import copy
import errno
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist.soon import raised, ranks
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import OptimizerError, RankMismatchError, StorageError, ZeroError
from zero_compiler.ranks import call_handshake
from zero_compiler.storage.stores import FileStore, Nvme

pytestmark = pytest.mark.dist
AdamW = torch.optim.AdamW
STEPPING = "rank 1 of {} could not complete a step of its zero.optimizer: "


def made(folder: str, **fields: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    tiers = dict.fromkeys(("offload_params", "offload_optimizer"), "nvme")
    return zero.shard(model, nvme_dir=folder, transport="c10d", **tiers, **fields)


def called(model: nn.Module, compiled: bool = True) -> Any:
    torch._dynamo.reset()
    if not compiled:
        return model
    return torch.compile(model, backend="zero", dynamic=False, options={"compute": "aten"})


def batch(seed: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))


def train(call: Any, optimizer: Any, rank: int, count: int = 2) -> list[float]:
    losses = []
    for step in range(count):
        loss = call(batch(10 * step + rank)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Faulty:
    """Requests of stores fail while it is armed."""

    def __init__(self, method: str = "write") -> None:
        self.armed = False
        real = getattr(FileStore, method)

        def request(store: FileStore, span: Any, buffer: Any) -> Any:
            if self.armed:
                raise StorageError(f"{method} of {span.label}: {os.strerror(errno.EIO)}", errno=errno.EIO)
            return real(store, span, buffer)

        setattr(FileStore, method, request)


class Hook:
    """A user's own, before or after a step."""

    def __init__(self, optimizer: Any, after: bool) -> None:
        self.armed = False
        add = optimizer.register_step_post_hook if after else optimizer.register_step_pre_hook
        add(self._called)

    def _called(self, *_: Any) -> None:
        if self.armed:
            raise ValueError("out of luck")


def fails_in_a_step(
    rank: int, world: int, folder: str, how: str, compiled: bool, overlap: bool, clip: float | None
) -> str:
    """Rank 1 fails in a step; the text of this rank's error. From a checkpoint all go on."""
    beside = dist.new_group()  # no message of the model's group may stand between its own
    model = made(folder)
    optimizer = zero.optimizer(AdamW, model, overlap=overlap, max_grad_norm=clip)
    call = called(model, compiled)
    train(call, optimizer, rank)
    checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    want = train(call, optimizer, rank)

    def back() -> None:
        optimizer.zero_grad()
        model.load_state_dict(checkpoint[0])
        optimizer.load_state_dict(copy.deepcopy(checkpoint[1]))

    fault = Faulty() if how == "write" else Hook(optimizer, how == "after")
    text = ""
    for _ in range(2):  # a second failure is told as well
        back()
        loss = call(batch(rank)).square().mean()
        told_early = clip is not None and how == "before"
        fault.armed = rank == 1
        kind = StorageError if how == "write" else ValueError if rank == 1 else RankMismatchError

        def update(loss: torch.Tensor = loss) -> None:
            loss.backward()
            optimizer.step()

        if rank == 1 or told_early:
            text = raised(kind, update)
        else:
            update()
        fault.armed = False
        if rank == 1 and how == "write":
            assert "broke off" in raised(OptimizerError, optimizer.step)
        dist.barrier(beside)  # so no peer has met the first error yet, and what comes of it is no news
        if rank != 1 and not told_early:
            text = raised(kind, lambda: call(batch(rank)))
        back()
        assert train(call, optimizer, rank) == want
    return text


@pytest.mark.parametrize(
    ("world", "how", "compiled", "overlap", "clip"),
    [
        (2, "write", True, False, None),
        (3, "write", False, False, None),
        (2, "write", True, True, None),
        (2, "write", False, True, None),
        (2, "write", True, False, 0.01),
        (2, "before", True, False, 0.01),
        (3, "before", True, False, None),
        (2, "after", True, False, None),
    ],
)
def test_a_step_that_fails_on_one_rank(world, how, compiled, overlap, clip, tmp_path):
    texts = ranks(fails_in_a_step, world, str(tmp_path), how, compiled, overlap, clip)
    reason = texts[1] if how == "write" else f"ValueError: {texts[1]}; its own traceback says where"
    assert "Input/output error" in reason or "out of luck" in reason
    for told in texts[:1] + texts[2:]:
        assert told == STEPPING.format(world) + reason


def no_room(rank: int, world: int, folder: str, later: bool) -> str:
    """There is no room for the states of rank 1."""
    model = made(folder)
    call, full = called(model), rank == 1
    params = list(model.parameters())
    optimizer = zero.optimizer(AdamW, params[:1]) if later else None
    real = Nvme.store

    def store(nvme: Nvme, what: str, *args: Any, **kw: Any) -> Any:
        if what == "optimizer states" and full:
            raise StorageError(f"no room for {what}", errno=errno.ENOSPC)
        return real(nvme, what, *args, **kw)

    Nvme.store = store

    def make() -> Any:
        if optimizer is None:
            return zero.optimizer(AdamW, model)
        optimizer.add_param_group({"params": params[1:]})
        return optimizer

    if rank == 1:
        text = raised(StorageError, make)
        full = False
        optimizer_ = make()  # there is room now
    else:
        optimizer_ = make()
        text = raised(StorageError, lambda: call(batch(0)))
    losses = train(call, optimizer_, rank, 6)
    assert losses[-1] < losses[0]
    return text


@pytest.mark.parametrize("later", [False, True])
def test_no_room_for_the_states_of_one_rank(later, tmp_path):
    first, second = ranks(no_room, 2, str(tmp_path), later)
    assert second == "no room for optimizer states"
    assert first == f"rank 1 of 2 could not make its zero.optimizer: {second}"


def given_wrong(rank: int, world: int, folder: str, parts: bool) -> str:
    """What zero.optimizer is given does not fit on rank 1, which is found before anything of it is made."""
    model = made(folder)
    call = called(model, compiled=False)
    params = [{"params": list(model.parameters())}] if parts else model
    if rank == 1:
        text = raised(OptimizerError, lambda: zero.optimizer(torch.optim.LBFGS, params))
    else:
        zero.optimizer(AdamW, params)
        text = raised(OptimizerError, lambda: call(batch(0)))
    train(call, zero.optimizer(AdamW, params), rank)  # all go on from here
    return text


@pytest.mark.parametrize("parts", [False, True])
def test_what_is_given_on_one_rank_does_not_fit(parts, tmp_path):
    first, second = ranks(given_wrong, 2, str(tmp_path), parts)
    assert "LBFGS" in second
    assert first == f"rank 1 of 2 could not make its zero.optimizer: {second}"


def fails_and_leaves(rank: int, world: int, folder: str) -> str:
    model = made(folder)
    optimizer, call = zero.optimizer(AdamW, model), called(model)
    train(call, optimizer, rank)
    call(batch(rank)).sum().backward()
    if rank == 1:
        Faulty().armed = True
        try:
            optimizer.step()
        finally:
            os._exit(1)  # as a script whose loop it ends
    optimizer.step()
    time.sleep(1.0)  # the other one is gone
    return raised(StorageError, lambda: call(batch(rank)))


def test_a_rank_that_is_gone_has_said_why(tmp_path):
    first, _ = ranks(fails_and_leaves, 2, str(tmp_path), may_die=(1,))
    assert first.startswith(STEPPING.format(2) + "write of ")
    assert first.endswith("Input/output error")


def fails_again(rank: int, world: int, folder: str) -> list[str]:
    """Rank 1 fails in two steps without a call between them, in which time its peers have met the first failure."""
    model = made(folder)
    optimizer, call = zero.optimizer(AdamW, model), called(model)
    hook = Hook(optimizer, False)
    train(call, optimizer, rank)
    texts = []
    hook.armed = rank == 1
    for _ in range(2):
        if rank == 1:
            texts.append(raised(ValueError, optimizer.step))
            dist.barrier()
        else:
            dist.barrier()
            texts.append(raised(RankMismatchError, lambda: call(batch(rank))))
        dist.barrier()
    hook.armed = False
    train(call, optimizer, rank)
    return texts


@pytest.mark.parametrize("world", [2, 3])
def test_a_second_failure_is_told_once_the_first_is_met(world, tmp_path):
    for rank, texts in enumerate(ranks(fails_again, world, str(tmp_path))):
        told = STEPPING.format(world) + "ValueError: out of luck; its own traceback says where"
        assert texts == ["out of luck" if rank == 1 else told] * 2


def all_fail(rank: int, world: int, folder: str, gloo: bool) -> None:
    """Nobody is told what happens to all; a group may end with what nobody has read."""
    if not gloo:  # as on an accelerator, whose own backend has no tags
        call_handshake.has_gloo = lambda _: False
    model = made(folder)
    optimizer, call = zero.optimizer(AdamW, model), called(model)
    hook = Hook(optimizer, False)
    for _ in range(2):
        hook.armed = True
        for _ in range(2):
            raised(ValueError, optimizer.step)
        hook.armed = False
        train(call, optimizer, rank)
    if rank == 1:
        hook.armed = True
        raised(ValueError, optimizer.step)
    if gloo:
        dist.barrier()
        dist.destroy_process_group()
    elif rank == 0:
        assert "out of luck" in raised(RankMismatchError, lambda: call(batch(rank)))


@pytest.mark.parametrize("gloo", [True, False])
def test_a_step_that_fails_on_all_ranks(gloo, tmp_path):
    ranks(all_fail, 2, str(tmp_path), gloo)


def fails_in_a_closure(rank: int, world: int, folder: str) -> str:
    """What a call inside a step has told already is told once."""
    model = made(folder, memory_budget_bytes=1 << 20)
    optimizer, call = zero.optimizer(AdamW, model), called(model)
    train(call, optimizer, rank)

    def closure(x: torch.Tensor) -> torch.Tensor:
        loss = call(x).square().mean()
        loss.backward()
        return loss

    large = torch.ones(1 << 14, 16) if rank == 1 else torch.ones(4, 16)
    text = raised(ZeroError, lambda: optimizer.step(lambda: closure(large)))
    optimizer.zero_grad()
    for _ in range(2):
        optimizer.step(lambda: closure(batch(rank)))
        optimizer.zero_grad()
    return text


def test_a_call_in_a_closure_that_fails(tmp_path):
    first, second = ranks(fails_in_a_closure, 2, str(tmp_path))
    assert second.startswith("memory_budget_bytes=")
    assert first == f"rank 1 of 2 could not compile its part of this call: {second}"


def in_different_calls(rank: int, world: int, folder: str) -> str:
    """One rank clips, and the other is in a forward."""
    model = made(folder)
    optimizer, call = zero.optimizer(AdamW, model, max_grad_norm=1.0), called(model)
    train(call, optimizer, rank)
    call(batch(rank)).sum().backward()
    return raised(RankMismatchError, optimizer.step if rank == 0 else lambda: call(batch(rank)))


def test_a_norm_meets_another_call(tmp_path):
    for text in ranks(in_different_calls, 2, str(tmp_path)):
        assert "'norm of the gradients in a step of zero.optimizer' on rank 0 of 2, 'phase forward" in text
