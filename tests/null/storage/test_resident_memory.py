"""What the report expects of a process, and when its heap is given back."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from null.small import batch, two, use

import zero_compiler as zero
from zero_compiler.params.optimizer_guards import guard_optimizers
from zero_compiler.report.memory import Memory
from zero_compiler.storage import heap
from zero_compiler.storage.resident_memory import Footprint, Resident
from zero_compiler.tools import planning

MIB = 1 << 20
PLAN = Memory(
    parameters=8 * MIB,
    gradients=8 * MIB,
    optimizer=16 * MIB,
    kept=0,
    arena=4 * MIB,
    programs=28 * MIB,
    apart=3 * MIB,
)


def test_the_process_takes_what_it_had_what_compiling_left_and_the_plan():
    found = replace(PLAN, footprint=Footprint(had=200 * MIB, pages=90 * MIB, compiled=30 * MIB, frames=1))
    assert found.peak == 64 * MIB
    assert found.overhead == (24 + 28 // 4) * MIB + 64 * MIB // 256
    assert found.resident == (200 + 30 + 64) * MIB + found.overhead
    # Of an accelerator's process it has what rests on the host.
    there = replace(found, elsewhere=True)
    assert there.resident == (200 + 30 + 3) * MIB + there.overhead
    assert there.overhead == 24 * MIB + 3 * MIB // 256


def test_a_compiler_may_take_more_than_a_step():
    found = Footprint(had=200 * MIB, compiled=30 * MIB, compiling=400 * MIB, frames=1)
    assert replace(PLAN, footprint=found).resident == (200 + 30 + 8 + 400 + 24) * MIB


def test_what_was_not_measured_is_assumed_or_left_out():
    assert PLAN.compiled == 64 * MIB
    assert PLAN.resident == (64 + 64) * MIB + PLAN.overhead
    assert replace(PLAN, footprint=Footprint(had=5 * MIB)).resident == PLAN.resident + 5 * MIB


def test_a_frame_is_counted_again_when_its_first_call_begins(monkeypatch):
    own = [100]
    monkeypatch.setattr(Resident, "now", classmethod(lambda cls, pid="self": cls(own=own[0] * MIB)))
    monkeypatch.setattr(heap, "give_back", lambda: None)
    collected = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(own[0]) or own.__setitem__(0, own[0] - 10))
    found = Footprint.beside(0)
    with found.compiles():
        own[0] = 130
    assert found.compiled == 30 * MIB
    own[0] = 145  # guards
    for _ in range(2):  # the second call finds nothing to count
        found.settle()
        assert (found.compiled, found.frames, collected) == (35 * MIB, 1, [145])
    with found.compiles():
        own[0] = 138  # little: nothing is collected
    found.settle()
    assert (found.compiled, found.frames, collected) == (38 * MIB, 2, [145])


@pytest.mark.slow
def test_the_report_has_a_line_of_it():
    model = zero.shard(two())
    before = zero.inspect(model)
    assert before.memory.footprint.frames == 0
    assert "assumed: nothing is compiled yet" in str(before)
    use(model, "compiled")(batch()).backward()
    report = zero.inspect(model)
    now = Resident.now()
    memory = report.memory
    assert memory.footprint.frames == 1
    assert 0.5 * now.own < memory.resident < 2 * (now.own + now.shared) + 64 * MIB
    assert f"expected resident memory of the process {memory.resident:,} bytes\n" in str(report)
    said = report.to_dict()["memory"]
    assert said["resident_bytes"] == memory.resident
    assert said["resident_parts"]["measured"]["had"] == memory.footprint.had
    assert said["resident_parts"]["planned_bytes"] == memory.peak


@pytest.mark.slow
def test_a_plan_for_elsewhere_says_that_libraries_are_not_in_it():
    report = planning.report(two(), (batch(),), world=2)
    assert report.memory.footprint is None
    assert "which is not in it" in str(report)
    assert report.to_dict()["memory"]["resident_parts"]["measured"] is None


@pytest.mark.parametrize("ours", [True, False], ids=["sharded", "plain"])
def test_the_heap_is_given_back_behind_the_first_steps(ours, monkeypatch):
    model = two()
    opt = torch.optim.AdamW((zero.shard(model) if ours else model).parameters(), lr=1e-3)
    guard_optimizers()
    calls = []
    monkeypatch.setattr(heap, "give_back", lambda: calls.append(len(opt.state)))
    for _ in range(5):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        opt.step()
    assert calls == ([len(opt.state)] * 3 if ours else [])
