"""Activations of an accelerator in files, by way of its host; a CPU stands in the accelerator's place."""

from __future__ import annotations

import errno
import gc
import operator
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from expecttest import TestCase
from faults import run_with_faults, small_tmpfs
from harness import SimulatedModel
from null import blocks
from null.blocks import LAYERS
from null.offloaded import (
    LOOP,
    SLOW,
    Net,
    at_of,
    fields_in,
    least,
    placed,
    planned,
    trained,
    waits,
    x,
)
from null.storage.test_activation_store import File, Request
from standin import accelerator
from torch import nn

import zero_compiler as zero
from zero_compiler.cost.timeline import HOST, READ, WRITE
from zero_compiler.errors import MemoryBudgetError, StorageError, VerifyError
from zero_compiler.ir import dump
from zero_compiler.ir.instructions import (
    Bring,
    Compute,
    Discard,
    Offload,
    Restore,
    WaitOffload,
    WaitRestore,
    Write,
)
from zero_compiler.ir.transfers import OffloadDesc
from zero_compiler.memory.peak_check import recount
from zero_compiler.memory.verify import verify_program
from zero_compiler.passes.offload_activations import Saved, hidden
from zero_compiler.runtime.activation_offload import Staged
from zero_compiler.runtime.tier_copies import Aside
from zero_compiler.storage.activation_store import Parcels

pytestmark = pytest.mark.slow

FILES = {"forward": WRITE, "backward": READ}  # the lane of files in each phase


@pytest.fixture
def on(tmp_path):
    """Placement fields, inside of a model on an accelerator: activations in files, behind such links."""
    with accelerator():
        yield fields_in(tmp_path)


# The graphs -------------------------------------------------------------------------------------------------


class Goldens(TestCase):
    def test_place_offloads(self):
        forward, backward = placed(("host", "nvme"))
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
                 zero.write %offload_default                                                                  live 4160
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
%restore_default = zero.restore %ticket_tanh_default [tanh_default]      f32[0]                               live 4096
%bring_default = zero.bring %restore_default                             f32[256,8]                    +8192  live 12288
%w2.full = zero.gather [w2]                                              (f32[4,8])                     +128  live 12416
%w2 = zero.wait %w2.full                                                 (f32[4,8])                           live 12416
%restored_default = zero.restored %bring_default                         f32[256,8]                           live 12416
%mm_default = aten.mm %tangents_1, %w2                                   f32[256,8]                    +8192  live 16384
%tanh_backward_default = aten.tanh_backward %mm_default, %restored_default f32[256,8]                    +8192  live 16384
                   zero.discard %restored_default                                                             live 8192
return %tanh_backward_default
""",
        )


# What the lanes hide ----------------------------------------------------------------------------------------


def saved(name, ready_us, need_us, copy_us, file_us):
    us = copy_us, file_us
    return Saved(name, "aten.mm", "", 100, ready_us, need_us, us, us)


def test_a_tensor_passes_both_lanes_in_turn():
    # Forward takes 10 us. Copies of 1 us are done at 2, 3, 4, ...; files of 2 us behind them at 4, 6, 8 and 10 us.
    each = [saved(f"a{k}", k + 1.0, 20.0 - k, 1.0, 2.0) for k in range(8)]
    assert [s.name for s in hidden(each, 10.0, (0.0, 0.0))] == ["a0", "a1", "a2", "a3"]
    # With the lane of copies busy for 5 us first, files are done at 8 and 10 us.
    assert hidden(each, 10.0, (5.0, 0.0)) == each[:2]
    assert hidden(each, 10.0, (0.0, 5.0)) == each[:2]
    # Back: needed at 4 us, the copy starts at 3 us, and the read of 2 us at 1 us.
    late = saved("b", 1.0, 4.0, 1.0, 2.0)
    assert hidden([late], 10.0, (0.0, 1.0)) == [late]
    assert hidden([late], 10.0, (0.0, 1.5)) == []
    assert hidden([replace(late, need_us=2.9)], 10.0, (0.0, 0.0)) == []


def test_the_slower_of_both_lanes_decides(on):
    assert waits(planned(on()))
    assert waits(planned(on(disk=SLOW))) == []
    assert waits(planned(on(link=SLOW))) == []


def test_a_budget_sends_more_than_the_lanes_hide(on):
    budget = int(least() * 0.9)
    told = planned(on(SLOW, SLOW), activation_budget_bytes=budget)
    assert told.frames[0].held_bytes <= budget
    rows = waits(told)
    assert {(r.why, r.tier) for r in rows} == {("the budget", "nvme")}
    # A byte takes 1 us on each of two lanes, out and back: of these four it waits for two at least.
    assert sum(r.us for r in rows) > 2 * sum(r.nbytes for r in rows)
    with pytest.raises(MemoryBudgetError, match="activation_budget_bytes=1 is .* bytes too small"):
        planned(on(SLOW, SLOW), activation_budget_bytes=1)


def test_files_help_a_device_whose_pool_is_on_the_host(on, monkeypatch):
    """On CPU ranks the pool would take more than files free."""
    assert waits(planned(on(), memory_budget_bytes=500_000))
    assert planned(on(), memory_budget_bytes=500_000).memory.peak <= 500_000


# The Program ------------------------------------------------------------------------------------------------


def _computes(program, begin, end):
    return sum(isinstance(i, Compute) for i in program.instrs[begin:end])


def test_both_steps_pass_behind_compute(on):
    told = planned(on())
    forward, backward = (told.frames[0].programs[p] for p in ("forward", "backward"))
    at, copied, written = at_of(forward), 0, 0
    for k, instr in enumerate(forward.instrs):
        if isinstance(instr, Offload):
            assert forward.offloads[instr.index].tiers == ("host", "nvme")
            assert instr.free == instr.ins  # nobody else holds it
            write, done = at[Write, instr.index], at[WaitOffload, instr.index]
            assert k < write < done
            copied += _computes(forward, k, write)
            written += _computes(forward, write, done)
    assert copied > 0
    assert written > 0
    at, read, brought = at_of(backward), 0, 0
    for k, instr in enumerate(backward.instrs):
        if isinstance(instr, WaitRestore):
            start, bring = at[Restore, instr.index], at[Bring, instr.index]
            readers = [j for j, i in enumerate(backward.instrs) if instr.outs[0] in getattr(i, "ins", ())]
            assert start < bring < k < min(readers)
            assert max(readers) < at[Discard, instr.index]
            read += _computes(backward, start, bring)
            brought += _computes(backward, bring, k)
    assert read > 0
    assert brought > 0


def test_what_the_lanes_hide_takes_next_to_no_time(on, monkeypatch):
    """The first and the last tensors of twelve blocks alone."""
    monkeypatch.setattr(blocks, "LAYERS", 12)
    link = {"latency_us": 1e-6, "bytes_per_us": 2000.0}
    told = planned(on(link, link))
    assert len(waits(told)) >= 40
    for phase, timeline in told.frames[0].timelines.items():
        for lane in (FILES[phase], HOST):
            assert timeline.alone_us(lane) > 900
            assert timeline.exposed_us(lane) <= 0.25 * timeline.alone_us(lane), (phase, lane)


def test_bytes_of_the_device_the_host_and_files(on):
    plain, told = planned({}), planned(on())
    memory, programs = told.memory, told.frames[0].programs
    moved = sum(r.nbytes for r in waits(told))
    assert memory.files >= moved > 0
    assert memory.host == 0
    pool = max(p.host_bytes for p in programs.values())
    assert moved > memory.apart == pool > 0
    assert memory.programs < plain.memory.programs
    forward, backward = programs["forward"], programs["backward"]
    # A tensor leaves the device when its copy is done, and counts there again from the begin of the one back.
    up = {o.name: o.nbytes for o in forward.offloads if o.module.endswith(".up")}
    assert len(up) == LAYERS
    for k, instr in enumerate(forward.instrs):
        if isinstance(instr, Write) and (name := forward.offloads[instr.index].name) in up:
            assert forward.live[k] - forward.live[k + 1] == up[name]
    for k, instr in enumerate(backward.instrs):
        if isinstance(instr, Bring) and isinstance(backward.instrs[k - 1], Bring):
            assert backward.live[k] - backward.live[k - 1] == backward.offloads[instr.index].nbytes
    for phase in ("forward", "backward"):
        timeline = told.frames[0].timelines[phase]
        assert timeline.nbytes(FILES[phase]) == timeline.nbytes(HOST) == moved
    text = str(told)
    assert "tensors of which each waits in files" in text
    assert "bytes of this rank on the host" in text


def test_places_in_the_pool_and_bytes_are_verified(on):
    for program in planned(on()).frames[0].programs.values():
        worlds = {g.owner: 2 for g in (*program.gathers, *program.reduces)}
        verify_program(program, worlds)
        counted = [reduced + others for reduced, others in recount(program)]
        planned_for = [live - program.buffer_bytes for live in program.live]
        assert all(map(operator.le, counted, planned_for))
        for k, instr in enumerate(program.instrs):
            if isinstance(instr, (Offload, Bring)):
                assert counted[k] == planned_for[k]
        program.offloads[:] = [replace(o, offset=0) for o in program.offloads]
        with pytest.raises(VerifyError, match=r"planned memory \(host\): slots .*activation"):
            verify_program(program, worlds)


def test_the_pool_does_not_grow_with_the_layers(on, monkeypatch):
    pools = []
    for layers in (6, 12):
        monkeypatch.setattr(blocks, "LAYERS", layers)
        pools.append(max(p.host_bytes for p in planned(on()).frames[0].programs.values()))
    assert pools[0] == pools[1] > 0


def test_in_one_pool_with_parameters_and_gradients(on):
    model = SimulatedModel(Net(), 2, offload_params="nvme", offload_grads="nvme", bucket_bytes=0, **on())
    model.check([x(), x()], lambda out: out)
    assert model.frames[-1].offloaded
    assert all(p.device_bytes > 0 for p in model.programs.values())


# For real ---------------------------------------------------------------------------------------------------


def test_accumulation_and_inference(on):
    def run(fields):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = zero.shard(Net(), **fields)
        step = torch.compile(model, backend="zero", options={"compute": "aten"})
        with zero.no_sync(model):
            step(*x()).backward()
        step(*x()).backward()
        with torch.no_grad():
            out = step(*x())
        (frame, inference) = model._zero.sharded_model.frames
        assert not inference.programs["inference"].offloads
        return out, [p.grad.to_local().clone() for p in model.parameters()], frame.offloaded

    want, grads, none = run({})
    got, theirs, moved = run(on())
    assert torch.equal(got, want)
    assert all(map(torch.equal, theirs, grads))
    assert moved
    assert not none


def test_memory_that_is_not_contiguous(on):
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, v):
            y = torch.tanh(self.a(v).t())
            return self.c(torch.tanh(self.b(y.t()))).square().mean()

    def run(fields):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = zero.shard(Turned(), **fields)
        step = torch.compile(model, backend="zero", options={"compute": "aten"})
        loss = step(*x())
        loss.backward()
        return loss, model.a.weight.grad.to_local(), model._zero.sharded_model.frames[0]

    want, grad, _ = run({})
    got, theirs, frame = run(on())
    assert torch.equal(got, want)
    assert torch.equal(theirs, grad)
    assert any(o.stride[0] < o.stride[1] for o in frame.programs["forward"].offloads)


def test_many_steps_leave_nothing(on):
    def held():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), sum(isinstance(t, torch.Tensor) for t in gc.get_objects())

    torch._dynamo.reset()
    model = zero.shard(Net(), **on())
    step = torch.compile(model, backend="zero", options={"compute": "aten"})

    def steps(count):
        for _ in range(count):
            step(*x()).backward()
            model.zero_grad()
        return held()

    files, tensors = steps(3)
    now = steps(20)
    assert now[0] == files
    assert now[1] <= tensors
    runtime = model._zero.sharded_model.runtime
    assert (len(runtime.parcels._idle), len(runtime.parcels._living)) == (1, 0)
    assert runtime.aside._reading == []


# Storage that fails -----------------------------------------------------------------------------------------


def test_system_calls_that_fail(on, tmp_path):
    fields = on(nvme_dir=str(tmp_path / "target"))
    (tmp_path / "target").mkdir()
    body = LOOP.format(tests=str(Path(__file__).parents[2]), fields=fields)
    body = f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[2])!r})\n" + body.replace(
        "torch.manual_seed(0)\n",
        "from standin import accelerator\naccelerator().__enter__()\ntorch.manual_seed(0)\n",
    )
    want = [str(loss.item()) for loss in trained(steps=4)[0]]
    for call, number, words in (
        ("pread", errno.EIO, ("read of", "(activation ", " of h.", "Input/output error")),
        ("pwrite", errno.ENOSPC, ("write of", "(activation ", " of h.", "No space left on device")),
    ):
        done = run_with_faults(tmp_path, body, call=call, path="target", errno=number, first=70)
        assert done.returncode == 0, done.stderr
        *steps, last, idle = done.stdout.splitlines()
        assert idle == "in flight 0"
        assert 0 < len(steps) < 4
        assert steps == want[: len(steps)]
        assert last.startswith(f"{number} ")
        assert all(word in last for word in words), last
        assert list((tmp_path / "target").iterdir()) == []


def test_a_disk_that_is_full_before_the_first_step(on, tmp_path):
    with small_tmpfs(tmp_path / "small", "64k") as folder:
        with pytest.raises(StorageError, match="bytes free, and activations of rank 0 need"):
            trained(**on(nvme_dir=str(folder)))
        gc.collect()
        assert list(folder.iterdir()) == []


class _Event:
    """A copy that ends when the host waits for it."""

    def __init__(self) -> None:
        self.over = False

    def synchronize(self):
        self.over = True


class _Slow(Aside):
    def _start(self, into, of):
        for there, here_ in zip(into, of, strict=True):
            there.copy_(here_)
        self._last = _Event()
        return self._last

    def wait(self, event):
        pass


@pytest.mark.parametrize("after", ["offload", "write", "restore", "bring"])
def test_a_call_that_breaks_off_leaves_nothing_under_way(after):
    """What a copy reads or writes is held until it ends, and the pool is not given to anything else before."""
    request = Request(None)
    parcels, pool = Parcels(lambda nbytes: File(request)), torch.zeros(4096, dtype=torch.uint8)
    desc = OffloadDesc("a", "h.0", ("host", "nvme"), (1024,), (1,), "float32", 0, 0)
    aside = _Slow(torch.device("cpu"), None)
    moves = Staged(parcels, [desc], 4096, lambda: pool, torch.device("cpu"), lambda: aside)
    parcel = parcels.take(4096)
    if after in ("offload", "write"):
        moves.offload(0, torch.ones(1024))
        copy = aside._last
        if after == "write":
            moves.step(Write(0))([])
            assert copy.over
            assert not moves._copying  # what left the device is let go of
    else:
        moves.restore(0, parcel.ticket())
        copy = None
        if after == "bring":
            moves.step(Bring(0))([])
            copy = aside._last
            assert request.over
    moves.end()
    assert copy is None or copy.over
    assert after not in ("write", "restore") or request.over
    assert not moves._copying
