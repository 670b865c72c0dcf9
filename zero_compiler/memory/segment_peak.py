"""Bytes that a compute segment holds while it runs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ..ir import facts
from .segment_graph import SegmentGraph
from .workspaces import one_by_one, workspaces


def peak_inside(seg: SegmentGraph, dying: Sequence[bool], sizes: facts.Sizes | None = None) -> int:
    """Most bytes live at once in a segment: inputs that die in it, what it makes, and what it returns.

    Before anything is compiled operators are counted one by one, and budgets are met by that. The code that a segment
    was compiled to tells what it holds indeed, together with what the operators that it calls hold while they run.
    Where that is not known of one, whichever takes more counts.

    Args:
        dying: of each input, whether the segment is the last to hold it.
        sizes: for symbols; None: as the capture saw them.
    """
    if seg.generated is None:
        return _unfused(seg.graph, dying, sizes)
    own = workspaces(seg.graph, sizes)
    most = seg.generated.most(seg.inputs, dying, sizes, own)
    if seg.generated.operators <= own.keys():
        return most
    return max(most, _unfused(seg.graph, dying, sizes))


def _unfused(graph: fx.Graph, dying: Sequence[bool], sizes: facts.Sizes | None) -> int:
    """The same where operators run one by one, in the order of the graph."""
    roots = facts.alias_roots(graph)
    size: dict[fx.Node, int] = {}
    last: dict[fx.Node, int] = {}
    order = list(graph.nodes)
    gone = iter(dying)
    for i, node in enumerate(order):
        if node.op == "placeholder":
            if next(gone):
                size[node] = facts.bytes_of(facts.value(node), sizes)
        elif facts.is_compute(node) and roots[node] == frozenset((node,)):
            size[node] = facts.bytes_of(facts.value(node), sizes)
        for used in (node, *node.all_input_nodes):
            for r in roots.get(used, ()):
                last[r] = i
    ends: dict[int, int] = {}
    for r, i in last.items():
        ends[i] = ends.get(i, 0) + size.get(r, 0)
    live = sum(n for node, n in size.items() if node.op == "placeholder")
    peak = live
    for i, node in enumerate(order):
        if node.op != "placeholder":
            live += size.get(node, 0)
        peak = max(peak, live + one_by_one(node, sizes))
        if node.op != "output":
            live -= ends.get(i, 0)
    return peak
