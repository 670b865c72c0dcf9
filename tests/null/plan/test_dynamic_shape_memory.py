"""Calls at other sizes than those of the plan, under a memory budget, on one rank."""

from __future__ import annotations

import gc

import pytest
import torch
from marks import thorough
from torch import nn

import zero_compiler as zero
from zero_compiler.emit.no_sync_program import accumulating
from zero_compiler.errors import MemoryBudgetError
from zero_compiler.runtime import _C

WIDTH, LAYERS = 32, 3
FEW, SOME, MANY = 8, 16, 4096
ADVICE = r"make the batch smaller, .* torch.compile\(dynamic=False\), or with torch._dynamo.mark_dynamic"

pytestmark = pytest.mark.slow


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.h = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.h:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Broken(Net):
    """Two frames."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.h
        x = torch.tanh(second(torch.tanh(first(x))))
        torch._dynamo.graph_break()
        return torch.tanh(third(x)).square().mean()


class Wide(nn.Module):
    """Activations that backward can make again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(nn.functional.gelu(up(x)))
        return x.square().mean()


class Attention(nn.Module):
    """Sizes of which a batch has two, and that the graph computes others from."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, 4, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        # An index in brackets is traced to a graph that holds `mixed` for longer where sizes are symbols (torch 2.15).
        tail = torch.cat([mixed.narrow(2, length // 2, length - length // 2), mixed], 2)
        return self.out(tail.transpose(1, 2).reshape(-1, WIDTH)).square().mean()


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(0))


class Run:
    """A model under a budget, of which a graph with symbolic sizes exists."""

    def __init__(
        self, budget: int | None, net: nn.Module | None = None, compute: str = "aten", **how
    ) -> None:
        torch._dynamo.reset()
        gc.collect()
        _C.meter_install()
        self.base = _C.meter_current()
        self.model = zero.shard(Net() if net is None else net, stage=3)
        options = {"compute": compute} | ({} if budget is None else {"memory_budget_bytes": budget})
        self.call = torch.compile(self.model, backend="zero", options=options, **how)

    def warm(self) -> Run:
        for count in (FEW, SOME):
            self.step(count)
        return self

    def step(self, *shape: int) -> None:
        self.call(rows(*shape)).backward()
        self.model.zero_grad()

    def refused(self, what: str, *shape: int) -> None:
        with pytest.raises(MemoryBudgetError, match=what):
            self.step(*shape)

    @property
    def told(self):
        return zero.inspect(self.model)


def planned(count: int, net: type[nn.Module] = Net, compute: str = "aten"):
    """What a plan for just so many rows takes; of what is compiled, as the code has it."""
    if compute == "inductor":
        run = Run(None, net(), compute)
        run.step(count)
        return run.told.memory
    torch._dynamo.reset()
    return zero.inspect(zero.shard(net(), stage=3), (rows(count),)).memory


def test_sizes_that_ran_run_after_a_second_size_was_refused():
    """With the second size the graph becomes one of any sizes, which Dynamo would look up first from then on."""
    run = Run(planned(64).peak)
    run.step(FEW)
    for _ in range(2):
        run.refused("bytes too small for this rank: the predicted peak is", MANY)
        run.step(FEW)
    run.step(SOME)


# Inductor itself compiles again for much larger sizes, and so they are planned for themselves.
@pytest.mark.parametrize(("compute", "many"), [("aten", MANY), *thorough(("inductor", 128))])
def test_a_call_that_passes_the_budget_is_refused_before_it_begins(compute, many):
    budget, want = (planned(count, compute=compute).peak for count in (64, many))
    run = Run(budget, compute=compute).warm()
    assert [f.planned_sizes for f in run.told.frames] == [{}, {"args[0].size()[0]": SOME}]
    states = LAYERS * WIDTH * WIDTH * 8  # of an optimizer: in the plan, and there is none
    before = _C.meter_current()
    _C.meter_reset_peak()
    large = rows(many)
    what = (
        rf"memory_budget_bytes={budget:,} is {want - budget:,} bytes too small for a call with "
        rf"args\[0\].size\(\)\[0\] = "
        rf"{many:,} \(planned: {SOME}\): this forward and its backward need {want:,} bytes on rank 0 of 1, and "
        rf"{budget:,} are allowed; {ADVICE}"
    )
    for _ in range(2):
        with pytest.raises(MemoryBudgetError, match=what):
            run.call(large)
    assert _C.meter_peak() - before <= large.nbytes + 8192  # nothing was computed
    del large
    # What just fits runs, within the budget; one row more does not.
    _C.meter_reset_peak()
    run.step(64)
    assert _C.meter_peak() - run.base + states <= budget + 64 * WIDTH * 4 + 8192
    run.refused(r"args\[0\].size\(\)\[0\] = 65", 65)
    run.step(FEW)
    assert len(run.told.frames) == 2


def test_counted_at_other_sizes_a_plan_is_that_of_these_sizes():
    shapes = ((3, 4), (5, 33), (16, 7))
    run = Run(1 << 30, Attention())
    for shape in ((2, 6), (4, 10), *shapes):
        run.step(*shape)
    assert sorted(run.told.frames[-1].planned_sizes.values()) == [4, 10]
    counted = list(run.told.frames[-1].sized._known.values())
    fixed = Run(1 << 30, Attention(), dynamic=False)
    for k, shape in enumerate(shapes):
        fixed.step(*shape)
        at, saved = counted[2 * k]  # behind it is its backward, alone
        assert saved == fixed.told.frames[-1].saved_bytes
        for phase, wanted in fixed.told.frames[-1].programs.items():
            assert at.programs[phase].live == wanted.live
            assert at.programs[phase].inside == wanted.inside
        quiet, _ = fixed.told.frames[-1].accumulating
        owners = {run.model._zero.sharded_model.key}
        assert accumulating(at.programs["backward"], owners).live == quiet.live


def test_without_gradients_too():
    budget = planned(64).peak
    run = Run(budget)
    with torch.no_grad():
        for count in (FEW, SOME):
            run.call(rows(count))
        with pytest.raises(MemoryBudgetError, match="this inference needs"):
            run.call(rows(MANY))
        run.call(rows(FEW))


def test_a_backward_alone_is_looked_at_where_steps_accumulate():
    memory = planned(64)
    run = Run(memory.peak).warm()
    with zero.no_sync(run.call):
        run.step(FEW)
        loss = run.call(rows(64))
        with pytest.raises(MemoryBudgetError, match="too small to accumulate under zero.no_sync"):
            loss.backward()
    run.step(64)
    run = Run(memory.accumulating_peak).warm()
    with zero.no_sync(run.call):
        run.call(rows(64)).backward()
    run.step(64)


def test_what_earlier_frames_save_is_counted_at_the_sizes_of_the_call():
    free = Run(None, Broken(), dynamic=False)
    free.step(64)
    run = Run(free.told.memory.peak, Broken()).warm()
    first, second = run.told.frames[-2:]
    assert second.programs["forward"].before_bytes == first.saved_bytes == 2 * SOME * WIDTH * 4
    run.step(64)
    # Each frame fits alone; the second one does not beside what the first has saved.
    run.refused(rf"{2 * 66 * WIDTH * 4:,} bytes that frames before it have saved: this forward", 66)
    run.step(64)


def test_such_sizes_are_planned_for_themselves_as_the_message_says():
    tight = planned(1024, Wide).peak * 4 // 5
    Run(tight, Wide()).warm().refused(ADVICE, 1024)
    alone = Run(tight, Wide(), dynamic=False).warm()
    alone.step(1024)
    assert alone.told.frames[-1].remade
    large, x = Run(tight, Wide()), rows(1024)
    torch._dynamo.mark_dynamic(x, 0)
    large.call(x).backward()
    large.model.zero_grad()
    for count in (FEW, SOME, 128, 1024):
        large.step(count)
    assert len(large.told.frames) == 1
    large.refused(ADVICE, 2048)


def test_the_report_says_at_which_sizes_bytes_are_counted():
    run = Run(None).warm()
    line = f"bytes are counted at args[0].size()[0] = {SOME}; these may change from call to call"
    assert str(run.told).count(line) == 1
    assert [f["planned_sizes"] for f in run.told.to_dict()["frames"]] == [{}, {"args[0].size()[0]": SOME}]


def test_without_a_budget_nothing_is_counted_again():
    run = Run(None).warm()
    run.step(MANY)
    assert [f.sized for f in run.told.frames] == [None, None]


def test_a_bounded_number_of_sizes_is_remembered():
    run = Run(1 << 30).warm()
    for count in range(20, 70):
        run.step(count)
    assert len(run.told.frames[-1].sized._known) <= 64
