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
        return _unfused(seg, dying, sizes)
    own = workspaces(seg.graph, sizes)
    most = seg.generated.most(seg.inputs, dying, sizes, own)
    if seg.generated.operators <= own.keys():
        return most
    return max(most, _unfused(seg, dying, sizes))


def _unfused(seg: SegmentGraph, dying: Sequence[bool], sizes: facts.Sizes | None) -> int:
    """The same where operators run one by one, in the order of the graph."""
    roots = {n: frozenset((n,)) for n in seg.ins}
    facts.extend_alias_roots(roots, seg.body)
    size: dict[fx.Node, int] = {}
    last: dict[fx.Node, int] = dict.fromkeys(seg.ins, -1)  # where each storage is read last
    live = 0
    for node, gone in zip(seg.ins, dying, strict=True):
        if gone:
            size[node] = facts.bytes_of(facts.value(node), sizes)
            live += size[node]
    for i, node in enumerate(seg.body):
        if facts.is_compute(node) and node in roots[node]:
            size[node] = facts.bytes_of(facts.value(node), sizes)
        for used in (node, *node.all_input_nodes):
            for r in roots[used]:
                last[r] = i
    for node in seg.outs:
        last.update(dict.fromkeys(roots[node], len(seg.body)))
    ends: dict[int, int] = {}
    for r, i in last.items():
        ends[i] = ends.get(i, 0) + size.get(r, 0)
    peak = live
    live -= ends.get(-1, 0)
    for i, node in enumerate(seg.body):
        live += size.get(node, 0)
        peak = max(peak, live + one_by_one(node, sizes))
        live -= ends.get(i, 0)
    return peak
