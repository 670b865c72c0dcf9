"""Which segments graphs of a device cannot record."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from zero_compiler.emit.recordable import unrecordable
from zero_compiler.memory.segment_graph import SegmentGraph

aten = torch.ops.aten


def _segment(target, value, given=None, *args):
    graph = fx.Graph()
    ins = []
    if given is not None:
        ins = [graph.placeholder("given")]
        ins[0].meta["val"] = given
    node = graph.call_function(target, (*ins, *args))
    node.meta["val"] = value
    graph.output([node])
    return SegmentGraph.of(torch.nn.Module(), graph)


CPU, META = torch.ones(4), torch.ones(4, device="meta")


@pytest.mark.parametrize(
    ("segment", "recorded"),
    [
        (_segment(aten.relu.default, CPU, CPU), True),
        (_segment(aten.arange.default, CPU, None, 4), True),
        (_segment(aten.relu.default, CPU, META), False),
        (_segment(aten.arange.default, META, None, 4), False),
        (_segment(aten.view.default, CPU.view(2, 2), CPU, [2, 2]), False),
        (_segment(aten.nonzero.default, torch.ones(3, 1, dtype=torch.long), CPU), False),
        (_segment(aten._local_scalar_dense.default, 1.0, CPU), False),
        (_segment(torch.ops.higher_order.cond, CPU, CPU), False),
    ],
    ids=["compute", "of nothing", "host", "made on the host", "views", "size", "value", "higher order"],
)
def test_what_is_recorded(segment, recorded):
    assert unrecordable([segment], "cpu") == (frozenset() if recorded else {0})
