"""Bytes that a segment holds while it runs: inputs go when they die, views cost nothing, and what is returned stays."""

from __future__ import annotations

import pytest
from null.graphs import Build, aten
from torch import nn

from zero_compiler.memory.segment_graph import SegmentGraph
from zero_compiler.memory.segment_peak import peak_inside


def chain() -> SegmentGraph:
    """Three values of 1 KiB after an input of as much, and a view of the last."""
    b = Build()
    x = b.input("x", 16, 16)
    y = b.op(aten.neg.default, x)
    z = b.op(aten.exp.default, y)
    w = b.op(aten.t.default, z)
    b.done(w)
    return SegmentGraph.of(nn.Module(), b.graph)


@pytest.mark.parametrize(("dying", "most"), [(True, 2048), (False, 2048)])
def test_two_values_of_a_chain_live_at_once(dying, most):
    assert peak_inside(chain(), [dying]) == most


def test_an_input_that_lives_on_is_not_counted():
    b = Build()
    x = b.input("x", 16, 16)
    b.done(b.op(aten.neg.default, x))
    seg = SegmentGraph.of(nn.Module(), b.graph)
    assert [peak_inside(seg, [dying]) for dying in (True, False)] == [2048, 1024]
