"""What a frame is known by, and what was decided of it."""

from __future__ import annotations

import pytest
import torch
from null import blocks
from null.edited import planned
from null.graphs import Build, aten

from zero_compiler.compile.found_decisions import identity_of, inputs_of, tiled


def graph(rows: int):
    b = Build(world=2, w=(5, 8))
    x = b.input("x", rows, 8)
    b.done(b.op(aten.mm.default, x, b.op(aten.t.default, b.weight("w"))))
    return b.graph


def test_the_identity_of_a_frame_is_that_of_its_graph():
    code = "/some where/file.py:3 forward 01234567 89abcdef"
    one, same, other = (identity_of(code, ["w"], "training", graph(rows)) for rows in (4, 4, 6))
    assert one == same
    assert one.function == "forward"
    assert one.inputs == ("f32[4,8]",) == inputs_of(graph(4))
    assert one.graph != other.graph
    assert (one.reads, one.kind) == (other.reads, other.kind)
    assert one.reads != identity_of(code, ["v"], "training", graph(4)).reads
    assert identity_of("", ["w"], "training", graph(4)).function == ""
    assert tiled(graph(4)) == {}


@pytest.mark.slow
def test_what_was_decided_is_what_the_plan_has():
    report = planned(
        blocks.Net(), blocks.x(), hardware="laptop", activation_budget_bytes=30_000, compute="aten"
    )
    (found,) = report.decisions.frames
    (frame,) = report.frames
    assert set(found.values.made_again) == {r.name for r in frame.remade}
    assert found.values.saved
    assert not found.values.edited
    assert found.values.limit_bytes is not None
    assert found.bucket_bytes == frame.bucket_bytes
    forward = {g.unit for g in frame.programs["forward"].gathers}
    assert set(found.distances["forward"]) == forward
    assert found.recompute
    assert torch.__version__ == report.decisions.made_for.torch
