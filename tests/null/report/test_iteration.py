"""The story of an iteration is that of its Programs: each instruction is told, and all that is made is freed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from zero_compiler.ir.instructions import KINDS as INSTRUCTIONS
from zero_compiler.ir.instructions import Compute, Release
from zero_compiler.report.iteration import _SENTENCES, FILE, KINDS, MEMORY, OPTIMIZER, SHARD, drawn, story
from zero_compiler.report.lifetimes import FULL_GRADIENT, GRADIENT, WEIGHT
from zero_compiler.tools.planning import report

LAYER = 4 * 64 * 96  # bytes of one weight


def planned(**fields):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 96, bias=False), nn.Tanh(), nn.Linear(96, 64, bias=False))

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, x):
            return self.layers(x).square().mean()

    return report(Loss(), (torch.zeros(8, 64),), 2, compute="aten", hardware="dgx-h100", **fields)


def told(plan):
    return story(plan, "a title", "what it is", 8 * 64 * 4)


def held(made, step, kind, place=MEMORY):
    return sum(
        h.nbytes for h in made.holdings if (h.kind, h.place) == (kind, place) and h.begin <= step <= h.end
    )


@pytest.fixture(scope="module")
def sharded():
    return planned(stage=3)


def test_every_instruction_has_a_sentence():
    assert set(_SENTENCES) == set(INSTRUCTIONS)


def test_the_steps_are_the_instructions(sharded):
    made = told(sharded)
    programs = sharded.frames[0].programs
    lines = [p.line(i) for p in programs.values() for i in p.instrs]
    assert [s.line for s in made.steps if s.line] == lines
    assert [s.phase for s in made.steps] == [
        "before", *(phase for phase, p in programs.items() for _ in p.instrs), "update", "update", "before"
    ]  # fmt: skip
    assert all(s.words.endswith(".") and s.words[0].isupper() for s in made.steps)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_is_made_in_an_iteration_is_gone_behind_it(stage):
    made = told(planned(stage=stage))
    last = len(made.steps) - 1
    assert made.bytes_at(0) == made.bytes_at(last)
    assert {h.kind for h in made.holdings if h.end == last} == {h.kind for h in made.holdings if h.begin == 0}
    assert max(made.bytes_at(k) for k in range(last)) > made.bytes_at(0)
    assert all(m.end >= m.begin for m in made.moves)


def test_a_release_that_is_missing_is_seen(sharded):
    (frame,) = sharded.frames
    forward = frame.programs["forward"]
    left = replace(forward, instrs=[i for i in forward.instrs if not isinstance(i, Release)])
    changed = replace(sharded, frames=[replace(frame, programs={**frame.programs, "forward": left})])
    end = len(left.instrs)
    assert held(told(changed), end, WEIGHT) == 2 * LAYER
    assert held(told(sharded), len(forward.instrs) + 1, WEIGHT) < 2 * LAYER


def test_a_rank_holds_its_part_at_rest_and_more_only_for_a_while(sharded):
    whole, part = told(planned(stage=0)), told(sharded)
    assert held(part, 0, SHARD) == LAYER  # half of two
    assert held(part, 0, OPTIMIZER) * 2 == held(whole, 0, OPTIMIZER) == 4 * LAYER
    assert held(part, 0, WEIGHT) == 0
    forward = sharded.frames[0].programs["forward"].instrs
    for at, instr in enumerate(forward):
        if isinstance(instr, Compute):
            assert held(part, at + 1, WEIGHT) >= LAYER
    rows = {h.name: h.rows for h in part.holdings if h.kind == SHARD}
    assert rows == {"layers.0.weight": ((0, 47), (48, 95)), "layers.2.weight": ((0, 31), (32, 63))}


def test_each_rank_ends_a_backward_with_its_rows_of_the_gradients(sharded):
    made = told(sharded)
    behind = max(k for k, s in enumerate(made.steps) if s.phase == "backward") + 1
    assert held(made, behind, GRADIENT) == LAYER
    assert held(made, behind, FULL_GRADIENT) == 0
    assert max(held(made, k, FULL_GRADIENT) for k in range(behind)) == 2 * LAYER


def test_a_kept_weight_is_not_gathered_again_and_goes_out_of_date():
    made = told(planned(stage=1))
    words = [s.words for s in made.steps if s.phase == "backward" and s.line.startswith("gather")]
    assert words
    assert all("nothing has to move" in w for w in words)
    first = min(k for k, s in enumerate(made.steps) if s.phase == "backward")
    assert not [m for m in made.moves if m.begin >= first and "gather of" in m.text]
    assert "out of date" in made.steps[-2].words
    assert held(made, len(made.steps) - 2, WEIGHT) == 2 * LAYER
    assert held(made, len(made.steps) - 1, WEIGHT) == 0


def test_what_rests_in_files_is_read_and_written(tmp_path):
    files = {f"offload_{what}": "nvme" for what in ("params", "grads", "optimizer")}
    made = told(planned(stage=3, nvme_dir=str(tmp_path), **files))
    last = len(made.steps) - 1
    assert made.bytes_at(0) == 8 * 64 * 4  # the batch
    assert made.bytes_at(0, FILE) == made.bytes_at(last, FILE) == 3 * LAYER  # weights and two states
    assert {m.way for m in made.moves} == {"ranks", "read", "write"}
    updating = [k for k, s in enumerate(made.steps) if s.phase == "update"]
    assert held(made, updating[0], GRADIENT, FILE) == LAYER
    assert [m.way for m in made.moves if m.begin in updating] == ["read", "write"]
    assert "from its file" in made.steps[1].words


def test_texts_stand_once_on_the_page(sharded):
    made = told(sharded)
    page = drawn({"a model": [made, made]})
    assert len(set(page["texts"])) == len(page["texts"])
    (model,) = page["models"]
    first, second = model["runs"]
    assert first == second
    assert [page["texts"][words] for _, _, words in first["steps"]] == [s.words for s in made.steps]
    assert [name for name, _, _ in page["kinds"]] == list(KINDS)
    assert sum(h[4] for h in first["holdings"]) == sum(h.nbytes for h in made.holdings)
