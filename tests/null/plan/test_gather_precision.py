"""Which weights travel in 8 bits: those of which a step takes less time for it."""

from __future__ import annotations

import json

import pytest
import torch
from machines import machine
from marks import slow
from null.instructions import program_of, spec_of
from torch import nn

from zero_compiler.ir.facts import ParamRef
from zero_compiler.ir.instructions import Compute, Gather, Release, WaitGather
from zero_compiler.ir.transfers import GatherDesc
from zero_compiler.plan.gather_precision import from_text, hidden, to_text
from zero_compiler.tools.planning import report

NUMEL = 25_600  # a row of which each of two ranks has one: 204,800 bytes in float32, 52,000 in 8 bits


def layers(count, segment_us):
    """Units with a weight each, gathered one ahead, and so long a segment for each."""
    gathers, instrs = [], [Gather(0)]
    for i in range(count):
        gathers.append(
            GatherDesc(
                "m", (f"w{i}",), ((2, NUMEL),), (NUMEL,), "float32", False, (0,), 0, f"u{i}", wire="int8"
            )
        )
        instrs += [WaitGather(i, (-1,)), *([Gather(i + 1)] if i + 1 < count else [])]
        instrs += [Compute(i, (), (), ()), Release(i, ())]
    return program_of(instrs, gathers, segment_us=segment_us)


def found(segment_us, bytes_per_us):
    program = layers(len(segment_us), segment_us)
    spec = spec_of(bytes_per_us=bytes_per_us)
    return sorted(ref.name for ref in hidden([program], spec, 2))


def test_where_compute_hides_whole_weights_they_travel_whole():
    # 2 + 204,800 / 100 us each, and the first has nothing to hide behind.
    assert found([3000.0] * 4, 100.0) == ["w1", "w2", "w3"]


def test_where_nothing_hides_them_none_does():
    assert found([10.0] * 4, 100.0) == []


def test_only_what_has_enough_before_it_travels_whole():
    assert found([10.0, 10.0, 3000.0, 3000.0], 100.0) == ["w3"]


def test_a_choice_is_told_by_the_place_of_the_weights():
    refs = [ParamRef("m", name) for name in "abc"]
    text = to_text(refs, frozenset(refs[1:2]))
    others = [ParamRef("n", name) for name in "abc"]
    assert from_text(text, others) == {others[0]: True, others[1]: False, others[2]: True}


def planned(tmp_path, bytes_per_us, model=None, world=2, rows=8, **fields):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine(bytes_per_us=bytes_per_us)))
    torch._dynamo.reset()
    model = model or nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    fields = {"gather_dtype": "int8", "hardware": str(path), "transport": "c10d", "compute": "aten"} | fields
    return report(model, (torch.ones(rows, 64),), world, **fields)


def wires(made):
    (frame,) = made.frames
    return {ref.name: plan.wire for ref, plan in frame.params.items()}


def sent(made):
    (frame,) = made.frames
    return {phase: t.nbytes("device-device") for phase, t in frame.timelines.items()}


def test_over_a_slow_link_weights_travel_in_8_bits_and_biases_do_not(tmp_path):
    made, plain = planned(tmp_path, 0.5), planned(tmp_path, 0.5, gather_dtype=None)
    weights = {f"{i}.weight" for i in range(3)}
    assert {name for name, wire in wires(made).items() if wire is not None} == weights
    assert set(wires(plain).values()) == {None}
    # Of 64 rows of 64: a byte each and four a row, where there were four each.
    assert sent(plain)["forward"] - sent(made)["forward"] == 3 * (64 * 64 * 4 - 64 * (64 + 4))
    text = str(made)
    assert "0.weight float32[64, 64] as int8" in text
    gathers = 3 + 2  # backward needs no gradient of the batch, and so not the first weight
    row = "3 of 6 weights travel in int8: {:,} bytes of this rank's rows instead of {:,}"
    assert row.format(gathers * 32 * (64 + 4), gathers * 32 * 64 * 4) in text
    assert made.step_us < plain.step_us


@pytest.mark.parametrize(
    "what", [{"transport": "shared"}, *slow({"world": 1}, {"bytes_per_us": 1e6}, {"stage": 0})], ids=str
)
def test_where_it_saves_nothing_weights_travel_whole(tmp_path, what):
    made = planned(tmp_path, **({"bytes_per_us": 0.5} | what))
    assert set(wires(made).values()) == {None}
    assert "no weight travels in int8" in str(made)


@pytest.mark.slow
def test_weights_that_compute_hides_travel_whole(tmp_path):
    """Slow arithmetic: so many rows take longer than a layer on its way."""
    path = tmp_path / "slow.json"
    path.write_text(json.dumps(machine(bytes_per_us=50.0, matmul_flops_per_us={"float32": 200.0})))
    made = planned(tmp_path, 50.0, rows=4096, hardware=str(path), bucket_bytes=0)
    assert wires(made)["0.weight"] is torch.int8  # nothing comes before it in forward
    assert wires(made)["1.weight"] is None


@pytest.mark.parametrize(
    "fields",
    [
        {"tile_bytes": 4096},
        *slow(
            {"offload_params": "nvme"},
            {"stage": 1},
            {"param_dtype": "bfloat16"},
            {"memory_budget_bytes": 1 << 20},
            {"bucket_bytes": 1 << 20},
            {"gather_dtype": "float8_e4m3fn", "world": 3},
        ),
    ],
    ids=str,
)
def test_it_goes_with_whatever_else_is_asked_for(tmp_path, fields):
    """Each plan is verified where it is made; here, that weights travel in 8 bits in it."""
    more = {"nvme_dir": str(tmp_path)} if "offload_params" in fields else {}
    made = planned(tmp_path, 0.5, **fields, **more)
    assert wires(made)["0.weight"] is getattr(torch, fields.get("gather_dtype", "int8"))
