"""Training with saved tensors that wait in files, or on the host: the same losses, and storage that fails."""

from __future__ import annotations

import errno
import gc
import json
import os
from pathlib import Path

import pytest
import torch
from faults import run_with_faults, small_tmpfs
from harness import SimulatedModel
from machines import machine
from marks import thorough
from null.blocks import LAYERS
from null.offloaded import FAST, LOOP, SLOW, Net, gone_with_its_model, least, planned, trained, waits, x
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import ConfigError, MemoryBudgetError, StorageError
from zero_compiler.ir.instructions import Compute, Restore
from zero_compiler.sharded.rest_tiers import RestTiers

pytestmark = pytest.mark.slow
ANYWHERE = [*thorough("cpu"), "accelerator"]  # the way from there is longer by the host


# For real ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("drop", "calls"), [*thorough((0.0, 1)), (0.3, 2)])
def test_losses_are_the_same_bits(with_files_anywhere, drop, calls):
    want, _ = trained(drop, calls=calls)
    got, model = trained(drop, calls=calls, **with_files_anywhere(FAST))
    assert got == want
    sharded_model = model._zero.sharded_model
    engine, moved = (
        sharded_model.storage.nvme().engine.counters(),
        sum(r.nbytes for r in sharded_model.frames[0].offloaded),
    )
    assert moved > 0
    assert engine["bytes_written"] >= 3 * calls * moved
    assert engine["bytes_read"] >= 3 * calls * moved
    # A file for every forward that waits for its backward, and none more.
    assert len(sharded_model.runtime.parcels._idle) == calls


@pytest.mark.parametrize("with_files_anywhere", ANYWHERE, indirect=True)
def test_with_every_other_offload_under_one_budget(with_files_anywhere):
    want, _ = trained(0.3)
    every = {"offload_params": "nvme", "offload_grads": "nvme", "offload_optimizer": "nvme"}
    got, model = trained(
        0.3, activation_budget_bytes=int(least() * 0.9), **with_files_anywhere(FAST), **every
    )
    assert got == want
    assert model._zero.sharded_model.frames[0].offloaded


def test_backward_twice_and_never(with_files_anywhere):
    torch._dynamo.reset()
    model = zero.shard(Net(), **with_files_anywhere(FAST))
    step = torch.compile(model, backend="zero", options={"compute": "aten"})
    loss = step(*x())
    loss.backward(retain_graph=True)
    once = model.first.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(model.first.weight.grad, 2 * once)
    parcels = model._zero.sharded_model.runtime.parcels
    lost = step(*x())
    assert len(parcels._living) == 1  # the first is gone with its graph
    del lost, loss
    gc.collect()
    assert len(parcels._living) == 0


@pytest.mark.parametrize("with_files_anywhere", ANYWHERE, indirect=True)
def test_compiled_segments_with_activations_in_files(with_files_anywhere):
    want, _ = trained(0.3, compute="inductor")
    got, model = trained(0.3, compute="inductor", **with_files_anywhere(FAST))
    assert model._zero.sharded_model.frames[0].offloaded
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


def test_what_is_left_where_it_is(with_files):
    """Inputs of the call, and what it returns, are the caller's: nothing would be freed."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, v):
            y = torch.tanh(self.a(v))
            return self.b(y).square().mean(), y

    told = planned(with_files(FAST), Twice())
    assert "tanh" not in [r.name for r in waits(told)]
    assert LAYERS == len(
        [r for r in waits(planned(with_files(FAST))) if "up" in r.module and r.op == "aten.addmm"]
    )


@pytest.mark.parametrize("with_files_anywhere", ANYWHERE, indirect=True)
def test_a_deleted_model_leaves_no_pool(with_files_anywhere):
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    assert gone_with_its_model(lambda runtime: [runtime.pools.host], **with_files_anywhere(FAST))
    assert len(os.listdir("/proc/self/fd")) == before


def test_activations_are_never_left_behind(with_files, tmp_path):
    """Those of a finished run are of no use to anybody, whatever else it keeps."""
    folder = tmp_path / "kept"
    folder.mkdir()
    fields = with_files(FAST, nvme_dir=str(folder), nvme_keep=True, offload_params="nvme")
    torch._dynamo.reset()
    model = zero.shard(Net(), **fields)
    torch.compile(model, backend="zero", options={"compute": "aten"})(*x()).backward()
    assert model._zero.sharded_model.frames[0].offloaded
    names = [p.name for p in folder.iterdir()]
    assert any("-parameters-of-rank-" in name for name in names)
    assert not any("-activations-of-rank-" in name for name in names)


@pytest.mark.parametrize("with_files_anywhere", ANYWHERE, indirect=True)
def test_checksums_find_a_changed_byte(with_files_anywhere):
    torch._dynamo.reset()
    model = zero.shard(Net(), **with_files_anywhere(FAST, nvme_checksums=True))
    step = torch.compile(model, backend="zero", options={"compute": "aten"})
    want = step(*x())
    want.backward()
    loss = step(*x())
    (parcel,) = model._zero.sharded_model.runtime.parcels._living.values()
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
    monkeypatch.setattr(
        RestTiers, "activation_tier", property(lambda tiers: tiers._config.offload_activations)
    )

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


@pytest.mark.parametrize("calls", [*thorough(1), 2])
def test_losses_are_the_same_bits_with_the_host(on_host, calls):
    want, _ = trained(0.3, calls=calls)
    got, model = trained(0.3, calls=calls, **on_host(FAST))
    assert got == want
    assert model._zero.sharded_model.frames[0].offloaded
    assert len(model._zero.sharded_model.runtime.parcels._idle) == calls


def test_a_deleted_model_leaves_no_memory_on_the_host(on_host):
    assert gone_with_its_model(lambda runtime: runtime.parcels._idle, **on_host(FAST))


# Storage that fails -----------------------------------------------------------------------------------------


def test_system_calls_that_fail(with_files, tmp_path):
    fields = with_files(FAST, nvme_dir=str(tmp_path / "target"))
    (tmp_path / "target").mkdir()

    def run(call: str, number: int, first: int = 1) -> list[str]:
        body = LOOP.format(tests=str(Path(__file__).parents[2]), fields=fields)
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


def test_a_disk_that_is_full_before_the_first_step(with_files, tmp_path):
    with small_tmpfs(tmp_path / "small", "64k") as folder:
        with pytest.raises(StorageError, match="bytes free, and activations of rank 0 need"):
            trained(**with_files(FAST, nvme_dir=str(folder)))
        gc.collect()
        assert list(folder.iterdir()) == []


def test_what_an_error_of_a_compilation_tells(with_files, tmp_path):
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
            trained(**with_files(FAST, nvme_dir=str(folder)))
    assert (full.value.errno, full.value.path) == (errno.ENOSPC, str(folder))


def test_options_that_do_not_fit():
    with pytest.raises(ConfigError, match='offload_activations="nvme" needs nvme_dir'):
        zero.shard(Net(), offload_activations="nvme")
