"""How far ahead the gathers of a model start, on machines of several speeds, and what the report says of it."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import pytest
import torch
from machines import machine
from torch import nn

from zero_compiler.cost.hardware import load
from zero_compiler.cost.prefetch import phase_us
from zero_compiler.cost.simulate import simulate
from zero_compiler.ir.instructions import Gather, WaitGather
from zero_compiler.plan import schedule
from zero_compiler.tools.planning import plan, report

LAYERS = 8


class Headed(nn.Module):
    """Small layers, then a head that takes as long to gather as several of them to compute."""

    def __init__(self, width: int = 64, out: int = 4096) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(LAYERS))
        self.head = nn.Linear(width, out, bias=False)

    def forward(self, x):
        for layer in self.h:
            x = torch.tanh(layer(x))
        return self.head(x).square().mean()


@pytest.fixture
def on(tmp_path):
    def write(**fields) -> str:
        path = tmp_path / f"machine{len(list(tmp_path.iterdir()))}.json"
        path.write_text(json.dumps(machine(**fields)))
        return str(path)

    return write


def reported(hardware: str, **fields):
    torch._dynamo.reset()
    return report(Headed(), (torch.zeros(4, 64),), 2, hardware=hardware, bucket_bytes=0, **fields)


def frame_of(hardware: str, world: int = 2, **fields):
    torch._dynamo.reset()
    (frame,) = plan(Headed(), (torch.zeros(4, 64),), world, hardware=hardware, bucket_bytes=0, **fields)
    return frame


def ahead(program) -> dict[str, int]:
    """By unit, how many waits of other units stand between the start of its gather and its own wait, plus one."""
    waited = 0
    started: dict[str, int] = {}
    out = {}
    for instr in program.instrs:
        if isinstance(instr, Gather):
            started[program.gathers[instr.index].unit] = waited
        elif isinstance(instr, WaitGather):
            unit = program.gathers[instr.index].unit
            out[unit] = waited - started[unit] + 1
            waited += 1
    return out


def test_a_large_weight_starts_as_early_as_its_transfer_needs(on):
    hardware = on()
    frame = frame_of(hardware)
    program, timeline = frame.programs["forward"], frame.timelines["forward"]
    # A layer computes for about 20 us (two kernels of 10) and moves 16 KiB in 3 us; the head moves 1 MiB in 106.
    want = math.ceil((1 + 64 * 4096 * 4 / 10_000) / program.segment_us[1])
    assert 4 <= want <= 6
    found = ahead(program)
    assert found["head"] == want
    # The layers in between come first on the lane: none starts behind the head. Those before start one ahead.
    start = LAYERS + 1 - want
    for i in range(LAYERS):
        assert i + 1 - found[f"h.{i}"] <= start if i >= start else found[f"h.{i}"] == 1
    # Nothing is waited for but the first layer, which nothing can hide.
    assert [s.label for s in timeline.waited_for()] == ["gather of h.0.weight"]


@pytest.mark.slow
def test_the_search_sees_what_the_simulation_sees(on):
    hardware = on()
    for phase in ("forward", "backward"):
        frame = frame_of(hardware)
        program, spec = frame.programs[phase], load(hardware)
        by_name = {unit.partition(":")[2]: d for unit, d in frame.choices[phase].distances.items()}
        # The same Program at distance 1, from a machine without anything to hide.
        plain = dataclasses.replace(frame_of(on(share=True)).programs[phase], segment_us=program.segment_us)
        seen = schedule.look(plain, spec, 2)
        chosen = {unit: by_name[unit.partition(":")[2]] for unit in seen.units}
        assert max(chosen.values()) > 1 or phase == "backward"
        assert phase_us(seen.phase, [1] * len(seen.units)) == pytest.approx(simulate(plain, spec, 2).total_us)
        assert phase_us(seen.phase, seen.of(chosen)) == pytest.approx(frame.timelines[phase].total_us)
        assert frame.timelines[phase].total_us <= simulate(plain, spec, 2).total_us


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "world", "why"),
    [
        ({"share": True}, 2, "compute and transfers share cores here"),
        ({}, 1, "nothing moves between ranks"),
    ],
)
def test_where_nothing_is_to_decide_nothing_is_looked_at(on, monkeypatch, fields, world, why):
    monkeypatch.setattr(schedule, "choose", lambda *_: pytest.fail("distances were searched"))
    frame = frame_of(
        on(**fields), world, compute="aten"
    )  # where operators are fused, small layers share a unit
    for phase in ("forward", "backward"):
        assert why in frame.choices[phase].why
        assert set(ahead(frame.programs[phase]).values()) <= {1}


def test_kept_weights_move_nothing_in_backward(on):
    frame = frame_of(on(), stage=2)
    assert frame.choices["backward"].why == "nothing moves between ranks"
    gathers = [s for s in frame.timelines["backward"].spans if s.label.startswith("gather")]
    assert gathers == []
    assert ahead(frame.programs["forward"])["head"] > 1


@pytest.mark.slow
def test_a_budget_bounds_what_is_in_flight(on):
    tight = reported(on(share=True))
    hardware = on()
    one = 64 * 64 * 4
    peaks, distances = [], []
    for layers in (0, 1, 2, 64):
        budget = tight.memory.peak + layers * one
        told = reported(hardware, memory_budget_bytes=budget)
        (frame,) = told.frames
        peaks.append(told.memory.peak)
        distances.append(ahead(frame.programs["forward"])["head"])
        assert told.memory.peak <= budget
    assert distances[0] < distances[-1] == ahead(frame_of(hardware).programs["forward"])["head"]
    assert distances == sorted(distances)


def test_the_report_says_how_far_and_why(on):
    text = reported(on()).summary()
    assert re.search(
        r"gathers start one unit ahead, but 5 ahead for head, .*: stall [0-9.]+ us becomes", text
    )
    assert "two of the largest unit" in text
    assert "waits 2.6 us for the gather of h.0.weight: 0% of 2.6 us hidden" in text


def test_a_choice_means_the_same_on_every_rank():
    mine = ["m1f:", "m1f:h.0", "m1f:h.0", "m2a:h.0"]
    theirs = ["m77:", "m77:h.0", "m77:h.0", "m03:h.0"]
    assert schedule.key_of("forward", mine) == schedule.key_of("forward", theirs)
    assert schedule.key_of("forward", mine) != schedule.key_of("backward", mine)
    assert schedule.key_of("forward", mine) != schedule.key_of("forward", [*mine[:3], "m1f:h.1"])
    text = schedule.to_text({"m1f:h.0": 3}, mine)
    assert schedule.from_text(text, theirs) == {"m77:": 1, "m77:h.0": 3, "m03:h.0": 1}
