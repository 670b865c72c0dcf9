"""The passes together: their numbers on N simulated ranks, what they refuse, and how their managers run them."""

from __future__ import annotations

import pytest
import torch
from null.graphs import (
    Build,
    aten,
    check_numbers,
    lower,
    two_layers,
    two_layers_backward,
)

from zero_compiler import passes
from zero_compiler.errors import VerifyError
from zero_compiler.ir import spec
from zero_compiler.passes import SPLIT, inference_passes, joint_passes, phase_passes, run_passes, run_split


def test_every_pass_stands_on_the_screen():
    """No pass runs beside the managers, which verify, time and dump."""
    every = {
        c
        for n in passes.__all__
        if hasattr(c := getattr(passes, n), "run") and not vars(c).get("_is_protocol")
    }
    assert every == {*(type(p) for p, _ in (*joint_passes(), *inference_passes(), *phase_passes())), *SPLIT}


class Careless:
    """Hands over something else than backward takes."""

    name = "careless"

    def run(self, forward, backward, num_outputs, ctx):
        (output,) = forward.find_nodes(op="output")
        output.args = ((output.args[0][0], *reversed(output.args[0][1:])),)


def test_a_careless_pass_over_a_partition_is_caught(tmp_path):
    b, back = Build(), Build()
    x, y = b.input("x", 3, 4), b.input("y", 4)
    b.done(x, x, y)
    back.done(back.input("x", 3, 4), back.input("y", 4))
    trace = passes.Trace()
    with pytest.raises(VerifyError, match="is saved for backward as"):
        run_split(Careless(), b.graph, back.graph, 1, b.context("joint"), trace, str(tmp_path))
    run_split(Careless(), b.graph, back.graph, 1, b.context("joint"), trace, str(tmp_path))  # and back again
    assert [row[0] for row in trace.rows] == ["split/careless"]
    assert sorted(p.name for p in (tmp_path / "careless").iterdir()) == ["00-forward.txt", "01-backward.txt"]


def test_every_pass_says_what_it_refuses():
    every = [
        c
        for name in passes.__all__
        if hasattr(c := getattr(passes, name), "run") and c not in (passes.Pass, passes.SplitPass)
    ]
    assert {type(p) for p, _ in (*joint_passes(), *phase_passes())} <= set(every)
    assert [c.__name__ for c in every if "    Refuses: " not in c.__doc__] == []


# Numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_bytes", [0, 70, 1 << 20])
@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 3), (3, 3), (4, 2), (2, 0)])
def test_passes_of_a_phase_keep_the_numbers(world, stage, bucket_bytes):
    check_numbers(two_layers(world=world, stage=stage), "forward", bucket_bytes=bucket_bytes)
    check_numbers(two_layers_backward(world=world, stage=stage), "backward", bucket_bytes=bucket_bytes)


def test_a_frozen_weight_gets_no_reduction():
    b = Build(w=(4, 4), frozen=(4, 4))
    act, tangent = b.input("act", 3, 4), b.input("tangents_1", 3, 4)
    back = b.op(aten.mm.default, tangent, b.weight("frozen"))
    b.done(b.reduced("w", b.op(aten.mm.default, b.op(aten.t.default, act), back)), None)
    program, _ = b.program(lower(b, "backward"), "backward")
    assert [r.names for r in program.reduces] == [("w",)]
    assert [g.names for g in program.gathers] == [("frozen",)]


@pytest.mark.parametrize("part", ["run", "lint", "verify"])
def test_the_time_of_a_pass_has_its_checks_in_it(monkeypatch, part):
    b = two_layers()
    (one, level) = joint_passes()[0]
    now = [0.0]
    spend = lambda *_: now.__setitem__(0, now[0] + 2.0)  # noqa: E731
    monkeypatch.setattr("zero_compiler.passes.base.time.perf_counter", lambda: now[0])
    where = {"run": type(one), "lint": torch.fx.Graph, "verify": spec}[part]
    monkeypatch.setattr(where, part, spend)
    trace = run_passes(b.graph, [(one, level)], b.context("joint"))
    assert trace.seconds == 2.0


class Left:
    """Changes nothing."""

    name = "left"

    def run(self, graph, ctx):
        pass


class Renamed(Left):
    """Reads the same, by arguments that are written anew."""

    def run(self, graph, ctx):
        (output,) = graph.find_nodes(op="output")
        output.args = (tuple(output.args[0]),)


def test_a_graph_is_verified_where_a_pass_has_changed_it_or_more_is_to_be_proved(monkeypatch):
    b, levels = two_layers(), []
    monkeypatch.setattr(spec, "verify", lambda graph, level, *rest: levels.append(level))
    passes = [(Left(), "captured"), (Left(), "captured"), (Renamed(), "captured"), (Left(), "merged")]
    run_passes(b.graph, passes, b.context("joint"))
    assert levels == ["captured", "captured", "merged"]
