"""Bytes that a compute segment holds while it runs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from .cut import SegmentGraph
from .ir import facts, ops

_PACKED = 256 << 10


def peak_inside(seg: SegmentGraph, dying: Sequence[bool], sizes: facts.Sizes | None = None) -> int:
    """Most bytes live at once in a segment: inputs that die in it, what it makes, and what it returns.

    Budgets are met by plans that count operators one by one, before anything is compiled. So the code that a segment
    was compiled to counts where it takes more than they do, and where it takes less the plan stays what it was.

    Args:
        dying: of each input, whether the segment is the last to hold it.
        sizes: for symbols; None: as the capture saw them.
    """
    graph = seg.graph
    most = _unfused(graph, dying, sizes)
    if seg.generated is None:
        return most
    beside: dict[str, int] = {}
    for node in graph.find_nodes(op="call_function", target=ops.onednn_linear):
        beside["onednn_linear"] = max(_copied(node, sizes), beside.get("onednn_linear", 0))
    return max(most, seg.generated.most(seg.inputs, dying, sizes, beside))


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
        peak = max(peak, live + _copied(node, sizes))
        if node.op != "output":
            live -= ends.get(i, 0)
    return peak


def _copied(node: fx.Node, sizes: facts.Sizes | None) -> int:
    """Bytes that an operator holds while it runs: oneDNN copies an input whose rows do not lie in one piece, and packs
    blocks of both operands (measured: up to a quarter of a MiB)."""
    if node.target is not ops.onednn_linear:
        return 0
    given = facts.value(node.args[0])
    return (facts.bytes_of(given, sizes) if given.stride(-1) != 1 else 0) + _PACKED
