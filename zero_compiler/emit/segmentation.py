"""A scheduled graph split at its transfers: runs of compute nodes, each with what it takes and gives."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from ..ir import facts, ops
from ..memory.segment_graph import SegmentGraph


def steps(graph: fx.Graph) -> list[list[fx.Node] | fx.Node]:
    """Maximal runs of compute nodes, and the transfers between them, in order."""
    steps: list[list[fx.Node] | fx.Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or facts.is_element(node):
            continue
        if node.target in ops.BORDERS:
            steps.append(node)
        elif steps and isinstance(steps[-1], list):
            steps[-1].append(node)
        else:
            steps.append([node])
    return steps


def impure(node: fx.Node) -> bool:
    return node.is_impure() or (
        isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    )


def _remade(node: fx.Node, roots: dict[fx.Node, frozenset[fx.Node]]) -> bool:
    """True for what a segment makes again rather than takes: views of weights, constants, symbolic arithmetic."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or facts.is_element(node):
        return False
    if isinstance(facts.value(node), torch.Tensor):
        return node not in roots[node] and all(facts.is_weight(r) for r in roots[node])
    # Arithmetic on sizes alone: as cheap as passing the result.
    return not any(isinstance(facts.value(i), torch.Tensor) for i in node.all_input_nodes) and isinstance(
        facts.value(node), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)
    )


# Long: what one run takes from others, and what it makes again of views, is found in one walk over the same sets.
def segment(
    gm: fx.GraphModule,
    nodes: list[fx.Node],
    index: int,
    step_of: dict[fx.Node, int],
    roots: dict[fx.Node, frozenset[fx.Node]],
    returned: set[fx.Node],
    given: Mapping[fx.node.Argument, fx.Node],
) -> SegmentGraph:
    """Run number ``index`` of ``gm``'s compute nodes, with the nodes that it takes and those it gives.

    Args:
        step_of: run of each compute node.
        roots: see :func:`facts.alias_roots`.
        returned: nodes that the whole graph returns.
        given: see :func:`symbols_given`.
    """
    inside = set(nodes)
    pulled: dict[fx.Node, None] = {}
    ins: dict[fx.Node, None] = {}

    def need(node: fx.Node) -> None:
        if node in inside or node in pulled or node in ins:
            return
        if _remade(node, roots):
            for i in node.all_input_nodes:
                need(i)
            pulled[node] = None
        else:
            ins[node] = None

    for node in nodes:
        for used in node.all_input_nodes:
            need(used)
    symbols: set[object] = set()
    for node in (*nodes, *ins, *pulled) if given else ():
        symbols |= facts.symbols_of(facts.value(node))
    known = {v.node.expr for n in ins if isinstance(v := facts.value(n), torch.SymInt)}
    for node in sorted(given[s] for s in symbols - known if s in given):
        ins[node] = None
    outs = [
        n
        for n in nodes
        if n.op != "get_attr"
        and (
            n in returned
            or any(
                u.op != "output"
                and step_of.get(u, -1) != index
                and (not _remade(n, roots) or not facts.is_compute(u))
                for u in n.users
            )
        )
    ]
    return SegmentGraph(gm, list(ins), [*pulled, *nodes], outs)


def symbols_given(graph: fx.Graph) -> dict[object, fx.Node]:
    """The input of the graph that defines each symbolic size."""
    out: dict[fx.node.Argument, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        val = facts.value(node)
        if isinstance(val, torch.SymInt):
            out.setdefault(val.node.expr, node)
    return out
