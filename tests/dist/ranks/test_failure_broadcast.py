"""A rank that cannot make its part of a call, or place its part of a model: all ranks learn at once why, and a later
attempt works.

The group's timeout is far above what a compilation takes here: an error that comes sooner was told, not waited for.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist.spawn import run_ranks
from torch import nn

import zero_compiler as zero
from zero_compiler.compile.budget_search import Fitting
from zero_compiler.errors import MemoryBudgetError, RankMismatchError, ShardError
from zero_compiler.sharded import model_identity
from zero_compiler.tools.planning import report

pytestmark = pytest.mark.dist
WIDTH, FEW, MANY = 256, 32, 4096
WEIGHT = WIDTH * WIDTH * 4
SOON_S, GROUP_TIMEOUT_S = 60.0, 120.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.h = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.h:
            x = torch.tanh(layer(x))
        return x.square().mean()


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count))


def sharded() -> nn.Module:
    return zero.shard(Net(), stage=3, bucket_bytes=0, transport="c10d")


def planned(world: int) -> Any:
    return report(Net(), rows(FEW), world, bucket_bytes=0).memory


def roomy(world: int) -> int:
    """A budget that does for few rows, with room to keep some weights."""
    memory = planned(world)
    return memory.peak + memory.gradients + 2 * WEIGHT + 4096


def compiled(model: nn.Module, budget: int) -> Any:
    options = {"compute": "aten", "memory_budget_bytes": budget}
    return torch.compile(model, backend="zero", dynamic=False, options=options)


def trained(model: nn.Module, call: Any) -> tuple[list[float], str]:
    """Losses of two steps, and what was planned for them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = call(rows(FEW))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, "\n".join(p.text() for p in zero.inspect(model).frames[-1].programs.values())


def refused(kind: type[Exception], call: Any, count: int) -> str:
    """The text of the error of a call, which comes soon."""
    start = time.monotonic()
    try:
        call(rows(count))
    except kind as error:
        text = str(error)
    else:
        raise AssertionError(f"no {kind.__name__}")
    assert time.monotonic() - start < SOON_S
    return text


def too_large(rank: int, world: int, failing: tuple[int, ...]) -> list[str]:
    """The batch of some ranks is too large for the budget; the texts of their errors, first and later."""
    budget = roomy(world)
    torch._dynamo.reset()
    fresh = sharded()
    want = trained(fresh, compiled(fresh, budget))
    assert any(fresh._zero.sharded_model.agreed.kept.values())
    model = sharded()
    call = compiled(model, budget)
    texts = [refused(MemoryBudgetError, call, MANY if rank in failing else FEW)]
    # Nothing is left of it: what is decided now is as if nobody had failed.
    assert trained(model, call) == want
    assert model._zero.sharded_model.agreed.kept == fresh._zero.sharded_model.agreed.kept
    # Others have a Program by now, and wait in the call.
    texts.append(refused(MemoryBudgetError, call, MANY if rank in failing else FEW))
    losses, _ = trained(model, call)
    assert losses[-1] < want[0][-1]
    return texts


@pytest.mark.parametrize(("world", "failing"), [(3, (0,)), (2, (1,)), (2, (0, 1))])
def test_a_budget_that_does_not_do_on_some_ranks_is_an_error_on_all(world, failing):
    texts = run_ranks(too_large, world, failing, timeout=240.0, group_timeout=GROUP_TIMEOUT_S)
    for k in range(2):
        reasons = [texts[rank][k] for rank in failing]
        assert all(
            r.startswith("memory_budget_bytes=") and "bytes too small for this rank" in r for r in reasons
        )
        told = {
            f"rank {f} of {world} could not compile its part of this call: {r}"
            for f, r in zip(failing, reasons)
        }
        assert all(texts[rank][k] in told for rank in range(world) if rank not in failing)


def smaller_first(rank: int, world: int) -> None:
    """A budget that does not do on any rank, and then another one, for the same model."""
    memory, budget = planned(world), roomy(world)
    small = memory.at_rest - memory.arena + 1024  # what rests fits, so all is tried
    torch._dynamo.reset()
    fresh, model = sharded(), sharded()
    want = trained(fresh, compiled(fresh, budget))
    text = refused(MemoryBudgetError, compiled(model, small), FEW)
    assert text.startswith(f"memory_budget_bytes={small:,} is ")
    assert "the predicted peak is" in text
    assert trained(model, compiled(model, budget)) == want


@pytest.mark.parametrize("world", [1, 2])
def test_another_budget_is_planned_for_as_if_it_were_the_first(world):
    run_ranks(smaller_first, world, timeout=240.0, group_timeout=GROUP_TIMEOUT_S)


def unlucky(rank: int, world: int) -> str:
    """An exception among the passes of rank 0."""
    budget = roomy(world)
    torch._dynamo.reset()
    model = sharded()
    call = compiled(model, budget)
    real = Fitting.partition

    def partition(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("out of luck\nand more")

    if rank == 0:
        Fitting.partition = partition
    text = refused(Exception if rank == 0 else RankMismatchError, call, FEW)
    Fitting.partition = real
    losses, _ = trained(model, call)
    assert losses[1] < losses[0]
    return text


def test_any_exception_of_one_rank_is_told_to_the_others():
    first, second = run_ranks(unlucky, 2, timeout=240.0, group_timeout=GROUP_TIMEOUT_S)
    assert "out of luck" in first
    assert second == (
        "rank 0 of 2 could not compile its part of this call: ValueError: out of luck; its own traceback says where"
    )


def replaced(process: int, processes: int, folder: str) -> str | None:
    """A job of two ranks in which calls have failed goes on with a new process in the place of one of them."""
    text = None
    if process == 2:
        model_identity._numbers[((0, 1),)] = 1  # as many models of two ranks as the others have made
    for job, members in (("first", (0, 1)), ("second", (2, 0))):
        if process not in members:
            continue
        rank, limit = members.index(process), datetime.timedelta(seconds=GROUP_TIMEOUT_S)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/{job}", rank=rank, world_size=2, timeout=limit
        )
        torch._dynamo.reset()
        model = sharded()
        call = compiled(model, roomy(2))
        text = refused(MemoryBudgetError, call, MANY if rank == 0 else FEW)
        trained(model, call)
        del model, call
        dist.destroy_process_group()
    return text


def test_a_rank_of_an_earlier_group_is_told_by_one_that_was_not_there(tmp_path):
    kept, _, new = run_ranks(replaced, 3, str(tmp_path), timeout=240.0, group=False)
    assert kept == f"rank 0 of 2 could not compile its part of this call: {new}"


# Shared memory -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def without_memory(refused: bool) -> Iterator[None]:
    """No shared memory can be had meanwhile, where ``refused``."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    real = os.posix_fallocate
    if refused:
        os.posix_fallocate = refuse
    try:
        yield
    finally:
        os.posix_fallocate = real


def shared(early: bool) -> nn.Module:
    if not early:
        return zero.shard(Net(), stage=3, transport="shared")
    with zero.init(stage=3, transport="shared"):
        return Net()


def no_room(rank: int, world: int, early: bool) -> str:
    """Rank 1 is refused memory when it moves its rows there."""
    with without_memory(rank == 1):
        text = refused(ShardError, lambda _: shared(early), FEW)
    model = shared(early)
    losses, _ = trained(model, torch.compile(model, backend="zero", options={"compute": "aten"}))
    assert losses[1] < losses[0]
    return text


WHY = r"parameter h\.\d\.weight: \d[\d,]* bytes of shared memory could not be had \(No space left on device\); free some"


@pytest.mark.parametrize("early", [False, True])
def test_no_room_for_the_parameters_of_one_rank(early):
    first, second = run_ranks(no_room, 2, early, timeout=240.0, group_timeout=GROUP_TIMEOUT_S)
    assert re.match(WHY, second)
    assert first == f"rank 1 of 2 could not place its part of the model: {second}"


def no_way_home(rank: int, world: int) -> list[str]:
    """Rank 1 is refused memory when rows that were given another storage are to move back: in the first call of a model,
    in a later one, and in a backward."""
    texts = []
    model = shared(False)
    want, _ = trained(model, torch.compile(model, backend="zero", options={"compute": "aten"}))

    def move(model: nn.Module) -> None:
        for p in model.parameters():
            p._local_tensor = p._local_tensor.detach().clone()

    torch._dynamo.reset()
    model = shared(False)
    call = torch.compile(model, backend="zero", options={"compute": "aten"})
    for _ in range(2):
        move(model)
        with without_memory(rank == 1):
            texts.append(refused(ShardError, call, FEW))
        torch._dynamo.reset()  # a frame that did not compile stays one
        call(rows(FEW))
    loss = call(rows(FEW))
    move(model)
    with without_memory(rank == 1):
        texts.append(refused(ShardError, lambda _: loss.backward(), FEW))
    model.zero_grad()
    assert trained(model, call)[0] == want
    return texts


def test_no_room_for_rows_of_one_rank_that_lie_elsewhere():
    first, second = run_ranks(no_way_home, 2, timeout=240.0, group_timeout=GROUP_TIMEOUT_S)
    for told, reason, what in zip(first, second, ("compile", "begin", "begin"), strict=True):
        assert re.match(WHY, reason)
        assert told == f"rank 1 of 2 could not {what} its part of this call: {reason}"
