"""A segment as a module: it computes what its nodes do, and is made once."""

from __future__ import annotations

import torch
from null.graphs import Build, aten
from torch import nn

from zero_compiler.memory.segment_graph import SegmentGraph


def test_a_segment_runs():
    b = Build()
    x = b.input("x", 3, 4)
    b.done(b.op(aten.neg.default, b.op(aten.t.default, x)))
    seg = SegmentGraph.of(nn.Module(), b.graph)
    given = torch.randn(3, 4)
    assert torch.equal(seg.gm(given)[0], -given.t())
    assert seg.gm is seg.gm
