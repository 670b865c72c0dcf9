"""Forward or backward graph: tensors that wait on another tier leave and come back where segments end anyway."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from zero_compiler.cost.cost import CostModel, hints
from zero_compiler.ir import facts, ops

from .base import Context
from .fsdp_units import unit_of
from .offload_activations import latest_starts, node_us

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_READS = frozenset({ops.restore, ops.bring, ops.restored})


@dataclass(frozen=True)
class PlaceOffloads:
    """Place what `offload_activations.py` has put into a graph.

    Before (forward)::                      After::

        %a = aten.mm %x, %w                     %a = aten.mm %x, %w
        %k = zero.offload %a                    %b = aten.gelu %a
        %b = aten.gelu %a                       %k = zero.offload %a
        %s = zero.gather [w2]                   %s = zero.gather [w2]
                                                ...
                                                     zero.offloaded %k

    In forward a tensor goes out at the end of the segment that reads it last, or where nothing is gathered at that of
    its block; it is written when the next ones go, or forward ends. In backward a tensor is there at the begin of the
    segment that reads it first, and its place in the pool is free at the end of the one that reads it last. Its read
    starts as late as hides it behind compute, with the reads after it on the lane taken into account, and not before
    all that an earlier segment reads is there; under a budget, not before that is gone.

    Between an accelerator and files there are two steps. Out, the second (``zero.write``) starts where the first is
    done by the times of the operators, one segment later at least, and has as long as the next ones take for their
    first. Back, the first is placed before the second (``zero.bring``) as that is before the segment.

    Refuses: nothing.
    """

    budgeted: bool = False
    name: str = "place-offloads"

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        _place_writes(graph, ctx)
        _place_reads(graph, ctx, self.budgeted)


def _place_writes(graph: fx.Graph, ctx: Context) -> None:
    gathers = bool(graph.find_nodes(op="call_function", target=ops.gather))
    offloads = list(graph.find_nodes(op="call_function", target=ops.offload))
    if not offloads:
        return
    for node in offloads:
        border = node.next
        while border.op != "output" and (border.target not in ops.BORDERS or border.target is ops.offload):
            if not gathers and _leaves_unit(border):
                break
            border = border.next
        border.prepend(node)
    (output,) = graph.find_nodes(op="output")
    groups = _adjacent(list(graph.find_nodes(op="call_function", target=ops.offload)))
    begins = _clock(graph, ctx)
    copied_us = 0.0  # when all copies so far are done
    for k, group in enumerate(groups):
        steps = len(facts.away(group[0]).tiers)
        end = groups[k + steps][0] if k + steps < len(groups) else output
        for node in group if steps > 1 else ():
            copied_us = max(copied_us, begins[node]) + _move_us(ctx, "host", node.args[0], out=True)
            with graph.inserting_before(_border_at(node, copied_us, begins, end)):
                graph.call_function(ops.write, (node,))
        with graph.inserting_before(end):
            for node in group:
                graph.call_function(ops.offloaded, (node,))


def _border_at(node: fx.Node, us: float, begins: Mapping[fx.Node, float], end: fx.Node) -> fx.Node:
    """The first border behind the next segment, that is not reached before ``us``; ``end`` where that comes first."""
    at = node.next
    while at is not end and (
        at not in begins or at.target not in ops.BORDERS or not begins[node] < begins[at] >= us
    ):
        at = at.next
    return at


def _leaves_unit(node: fx.Node) -> bool:
    """Whether another repeated block of the model begins with it."""
    before = node.prev
    while before.target is ops.offload:
        before = before.prev
    a, b = (unit_of(f"{facts.module_path(n)}.") for n in (before, node))
    return facts.is_compute(node) and a != b


def _adjacent(nodes: list[fx.Node]) -> list[list[fx.Node]]:
    """Nodes that follow each other, together."""
    groups: list[list[fx.Node]] = []
    for node in nodes:
        if groups and node.prev is groups[-1][-1]:
            groups[-1].append(node)
        else:
            groups.append([node])
    return groups


def _place_reads(graph: fx.Graph, ctx: Context, budgeted: bool) -> None:
    waits = list(graph.find_nodes(op="call_function", target=ops.restored))
    if not waits:
        return
    for wait in waits:
        point = min(wait.users)
        while facts.is_compute(point.prev) or point.prev.target in _READS:
            point = point.prev
        point.prepend(wait)
    waits.sort()  # by their place in the graph
    groups = _groups(waits)
    for tier in facts.away(_restore(waits[0])).tiers:
        groups = _start(graph, ctx, tier, groups, budgeted)
    _discard(graph, waits)


def _start(
    graph: fx.Graph, ctx: Context, tier: str, groups: list[list[fx.Node]], budgeted: bool
) -> list[list[fx.Node]]:
    """Place what starts the transfers from a tier for which ``groups`` wait; those that stand together, in order."""
    waits = [wait for group in groups for wait in group]
    begins = _clock(graph, ctx)
    late = latest_starts([(begins[w], _move_us(ctx, tier, w)) for w in waits])
    latest = dict(zip(waits, late, strict=True))
    top = next(n for n in graph.nodes if n.op != "placeholder" and n.target not in (ops.restore, ops.bring))
    points = [top, *(n for n in graph.nodes if n > top and _may_start(n, budgeted))]
    place = {n: i for i, n in enumerate(graph.nodes)}
    places, times = [place[p] for p in points], [begins[p] for p in points]  # both grow
    first = 0
    for group in groups:
        last = bisect_right(places, place[group[0]])
        for wait in group:
            in_time = bisect_right(times, latest[wait], first, last)
            at = points[max(first, in_time - 1)] if first < last else group[0]
            at.prepend(wait.args[0])
        first = bisect_right(places, place[group[-1]])
    return _groups([wait.args[0] for wait in waits])


def _may_start(point: fx.Node, budgeted: bool) -> bool:
    """Whether transfers may start before a node: at the end of a segment, or at the begin of one for which others have
    come, so that they pass while it computes. Under a budget what it reads is gone first."""
    if point.target in ops.BORDERS:
        return point.target not in _READS
    return not budgeted and point.prev.target in _READS


def _restore(wait: fx.Node) -> fx.Node:
    start = wait.args[0]
    return _restore(start) if start.target is ops.bring else start


def _groups(waits: list[fx.Node]) -> list[list[fx.Node]]:
    """Waits that stand before the same segment, together."""
    groups: list[list[fx.Node]] = []
    for wait in waits:
        before = wait.prev
        while before.target is ops.restore or before.target is ops.bring and wait.target is not ops.bring:
            before = before.prev
        if groups and before is groups[-1][-1]:
            groups[-1].append(wait)
        else:
            groups.append([wait])
    return groups


def _clock(graph: fx.Graph, ctx: Context) -> dict[fx.Node, float]:
    """When each node begins, by the times of operators alone; without a machine every operator takes as long."""
    cost, known = CostModel(ctx.machine) if ctx.machine is not None else None, hints(graph)
    now, out = 0.0, {}
    for n in graph.nodes:
        out[n] = now
        now += facts.is_compute(n) if cost is None else node_us(cost, n, ctx.fused, known)
    return out


def _move_us(ctx: Context, tier: str, moved: fx.Node, out: bool = False) -> float:
    if ctx.machine is None:
        return 0.0
    return ctx.machine.links(tier)[out].us(facts.bytes_of(facts.value(moved)))


def _discard(graph: fx.Graph, waits: list[fx.Node]) -> None:
    roots = facts.alias_roots(graph)
    last: dict[fx.Node, fx.Node] = {}
    for n in graph.nodes:
        # A collective of the graph reads until it has been waited for.
        sent = n.args[0].all_input_nodes if n.target is _WAIT else ()
        for used in (*n.all_input_nodes, *sent):
            for r in roots[used]:
                last[r] = n
    for wait in waits:
        end = last[wait.args[0]].next
        while end.op != "output" and end.target not in ops.BORDERS:
            end = end.next
        with graph.inserting_before(end):
            graph.call_function(ops.discard, (wait,))
