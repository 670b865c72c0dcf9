"""What lies where, told from the instructions alone, is what the planner counted from the graph."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import SimulatedModel
from machines import machine
from marks import slow
from null.offloaded import planned, waits
from torch import nn

from zero_compiler.alignment import block_aligned
from zero_compiler.ir.instructions import Compute, Release
from zero_compiler.ir.program import Program
from zero_compiler.report.lifetimes import (
    ACTIVATION,
    ALLOCATED,
    AWAY,
    FULL_GRADIENT,
    GRADIENT,
    HOST_POOL,
    KEPT,
    STAGING,
    WEIGHT,
    BufferLifetime,
    layer_of,
    lifetimes,
)
from zero_compiler.runtime import reference
from zero_compiler.tools.planning import report


class Net(nn.Module):
    """Two layers, and an output of each that the caller gets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 96), nn.Linear(96, 31)

    def forward(self, x):
        middle = torch.tanh(self.first(x))
        return self.second(middle).square().mean(), middle.sum()


def frame_of(model=None, x=None, world=2, **fields):
    torch._dynamo.reset()
    given = (torch.zeros(16, 64),) if x is None else x
    told = report(model or Net(), given, world, compute="aten", **({"hardware": "laptop"} | fields))
    (frame,) = told.frames
    return frame


def programs(**fields):
    return list(frame_of(**fields).programs.values())


def buffers_of(frame):
    """Of each Program of a frame, all buffers."""
    for program in frame.programs.values():
        yield program, lifetimes(program, frame.origin if program.phase == "backward" else None)


def counted(program, buffers):
    """Bytes beside the arenas during each instruction that computes nothing; a segment's own are not in a Program."""
    buffers = [b for b in buffers if b.pool == ALLOCATED]
    for at, instr in enumerate(program.instrs):
        if not isinstance(instr, Compute):
            here = sum(b.nbytes for b in buffers if b.begin <= at <= b.end)
            yield program.line(instr), here, program.live[at] - program.buffer_bytes


def holds_in_its_pools(program, buffers):
    sizes = {"transient": program.transient_bytes, "host": program.host_bytes, "device": program.device_bytes}
    pooled = [b for b in buffers if b.pool in sizes]
    for pool, size in sizes.items():
        tops = [b.offset + b.nbytes for b in pooled if b.pool == pool]
        # It is as large as what lies in it, to whole blocks of a file.
        assert block_aligned(max(tops, default=0)) == block_aligned(size)
    for k, one in enumerate(pooled):
        assert one.offset >= 0
        assert one.offset + one.nbytes <= sizes[one.pool]
        for other in pooled[:k]:
            if one.pool == other.pool and one.begin <= other.end and other.begin <= one.end:
                apart = one.offset + one.nbytes <= other.offset or other.offset + other.nbytes <= one.offset
                assert apart, (one, other)


@pytest.mark.parametrize(
    "fields",
    [
        {"bucket_bytes": 0},
        {"world": 1},
        *slow({"stage": 0}, {"stage": 1}, {"param_dtype": "bf16"}, {"tile_bytes": 8192}),
    ],
    ids=str,
)
def test_bytes_agree_with_those_that_were_counted_from_the_graph(fields):
    for program, buffers in buffers_of(frame_of(**fields)):
        rows = list(counted(program, buffers))
        assert [row for row in rows if row[1] != row[2]] == []
        holds_in_its_pools(program, buffers)


def test_bytes_agree_where_weights_travel_in_8_bits(tmp_path):
    slow_link = tmp_path / "machine.json"
    slow_link.write_text(json.dumps(machine(bytes_per_us=0.5)))
    frame = frame_of(gather_dtype="int8", transport="c10d", hardware=str(slow_link))
    for program, buffers in buffers_of(frame):
        assert any(g.wire for g in program.gathers)
        assert [row for row in counted(program, buffers) if row[1] != row[2]] == []
        holds_in_its_pools(program, buffers)


def test_bytes_agree_where_shards_rest_in_files(tmp_path):
    files = {f"offload_{what}": "nvme" for what in ("params", "grads", "optimizer")}
    for program, buffers in buffers_of(frame_of(nvme_dir=str(tmp_path), **files)):
        rows = list(counted(program, buffers))
        assert [row for row in rows if row[1] != row[2]] == []
        holds_in_its_pools(program, buffers)


@pytest.mark.slow
def test_bytes_agree_where_activations_wait_elsewhere(with_files_anywhere):
    told = planned(with_files_anywhere(), compute="aten")
    assert waits(told)
    for program, buffers in buffers_of(told.frames[0]):
        rows = list(counted(program, buffers))
        assert [row for row in rows if row[1] != row[2]] == []
        holds_in_its_pools(program, buffers)
        on_their_way = [b for b in buffers if b.what == AWAY]
        assert {b.pool for b in on_their_way} == {HOST_POOL}
        assert {n for b in on_their_way for n in b.names} == {o.name for o in program.offloads}


@pytest.mark.parametrize("stage", [3, *slow(0, 1)])
def test_what_the_reference_executor_holds_is_what_is_told(monkeypatch, stage):
    """After every instruction: its values and their storages, and what lies in its arenas."""
    told: dict[int, tuple[Program, list[BufferLifetime]]] = {}
    reached: dict[Any, int] = {}
    checked: Counter[str] = Counter()

    def followed(step):
        def run(executor, call, instr):
            step(executor, call, instr)
            at = reached[call] = reached.get(call, -1) + 1
            buffers = told.setdefault(id(executor.program), (executor.program, lifetimes(executor.program)))[
                1
            ]
            compare_values(executor.program, call.envs[0], buffers, at, checked)
            compare_weights(executor, buffers, at, checked)

        return run

    for kind, step in list(reference._STEPS.items()):
        monkeypatch.setitem(reference._STEPS, kind, followed(step))
    run = SimulatedModel(Net(), world=2, stage=stage, bucket_bytes=0)
    xs = [(torch.randn(16, 64),) for _ in range(2)]
    run.check(xs, loss=lambda out: out[0] + out[1])
    assert {p.phase for p, _ in told.values()} == {"forward", "backward"}
    assert checked["values"] > 20
    assert (checked["released"] > 4) is (stage == 3)
    assert (checked["weights"] > 4) is (stage > 0)


def compare_values(program, env, buffers, at, checked):
    there = {b.index: b for b in buffers if b.table == "storages" and b.begin <= at < b.end}
    held = {}
    for value, tensor in enumerate(env):
        if isinstance(tensor, torch.Tensor):
            held |= dict.fromkeys(program.lies_in[value], tensor.untyped_storage().nbytes())
    # What a transfer reads until it has been waited for is no value any more.
    lent = {k for k, b in there.items() if b.what == FULL_GRADIENT}
    assert held.keys() <= there.keys() <= held.keys() | lent
    assert all(there[k].nbytes == nbytes for k, nbytes in held.items())
    checked["values"] += len(held)


def compare_weights(executor, buffers, at, checked):
    for b in buffers:
        if b.what != WEIGHT or at < b.ready:
            continue
        g = executor.program.gathers[b.index]
        slot = executor._slots(executor.ranks[0], g)[g.names.index(b.names[0])]
        assert (slot.storage_offset(), slot.numel()) == (b.offset, b.nbytes)
        if at < b.end:
            assert not bool((slot == 0xFF).all())
            checked["weights"] += 1
        elif at == b.end:
            assert bool((slot == 0xFF).all())  # as the executor leaves what was released
            checked["released"] += 1


def test_a_weight_is_there_from_its_gather_to_its_release():
    forward, _ = programs(bucket_bytes=0)
    for weight in [b for b in lifetimes(forward) if b.what == WEIGHT]:
        words = [forward.line(i).split(" float")[0].split() for i in forward.instrs]
        (name,) = weight.names
        assert words[weight.begin][:2] == ["gather", name]
        assert words[weight.ready][:2] == ["wait", name]
        assert words[weight.end][:2] == ["release", name]


def test_what_is_not_released_is_there_at_the_end():
    forward, _ = programs(bucket_bytes=0)
    release = next(i for i in forward.instrs if isinstance(i, Release))
    left = replace(forward, instrs=[i for i in forward.instrs if i is not release])
    name = forward.gathers[release.index].names
    (weight,) = [b for b in lifetimes(left) if b.what == WEIGHT and b.names == name]
    assert weight.end == len(left.instrs)
    kept = [b for b in lifetimes(programs(stage=1)[0]) if b.what == WEIGHT]
    assert {b.pool for b in kept} == {KEPT}


def test_tensors_that_travel_together_are_staged_until_they_have_arrived():
    forward, backward = programs()  # in buckets
    for program, table in ((forward, "gathers"), (backward, "reduces")):
        staged = [b for b in lifetimes(program) if b.what == STAGING and b.table == table]
        assert staged
        for b in staged:
            desc = getattr(program, table)[b.index]
            assert b.names == desc.names
            assert program.line(program.instrs[b.begin]).startswith(("gather", "reduce-scatter"))
            assert b.end == next(
                k for k, i in enumerate(program.instrs) if i.ends(program) == (table, b.index, 0)
            )


def test_a_full_gradient_goes_and_this_ranks_rows_stay():
    _, backward = programs(bucket_bytes=0)
    buffers, end = lifetimes(backward), len(backward.instrs)
    full = [b for b in buffers if b.what == FULL_GRADIENT]
    rows = [b for b in buffers if b.what == GRADIENT]
    assert sorted(b.names for b in full) == sorted(b.names for b in rows)
    assert all(b.end < end for b in full)
    assert all(b.end == end for b in rows)
    sizes = {b.names: b.nbytes for b in full}
    assert {b.names: b.nbytes for b in rows if b.names == ("first.weight",)} == {
        ("first.weight",): sizes["first.weight",] // 2
    }


def test_what_backward_takes_is_what_forward_has_saved():
    frame = frame_of(bucket_bytes=0)
    forward, backward = frame.programs.values()
    pairs = frame.origin.saved_values(backward)
    # Two outputs are the caller's, and so are two gradients of them.
    assert len(pairs) == len(forward.outputs) - 2 == backward.num_inputs - 2
    assert [forward.outputs[2 + at] for at in range(len(pairs))] == list(pairs.values())
    begun = [b for b in lifetimes(backward, frame.origin) if b.what == ACTIVATION and b.begin < 0]
    assert ("first",) in [b.names for b in begun]
    assert {b.layer for b in begun} == {"first", "second", ""}  # gradients of outputs are of no layer


class Returns(nn.Module):
    """What its backward reads is the caller's as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 32)

    def forward(self, x):
        return torch.tanh(self.layer(x))


def test_what_the_caller_has_is_there_until_the_end():
    frame = frame_of(Returns())
    backward = frame.programs["backward"]
    for program, buffers in buffers_of(frame):
        rows = list(counted(program, buffers))
        assert [row for row in rows if row[1] != row[2]] == []
    (out,) = [b for b in lifetimes(backward, frame.origin) if b.begin < 0 and b.names]
    assert out.nbytes == 4 * 16 * 32
    assert out.end == len(backward.instrs)


def test_a_layer_is_named_by_the_first_module():
    assert layer_of("blocks.3.up, blocks.3.down") == "blocks.3"
    assert layer_of("first, second and 2 more") == "first"
    assert layer_of("") == ""
