"""Plans of saved tensors that wait in files: out and back in time, and only what the lane hides."""

from __future__ import annotations

import glob
import os
import re

import pytest
import torch
from harness import SimulatedModel
from marks import thorough
from null import blocks
from null.offloaded import FAST, SLOW, Net, at_of, least, planned, waits, x

import zero_compiler as zero
from zero_compiler.errors import MemoryBudgetError
from zero_compiler.ir.instructions import Compute, Discard, Offload, Restore, WaitOffload, WaitRestore
from zero_compiler.passes.offload_activations import Saved, hidden, latest_starts

pytestmark = pytest.mark.slow


# The graphs -------------------------------------------------------------------------------------------------


# What the lane hides ----------------------------------------------------------------------------------------


def saved(name: str, ready_us: float, need_us: float, us: float) -> Saved:
    return Saved(name, "aten.mm", "", 100, ready_us, need_us, (us,), (us,))


def test_reads_start_as_late_as_the_reads_after_them_allow():
    assert latest_starts([(10.0, 2.0), (11.0, 2.0), (30.0, 5.0)]) == [7.0, 9.0, 25.0]


def test_only_what_is_written_in_forward_and_back_in_time_is_hidden():
    # Forward takes 10 us, and so does backward, which needs the last first.
    each = [saved(f"a{k}", k + 1.0, 9.0 - k, 2.0) for k in range(10)]
    taken = hidden(each, 10.0, busy_us=(0.0,))
    # Written one after the other from 1 us on: at 3, 5, 7 and 9 us. Read until 9, 8, 7, ... us: from 1 us on at the
    # latest for four of them.
    assert [s.name for s in taken] == ["a0", "a1", "a2", "a3"]
    assert hidden(each, 10.0, busy_us=(4.0,)) == each[:2]
    assert hidden([saved("b", 9.0, 9.0, 2.0)], 10.0, (0.0,)) == []


def test_a_fast_disk_takes_all_it_can_and_a_slow_one_nothing(with_files):
    fast, slow = planned(with_files(FAST)), planned(with_files(SLOW))
    assert {r.why for r in waits(fast)} == {"the lane is to hide it"}
    assert sum(r.nbytes for r in waits(fast)) > fast.frames[0].held_bytes
    assert all(r.us < 1e-3 for r in waits(fast))  # each moves in less than 1e-4 us
    assert waits(slow) == []
    assert fast.memory.programs < slow.memory.programs
    assert fast.memory.files >= sum(r.nbytes for r in waits(fast))
    assert "tensors of which each waits in files" in str(fast)


def test_a_budget_sends_more_than_the_lane_hides(with_files):
    budget = int(least() * 0.9)
    with pytest.raises(MemoryBudgetError):
        planned({}, activation_budget_bytes=budget)
    told = planned(with_files(SLOW), activation_budget_bytes=budget)
    assert told.frames[0].held_bytes <= budget
    rows = waits(told)
    assert {r.why for r in rows} == {"the budget"}
    assert all(r.us > 0 for r in rows)
    with pytest.raises(MemoryBudgetError, match="activation_budget_bytes=1 is .* bytes too small"):
        planned(with_files(SLOW), activation_budget_bytes=1)


@pytest.mark.parametrize("disk", [10.0, *thorough(300.0)])
def test_the_time_of_a_row_is_what_the_simulated_step_waits_for_it(with_files_anywhere, disk):
    """Some tensors are hidden by the times of operators alone: not where a budget has them read late."""
    budget = int(least() * 0.9)
    link = {"latency_us": 1e-6, "bytes_per_us": disk}
    frame = planned(with_files_anywhere(link), activation_budget_bytes=budget).frames[0]
    assert {r.why for r in frame.offloaded} == {"the budget"}
    for row in frame.offloaded:
        spans = [
            s
            for phase, program in frame.programs.items()
            for o in program.offloads
            for s in frame.timelines[phase].spans
            if o.name == row.name and s.label in (f"file of the {o.label}", f"copy of the {o.label}")
        ]
        assert {s.lane for s in spans} >= {"nvme-write", "nvme-read"}
        assert row.us == pytest.approx(sum(s.stalled_us + s.slowed_us for s in spans), abs=1e-6)
    lanes = ("nvme-write", "nvme-read", "host-device")
    waited = sum(t.exposed_us(lane) for t in frame.timelines.values() for lane in lanes)
    assert sum(r.us for r in frame.offloaded) == pytest.approx(waited)
    assert waited > 0


def test_a_budget_that_can_be_kept_without_files_is_kept_with_them(with_files):
    """Their MLPs in tiles, with nothing away, backward holds less than with what it reads from files in time."""

    def fewest(fields):
        with pytest.raises(MemoryBudgetError) as caught:
            planned(fields, blocks.Net(), activation_budget_bytes=1)
        return caught.value.least_bytes

    budget = fewest({})
    assert fewest(with_files(SLOW)) <= budget
    told = planned(with_files(SLOW), blocks.Net(), activation_budget_bytes=budget)
    assert told.frames[0].held_bytes <= budget


def test_a_budget_for_all_memory_sends_tensors_to_files_where_nothing_else_fits(with_files, monkeypatch):
    monkeypatch.setattr(blocks, "LAYERS", 16)
    with pytest.raises(MemoryBudgetError) as refused:
        planned({}, memory_budget_bytes=700_000)
    told = planned(with_files(SLOW), memory_budget_bytes=700_000)
    assert (
        told.memory.peak
        <= 700_000
        < int(re.search(r"peak is ([\d,]+)", str(refused.value))[1].replace(",", ""))
    )
    assert {r.why for r in waits(told)} == {"the budget"}
    assert told.memory.host > 0  # what they are read to counts


def test_a_pool_that_takes_more_than_files_free_is_not_made(with_files):
    """Of four layers, two are in it."""
    assert planned({}, memory_budget_bytes=400_000).memory.peak <= 400_000
    assert planned(with_files(FAST), activation_budget_bytes=200_000).memory.peak > 400_000
    told = planned(with_files(FAST), memory_budget_bytes=400_000)
    assert told.memory.peak <= 400_000
    assert waits(told) == []


def test_a_plan_of_a_sharded_model_makes_nothing(with_files):
    torch._dynamo.reset()
    model = zero.shard(Net(), **with_files(FAST))
    assert waits(zero.inspect(model, x()))
    sharded_model = model._zero.sharded_model
    assert (sharded_model.storage._nvme, sharded_model.runtime) == (
        None,
        None,
    )  # no file, and no thread that would write it
    assert not any(
        sharded_model.config.nvme_dir in os.path.realpath(fd) for fd in glob.glob("/proc/self/fd/*")
    )


# The Program ------------------------------------------------------------------------------------------------


def test_out_after_the_last_use_and_back_before_the_first(with_files):
    told = planned(with_files(FAST))
    forward, backward = (told.frames[0].programs[p] for p in ("forward", "backward"))
    for program in (forward, backward):
        assert len(program.offloads) == len(waits(told))
    at = at_of(forward)
    for k, instr in enumerate(forward.instrs):
        if isinstance(instr, Offload):
            readers = [j for j, i in enumerate(forward.instrs) if instr.ins[0] in getattr(i, "ins", ())]
            assert max(readers) == k  # nothing reads it later
            assert instr.free == instr.ins  # and nobody holds it
            assert at[WaitOffload, instr.index] > k
    at = at_of(backward)
    behind = 0
    for k, instr in enumerate(backward.instrs):
        if isinstance(instr, WaitRestore):
            start, end = at[Restore, instr.index], at[Discard, instr.index]
            readers = [j for j, i in enumerate(backward.instrs) if instr.outs[0] in getattr(i, "ins", ())]
            assert start < k < min(readers)
            assert max(readers) < end
            behind += any(isinstance(i, Compute) for i in backward.instrs[start:k])
    assert behind > 0  # reads pass behind compute


def test_reads_pass_while_the_segment_before_computes(with_files, monkeypatch):
    monkeypatch.setattr(blocks, "LAYERS", 12)
    link = {"latency_us": 1e-6, "bytes_per_us": 2000.0}
    backward = planned(with_files(link)).frames[0].timelines["backward"]
    assert backward.alone_us("nvme-read") > 900
    assert backward.exposed_us("nvme-read") <= 0.1 * backward.alone_us("nvme-read")


@pytest.mark.parametrize("stage", [*thorough(1), 3])
@pytest.mark.parametrize("link", [FAST, SLOW])
def test_two_ranks_get_the_numbers_of_plain_pytorch(with_files_anywhere, stage, link):
    budget = None if link is FAST else int(least() * 0.9)
    model = SimulatedModel(
        Net(), 2, stage=stage, activation_budget_bytes=budget, **with_files_anywhere(link, link)
    )
    model.check([x(), x()], lambda out: out)
    assert model.frames[-1].offloaded
