"""Saved tensors that wait in files: the same numbers, out and back in time, and only what the lane hides."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import json
import os
import re
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from faults import run_with_faults, small_tmpfs
from harness import SimulatedModel
from machines import machine
from null import test_activations
from null.graphs import Build, aten, lower
from null.test_activations import LAYERS
from standin import accelerator
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import ConfigError, MemoryBudgetError, StorageError
from zero_compiler.hardware import HardwareSpec
from zero_compiler.ir import dump, facts
from zero_compiler.passes import OffloadActivations, run_split
from zero_compiler.passes.offload_activations import Saved, hidden, latest_starts
from zero_compiler.planning import report
from zero_compiler.policy import Policy
from zero_compiler.program import Compute, Discard, Offload, Restore, WaitOffload, WaitRestore

FAST = {"latency_us": 1e-6, "bytes_per_us": 1e9}
SLOW = {"latency_us": 1e-6, "bytes_per_us": 1.0}
ROWS = 256

pytestmark = pytest.mark.slow


class Block(test_activations.Block):
    """Its MLP mixes tokens, so that none is done in tiles of them, however small the budget."""

    def forward(self, x):
        up = self.up(self.norm(x))
        return x + F.dropout(self.down(F.gelu(up - up.mean(0))), self.drop, self.drop > 0)


class Net(test_activations.Net):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__(drop, block=Block)


def x() -> tuple[torch.Tensor]:
    return test_activations.x(ROWS)


@functools.cache
def least() -> int:
    """Fewest bytes that backward can hold where nothing waits elsewhere."""
    with pytest.raises(MemoryBudgetError) as caught:
        planned({}, activation_budget_bytes=1)
    return caught.value.least_bytes


def fields_in(folder):
    """What gives placement fields: activations in files, on a machine with such a disk and such a way to its host."""

    def write(disk=FAST, link=FAST, **fields):
        path = folder / f"machine{len(list(folder.iterdir()))}.json"
        path.write_text(json.dumps(machine(nvme_read=disk, nvme_write=disk, host_device=link)))
        return {"hardware": str(path), "nvme_dir": str(folder), "offload_activations": "nvme"} | fields

    return write


@pytest.fixture
def on(tmp_path):
    return fields_in(tmp_path)


@pytest.fixture(params=["cpu", "accelerator"])
def anywhere(request, tmp_path):
    """The same where compute is on the CPU, and where it is on an accelerator: files are behind its host."""
    with accelerator() if request.param == "accelerator" else contextlib.nullcontext():
        yield fields_in(tmp_path)


def planned(fields, model: nn.Module | None = None, **more):
    torch._dynamo.reset()
    return report(model or Net(), x(), 2, **fields, **more)


def waits(told):
    return told.frames[0].offloaded


# The graphs -------------------------------------------------------------------------------------------------


def two_products() -> tuple[Build, Build]:
    """Forward and backward of two products with a tanh between, of which both hand something on."""
    forward = Build(w1=(8, 1024), w2=(4, 8))
    v = forward.input("primals_1", 256, 1024)
    a = forward.op(aten.mm.default, v, forward.op(aten.t.default, forward.weight("w1")))
    act = forward.op(aten.tanh.default, a)
    y = forward.op(aten.mm.default, act, forward.op(aten.t.default, forward.weight("w2")))
    forward.done(y, forward.shards["w2"], act)
    backward = Build(w2=(4, 8))
    back, tangent = backward.input(act.name, 256, 8), backward.input("tangents_1", 256, 4)
    dact = backward.op(aten.mm.default, tangent, backward.weight("w2"))
    backward.done(backward.op(aten.tanh_backward.default, dact, back))
    return forward, backward


def placed(tiers: tuple[str, ...]) -> tuple[Build, Build]:
    """The same with what the tanh gives behind ``tiers``, and its transfers placed."""
    forward, backward = two_products()
    spec = HardwareSpec.from_dict(machine(nvme_read=FAST, nvme_write=FAST, host_device=FAST))
    context = forward.context("joint", machine=spec)
    facts.send_away(next(n for n in forward.graph.nodes if n.target is aten.tanh.default))
    context = replace(context, away=frozenset(), activation_bytes=0, tiers=tiers)
    run_split(OffloadActivations(), forward.graph, backward.graph, 1, context)
    lower(forward, "forward", "place-offloads", machine=context.machine)
    lower(backward, "backward", "place-offloads", machine=context.machine)
    return forward, backward


class Goldens(TestCase):
    def test_place_offloads(self):
        forward, backward = placed(("nvme",))
        self.assertExpectedInline(
            dump.text(forward.graph),
            """\
%w1_shard = input                                                        f32[4,1024]                  +16384  live 0
%w2_shard = input                                                        f32[2,8]                        +64  live 64
%primals_1 = input                                                       f32[256,1024]              +1048576  live 1048640
%w1..w2.full = zero.gather [w1, w2]                                      (f32[8,1024], f32[4,8])      +32896  live 1081536
%w1, %w2 = zero.wait %w1..w2.full                                        (f32[8,1024], f32[4,8])              live 1081536
%t_default = aten.t %w1                                                  f32[1024,8]                          live 1081536
%mm_default = aten.mm %primals_1, %t_default                             f32[256,8]                    +8192  live 41152
%tanh_default = aten.tanh %mm_default                                    f32[256,8]                    +8192  live 41152
%t_default_1 = aten.t %w2                                                f32[8,4]                             live 41152
%mm_default_1 = aten.mm %tanh_default, %t_default_1                      f32[256,4]                    +4096  live 12352
%offload_default = zero.offload %tanh_default [tanh_default]             i64[1]                               live 4160
                     zero.offloaded %offload_default                                                          live 4160
return %mm_default_1, %w2_shard, %offload_default
""",
        )
        self.assertExpectedInline(
            dump.text(backward.graph),
            """\
%w2_shard = input                                                        f32[2,8]                        +64  live 0
%ticket_tanh_default = input                                             i64[1]                           +8  live 8
%tangents_1 = input                                                      f32[256,4]                    +4096  live 4104
%restore_default = zero.restore %ticket_tanh_default [tanh_default]      f32[256,8]                    +8192  live 12288
%w2.full = zero.gather [w2]                                              (f32[4,8])                     +128  live 12416
%w2 = zero.wait %w2.full                                                 (f32[4,8])                           live 12416
%restored_default = zero.restored %restore_default                       f32[256,8]                           live 12416
%mm_default = aten.mm %tangents_1, %w2                                   f32[256,8]                    +8192  live 16384
%tanh_backward_default = aten.tanh_backward %mm_default, %restored_default f32[256,8]                    +8192  live 16384
                   zero.discard %restored_default                                                             live 8192
return %tanh_backward_default
""",
        )


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


def test_a_fast_disk_takes_all_it_can_and_a_slow_one_nothing(on):
    fast, slow = planned(on(FAST)), planned(on(SLOW))
    assert {r.why for r in waits(fast)} == {"the lane is to hide it"}
    assert sum(r.nbytes for r in waits(fast)) > fast.frames[0].held_bytes
    assert all(r.us < 1e-3 for r in waits(fast))  # each moves in less than 1e-4 us
    assert waits(slow) == []
    assert fast.memory.programs < slow.memory.programs
    assert fast.memory.files >= sum(r.nbytes for r in waits(fast))
    assert "tensors of which each waits in files" in str(fast)


def test_a_budget_sends_more_than_the_lane_hides(on):
    budget = int(least() * 0.9)
    with pytest.raises(MemoryBudgetError):
        planned({}, activation_budget_bytes=budget)
    told = planned(on(SLOW), activation_budget_bytes=budget)
    assert told.frames[0].held_bytes <= budget
    rows = waits(told)
    assert {r.why for r in rows} == {"the budget"}
    assert all(r.us > 0 for r in rows)
    with pytest.raises(MemoryBudgetError, match="activation_budget_bytes=1 is .* bytes too small"):
        planned(on(SLOW), activation_budget_bytes=1)


@pytest.mark.parametrize("disk", [10.0, 300.0])
def test_the_time_of_a_row_is_what_the_simulated_step_waits_for_it(anywhere, disk):
    """Some tensors are hidden by the times of operators alone: not where a budget has them read late."""
    budget = int(least() * 0.9)
    link = {"latency_us": 1e-6, "bytes_per_us": disk}
    frame = planned(anywhere(link), activation_budget_bytes=budget).frames[0]
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


def test_a_budget_that_can_be_kept_without_files_is_kept_with_them(on):
    """Their MLPs in tiles, with nothing away, backward holds less than with what it reads from files in time."""

    def fewest(fields):
        with pytest.raises(MemoryBudgetError) as caught:
            planned(fields, test_activations.Net(), activation_budget_bytes=1)
        return caught.value.least_bytes

    budget = fewest({})
    assert fewest(on(SLOW)) <= budget
    told = planned(on(SLOW), test_activations.Net(), activation_budget_bytes=budget)
    assert told.frames[0].held_bytes <= budget


def test_a_budget_for_all_memory_sends_tensors_to_files_where_nothing_else_fits(on, monkeypatch):
    monkeypatch.setattr(test_activations, "LAYERS", 16)
    with pytest.raises(MemoryBudgetError) as refused:
        planned({}, memory_budget_bytes=700_000)
    told = planned(on(SLOW), memory_budget_bytes=700_000)
    assert (
        told.memory.peak
        <= 700_000
        < int(re.search(r"peak is ([\d,]+)", str(refused.value))[1].replace(",", ""))
    )
    assert {r.why for r in waits(told)} == {"the budget"}
    assert told.memory.host > 0  # what they are read to counts


def test_a_pool_that_takes_more_than_files_free_is_not_made(on):
    """Of four layers, two are in it."""
    assert planned({}, memory_budget_bytes=400_000).memory.peak <= 400_000
    assert planned(on(FAST), activation_budget_bytes=200_000).memory.peak > 400_000
    told = planned(on(FAST), memory_budget_bytes=400_000)
    assert told.memory.peak <= 400_000
    assert waits(told) == []


def test_a_plan_of_a_sharded_model_makes_nothing(on):
    torch._dynamo.reset()
    model = zero.shard(Net(), **on(FAST))
    before = len(os.listdir("/proc/self/fd"))
    assert waits(zero.inspect(model, x()))
    policy = model._zero.policy
    assert (policy._nvme, policy.runtime) == (None, None)  # no file, and no thread that would write it
    assert len(os.listdir("/proc/self/fd")) == before


# The Program ------------------------------------------------------------------------------------------------


def at_of(program):
    """Where each transfer of a Program stands, by kind and number."""
    return {(type(i), i.index): k for k, i in enumerate(program.instrs) if not isinstance(i, Compute)}


def test_out_after_the_last_use_and_back_before_the_first(on):
    told = planned(on(FAST))
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


def test_reads_pass_while_the_segment_before_computes(on, monkeypatch):
    monkeypatch.setattr(test_activations, "LAYERS", 12)
    link = {"latency_us": 1e-6, "bytes_per_us": 2000.0}
    backward = planned(on(link)).frames[0].timelines["backward"]
    assert backward.alone_us("nvme-read") > 900
    assert backward.exposed_us("nvme-read") <= 0.1 * backward.alone_us("nvme-read")


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("link", [FAST, SLOW])
def test_two_ranks_get_the_numbers_of_plain_pytorch(anywhere, stage, link):
    budget = None if link is FAST else int(least() * 0.9)
    model = SimulatedModel(Net(), 2, stage=stage, activation_budget_bytes=budget, **anywhere(link, link))
    model.check([x(), x()], lambda out: out)
    assert model.frames[-1].offloaded


# For real ---------------------------------------------------------------------------------------------------


def trained(drop: float = 0.0, steps: int = 3, calls: int = 1, compute: str = "aten", **fields):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = zero.shard(Net(drop), **fields)
    step = torch.compile(model, backend="zero", options={"compute": compute})
    optimizer = zero.optimizer(torch.optim.SGD, model, lr=0.5)
    out = []
    for _ in range(steps):
        losses = [step(*x()) for _ in range(calls)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out += [loss.detach() for loss in losses]
    return out, model


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_losses_are_the_same_bits(anywhere, drop, calls):
    want, _ = trained(drop, calls=calls)
    got, model = trained(drop, calls=calls, **anywhere(FAST))
    assert got == want
    policy = model._zero.policy
    engine, moved = policy.nvme().engine.counters(), sum(r.nbytes for r in policy.frames[0].offloaded)
    assert moved > 0
    assert engine["bytes_written"] >= 3 * calls * moved
    assert engine["bytes_read"] >= 3 * calls * moved
    # A file for every forward that waits for its backward, and none more.
    assert len(policy.runtime.parcels._idle) == calls


def test_with_every_other_offload_under_one_budget(anywhere):
    want, _ = trained(0.3)
    every = {"offload_params": "nvme", "offload_grads": "nvme", "offload_optimizer": "nvme"}
    got, model = trained(0.3, activation_budget_bytes=int(least() * 0.9), **anywhere(FAST), **every)
    assert got == want
    assert model._zero.policy.frames[0].offloaded


def test_backward_twice_and_never(anywhere):
    torch._dynamo.reset()
    model = zero.shard(Net(), **anywhere(FAST))
    step = torch.compile(model, backend="zero", options={"compute": "aten"})
    loss = step(*x())
    loss.backward(retain_graph=True)
    once = model.first.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(model.first.weight.grad, 2 * once)
    parcels = model._zero.policy.runtime.parcels
    lost = step(*x())
    assert len(parcels._living) == 1  # the first is gone with its graph
    del lost, loss
    gc.collect()
    assert len(parcels._living) == 0


def test_compiled_segments_with_activations_in_files(anywhere):
    want, _ = trained(0.3, compute="inductor")
    got, model = trained(0.3, compute="inductor", **anywhere(FAST))
    assert model._zero.policy.frames[0].offloaded
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


def test_what_is_left_where_it_is(on):
    """Inputs of the call, and what it returns, are the caller's: nothing would be freed."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, v):
            y = torch.tanh(self.a(v))
            return self.b(y).square().mean(), y

    told = planned(on(FAST), Twice())
    assert "tanh" not in [r.name for r in waits(told)]
    assert LAYERS == len([r for r in waits(planned(on(FAST))) if "up" in r.module and r.op == "aten.addmm"])


def gone_with_its_model(places, **fields):
    """What ``places`` gives of a runtime does not outlive the model, although Dynamo keeps its Programs."""
    torch._dynamo.reset()
    model = zero.shard(Net(), **fields)
    step = torch.compile(model, backend="zero", options={"compute": "aten"})
    step(*x()).backward()
    runtime = model._zero.policy.runtime
    held = [weakref.ref(t) for t in places(runtime)]
    assert held
    del model, step, runtime
    gc.collect()
    return [ref() for ref in held if ref() is not None] == []


def test_a_deleted_model_leaves_no_pool(anywhere):
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    assert gone_with_its_model(lambda runtime: [runtime.host], **anywhere(FAST))
    assert len(os.listdir("/proc/self/fd")) == before


def test_activations_are_never_left_behind(on, tmp_path):
    """Those of a finished run are of no use to anybody, whatever else it keeps."""
    folder = tmp_path / "kept"
    folder.mkdir()
    fields = on(FAST, nvme_dir=str(folder), nvme_keep=True, offload_params="nvme")
    torch._dynamo.reset()
    model = zero.shard(Net(), **fields)
    torch.compile(model, backend="zero", options={"compute": "aten"})(*x()).backward()
    assert model._zero.policy.frames[0].offloaded
    names = [p.name for p in folder.iterdir()]
    assert any("-parameters-of-rank-" in name for name in names)
    assert not any("-activations-of-rank-" in name for name in names)


def test_checksums_find_a_changed_byte(anywhere):
    torch._dynamo.reset()
    model = zero.shard(Net(), **anywhere(FAST, nvme_checksums=True))
    step = torch.compile(model, backend="zero", options={"compute": "aten"})
    want = step(*x())
    want.backward()
    loss = step(*x())
    (parcel,) = model._zero.policy.runtime.parcels._living.values()
    byte = os.pread(parcel.place.fd, 1, 5000)
    os.pwrite(parcel.place.fd, bytes([byte[0] ^ 16]), 5000)
    with pytest.raises(StorageError, match="activation .*: the bytes at 4,096 in activations of rank 0"):
        loss.backward()
    del loss, parcel
    again = step(*x())
    again.backward()
    assert torch.equal(again, want)


# The host's memory ------------------------------------------------------------------------------------------


@pytest.fixture
def on_host(tmp_path, monkeypatch):
    """The same with memory of the host, on a CPU that stands in for an accelerator: nothing else moves there."""
    monkeypatch.setattr(Policy, "activation_tier", property(lambda policy: policy.config.offload_activations))

    def write(link, **fields):
        path = tmp_path / "machine.json"
        path.write_text(json.dumps(machine(host_device=link)))
        return {"hardware": str(path), "offload_activations": "host"} | fields

    return write


def test_on_a_cpu_the_host_is_where_everything_lies():
    told = planned({"offload_activations": "host"})
    assert waits(told) == []


@pytest.mark.parametrize("link", [FAST, SLOW])
def test_copies_to_the_host_are_planned_as_files_are(on_host, link):
    budget = None if link is FAST else int(least() * 0.9)
    told = planned(on_host(link), activation_budget_bytes=budget)
    assert {r.tier for r in waits(told)} == {"host"}
    assert {r.why for r in waits(told)} == {"the lane is to hide it" if link is FAST else "the budget"}
    programs = told.frames[0].programs
    assert [p.host_bytes for p in programs.values()] == [0, 0]  # no pool on the way
    # What came back is on the device: counted from the start of the copy to the end of its life.
    backward = programs["backward"]
    for k, instr in enumerate(backward.instrs[:-1]):
        if isinstance(instr, Restore) and not isinstance(backward.instrs[k + 1], Compute):
            assert backward.live[k] >= backward.offloads[instr.index].nbytes
    assert told.memory.files == 0
    assert "tensors of which each waits on the host" in str(told)
    busy = told.frames[0].timelines["backward"].nbytes("host-device")
    assert busy == sum(r.nbytes for r in waits(told))


def test_two_ranks_with_activations_on_the_host(on_host):
    model = SimulatedModel(Net(), 2, **on_host(FAST))
    model.check([x(), x()], lambda out: out)
    assert model.frames[-1].offloaded


@pytest.mark.parametrize("calls", [1, 2])
def test_losses_are_the_same_bits_with_the_host(on_host, calls):
    want, _ = trained(0.3, calls=calls)
    got, model = trained(0.3, calls=calls, **on_host(FAST))
    assert got == want
    assert model._zero.policy.frames[0].offloaded
    assert len(model._zero.policy.runtime.parcels._idle) == calls


def test_a_deleted_model_leaves_no_memory_on_the_host(on_host):
    assert gone_with_its_model(lambda runtime: runtime.parcels._idle, **on_host(FAST))


# Storage that fails -----------------------------------------------------------------------------------------

_LOOP = """
import sys, torch
sys.path.insert(0, {tests!r})
import functools
import zero_compiler as zero
from null.test_offload_activations import Net, x
from zero_compiler.errors import StorageError
from zero_compiler.runtime import aio, stores
stores.Engine = functools.partial(aio.Engine, backend="threads", block_bytes=16384)
torch.manual_seed(0)
model = zero.shard(Net(), **{fields!r})
step = torch.compile(model, backend="zero", options=dict(compute="aten"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
engine = model._zero.policy.nvme().engine
try:
    for _ in range(4):
        loss = step(*x())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item(), flush=True)
    print("short", engine.counters()["short_transfers"] > 10)
except StorageError as error:
    print(error.errno, error)
print("in flight", engine.counters()["in_flight"])
"""


def test_system_calls_that_fail(on, tmp_path):
    fields = on(FAST, nvme_dir=str(tmp_path / "target"))
    (tmp_path / "target").mkdir()

    def run(call: str, number: int, first: int = 1) -> list[str]:
        body = _LOOP.format(tests=str(Path(__file__).parents[1]), fields=fields)
        done = run_with_faults(tmp_path, body, call=call, path="target", errno=number, first=first)
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("in flight 0\n")
        assert list((tmp_path / "target").iterdir()) == []
        return done.stdout.splitlines()[:-1]

    want = [str(loss.item()) for loss in trained(steps=4)[0]]
    assert run("pwrite", 0) == [*want, "short True"]
    for call, number, words in (
        ("pread", errno.EIO, ("read of", "(activation ", " of h.", "Input/output error")),
        ("pwrite", errno.ENOSPC, ("write of", "(activation ", " of h.", "No space left on device")),
    ):
        *steps, last = run(call, number, first=70)
        assert 0 < len(steps) < 4
        assert steps == want[: len(steps)]
        assert last.startswith(f"{number} ")
        assert all(word in last for word in words), last


def test_a_disk_that_is_full_before_the_first_step(on, tmp_path):
    with small_tmpfs(tmp_path / "small", "64k") as folder:
        with pytest.raises(StorageError, match="bytes free, and activations of rank 0 need"):
            trained(**on(FAST, nvme_dir=str(folder)))
        gc.collect()
        assert list(folder.iterdir()) == []


def test_what_an_error_of_a_compilation_tells(on, tmp_path):
    """A frame that did not compile raises it at each call, with all it knows; no report has such a frame."""
    torch._dynamo.reset()
    model = zero.shard(Net())

    def call(**options):
        step = torch.compile(model, backend="zero", options={"compute": "aten", **options})
        step(*x()).backward()

    with pytest.raises(MemoryBudgetError) as refused:
        call(memory_budget_bytes=100_000)
    with pytest.raises(MemoryBudgetError) as refused:
        call(activation_budget_bytes=1)
    assert "compiled" in str(zero.inspect(model))
    call(activation_budget_bytes=refused.value.least_bytes)
    assert len(zero.inspect(model).frames) == 1
    with small_tmpfs(tmp_path / "full", "64k") as folder:
        with pytest.raises(StorageError) as full:
            trained(**on(FAST, nvme_dir=str(folder)))
    assert (full.value.errno, full.value.path) == (errno.ENOSPC, str(folder))


def test_options_that_do_not_fit():
    with pytest.raises(ConfigError, match='offload_activations="nvme" needs nvme_dir'):
        zero.shard(Net(), offload_activations="nvme")
