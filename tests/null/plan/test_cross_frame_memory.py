"""Graph breaks: what the frames of one model hold beside each other is in the plan, and a budget allows it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import MemoryBudgetError
from zero_compiler.plan.budget import memory_of, peak_at
from zero_compiler.report.frame import Frame
from zero_compiler.report.memory import Memory
from zero_compiler.tools.planning import plan

pytestmark = pytest.mark.slow

WIDTH = 32
WEIGHT = WIDTH * WIDTH * 4


class Net(nn.Module):
    """Two frames; both read ``shared``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shared, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.shared(torch.tanh(self.first(x))))
        torch._dynamo.graph_break()
        return self.second(torch.tanh(self.shared(h))).square().sum()


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(0))


def compiled(model: nn.Module, budget: int | None = None):
    options = {"compute": "aten"} | ({} if budget is None else {"memory_budget_bytes": budget})
    return torch.compile(model, backend="zero", dynamic=False, options=options)


def sharded() -> nn.Module:
    torch._dynamo.reset()
    return zero.shard(Net(), stage=3)


def train(model: nn.Module, call, quiet: int = 0, count: int = 2) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        for _ in range(quiet):
            with zero.no_sync(model):
                call(rows(count)).backward()
        loss = call(rows(count))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def free(quiet: int = 0, count: int = 2) -> tuple[list[float], Memory, list[Frame], nn.Module]:
    model = sharded()
    losses = train(model, compiled(model), quiet, count)
    told = zero.inspect(model)
    return losses, told.memory, told.frames, model


def beside(frames: list[Frame], name: str) -> list[tuple[int, int]]:
    """Of each frame's forward and backward."""
    return [(getattr(f.programs["forward"], name), getattr(f.programs["backward"], name)) for f in frames]


def test_each_frame_counts_what_others_hold_meanwhile():
    _, _, frames, model = free()
    assert len(frames) == 2
    activation = 2 * WIDTH * 4
    assert frames[0].saved_bytes == 2 * activation  # two results of tanh
    # While the second one runs, the first has saved its activations; and it finds a gradient of the second.
    assert beside(frames, "before_bytes") == [(0, 0), (2 * activation, 2 * activation)]
    assert beside(frames, "again_bytes") == [(0, WEIGHT), (0, 0)]
    told = str(zero.inspect(model))
    line = "meanwhile other frames hold"
    assert told.count(f"{line} {2 * activation:,} bytes that frames before it have saved for backward\n") == 2
    assert (
        told.count(f"{line} {WEIGHT:,} bytes of gradients of its weights that frames behind it have stored\n")
        == 1
    )


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return torch.tanh(self.up(x))


class Parts(nn.Module):
    """A break in each of the blocks: all of them are frames of the same code."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x.square().sum()


def test_repeated_blocks_that_break_count_each_other():
    torch._dynamo.reset()
    model = zero.shard(Parts(), stage=3)
    train(model, compiled(model))
    frames = zero.inspect(model).frames
    saved = [f.saved_bytes for f in frames]
    assert len(frames) == 3
    assert min(saved) > 0
    assert [before for before, _ in beside(frames, "before_bytes")] == [sum(saved[:k]) for k in range(3)]


def test_a_plan_without_ranks_counts_it_too():
    torch._dynamo.reset()
    _, _, frames, _ = free()
    planned = plan(Net(), (rows(2),), 1)
    for name in ("before_bytes", "again_bytes"):
        assert beside(planned, name) == beside(frames, name)
    shards = plan(Net(), (rows(2),), 4)
    assert beside(shards, "again_bytes") == [(0, WEIGHT // 4), (0, 0)]
    assert beside(shards, "before_bytes") == beside(frames, "before_bytes")


def test_the_planned_peak_is_a_budget_that_does():
    losses, memory, _, _ = free()
    model = sharded()
    assert train(model, compiled(model, memory.peak)) == losses


def test_and_so_it_is_of_steps_that_accumulate():
    losses, memory, _, _ = free(quiet=2)
    model = sharded()
    assert train(model, compiled(model, memory.accumulating_peak), quiet=2) == losses


def test_gradients_of_an_earlier_step_are_refused_as_ever():
    _, memory, _, _ = free()
    model = sharded()
    call = compiled(model, memory.peak)
    call(rows(2)).backward()
    with pytest.raises(MemoryBudgetError, match="to keep gradients of an earlier backward"):
        call(rows(2)).backward()


def test_what_a_later_frame_adds_to_an_earlier_one_is_refused_when_it_is_compiled():
    losses, _, (first, second), model = free()
    sharded_models = [model._zero.sharded_model]
    peaks = [memory_of(sharded_models, list(f.programs.values()), f.kept_bytes).peak for f in (first, second)]
    assert peaks[0] > peaks[1]  # the first one's is that of its backward, with the gradient of ``shared``
    model = sharded()
    with pytest.raises(
        MemoryBudgetError, match=rf"beside {WEIGHT:,} bytes of other frames, into which graph"
    ):
        compiled(model, peaks[0] - 1)(rows(2))
    assert train(model, compiled(model, peaks[0])) == losses


def test_frames_compiled_again_do_not_count_each_other():
    model = sharded()
    call = compiled(model)
    for count in (64, 2):
        loss = call(rows(count))
        loss.backward()
    frames = zero.inspect(model).frames
    first, second, third, fourth = (f.saved_bytes for f in frames)
    assert (first, second - 4) == (32 * third, 32 * (fourth - 4))  # beside the loss, which is returned
    assert beside(frames, "again_bytes") == 2 * [(0, WEIGHT), (0, 0)]
    assert [b for _, b in beside(frames, "before_bytes")] == [
        0,
        frames[0].saved_bytes,
        0,
        frames[2].saved_bytes,
    ]


def test_without_gradients_nothing_waits():
    model = sharded()
    with torch.no_grad():
        compiled(model)(rows(2))
    programs = [f.programs["inference"] for f in zero.inspect(model).frames]
    assert [(p.before_bytes, p.again_bytes) for p in programs] == [(0, 0), (0, 0)]


def test_the_message_says_what_other_frames_hold():
    _, memory, frames, _ = free(count=256)
    programs = list(frames[1].programs.values())
    assert f"beside {frames[0].saved_bytes:,} bytes of other frames" in peak_at(programs, memory.gradients)
    assert "other frames" not in peak_at([frames[0].programs["forward"]], memory.gradients)
