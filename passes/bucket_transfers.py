"""Forward or backward graph: transfers of a unit move together, small ones in shared buckets."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from zero_compiler.ir import facts, ops
from zero_compiler.ir.facts import ParamRef

from .base import Context


@dataclass(frozen=True)
class BucketTransfers:
    """Gather a unit's weights before its first use and reduce its gradients after its last one.

    Small weights of one dtype, that travel in one, share a bucket; a large one goes alone, since alone it needs no
    copy. Buckets and their order come from the canonical order of units, forward as it is and backward reversed. A
    weight that forward reads several times (a tied one) backward gathers by the last of these reads, where it needs it
    first; the gradient is whole, and reduced, by the first of them. In memory that ranks share a large gradient does
    not wait for the end of its unit where those that wait would pass the bytes of the largest.

    Before (``w1`` and ``b1`` belong to one unit)::

        %s1 = zero.gather [w1]    ...    %s2 = zero.gather [b1]   ...
        %t1 = zero.wait %s1              %t2 = zero.wait %s2

    After::

        %s = zero.gather [w1, b1]
        %t = zero.wait %s
        %w1 = getitem %t, 0
        %b1 = getitem %t, 1

    Refuses: nothing.
    """

    bucket_bytes: int = 0
    name: str = "bucket-transfers"

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        _sink_derived(graph)
        _bucket_gathers(graph, ctx, self.bucket_bytes)
        _bucket_reductions(graph, ctx, self.bucket_bytes)


def _sink_derived(graph: fx.Graph) -> None:
    """Move what derives from weights alone (views, casts) down to its first reader.

    A partitioner puts what it recomputes at the top of the backward graph, where it would call for every
    weight at once.
    """
    derived: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if facts.is_weight(node) or (
            inputs and all(i in derived for i in inputs) and facts.is_compute(node) and facts.is_pure(node)
        ):
            derived.add(node)
    for node in reversed(list(graph.nodes)):
        if node in derived and not facts.is_weight(node) and node.users and not facts.stays(node):
            min(node.users).prepend(node)  # nodes compare by their place in the graph


def buckets(
    refs: Iterable[ParamRef], ctx: Context, bucket_bytes: int, key: Callable[[ParamRef], object]
) -> list[list[ParamRef]]:
    """Cut ``refs`` into buckets: one key each, large members alone, order kept among the small ones."""
    out: list[list[ParamRef]] = []
    open_: dict[object, tuple[list[ParamRef], int]] = {}
    for ref in refs:
        size = ctx.params[ref].gather_bytes
        if size >= bucket_bytes:
            out.append([ref])
            continue
        k = key(ref)
        bucket, filled = open_.get(k, ([], 0))
        if not bucket or filled + size > bucket_bytes:
            bucket, filled = [], 0
            out.append(bucket)
        bucket.append(ref)
        open_[k] = (bucket, filled + size)
    return out


def _by_unit(refs: Iterable[ParamRef], ctx: Context) -> list[tuple[str, list[ParamRef]]]:
    present = set(refs)
    units: dict[str, list[ParamRef]] = {}
    for ref, unit in ctx.units.items():
        if ref in present:
            units.setdefault(unit, []).append(ref)
    out = list(units.items())
    return out[::-1] if ctx.phase == "backward" else out


def _gathered_by_unit(refs: Collection[ParamRef], ctx: Context) -> list[tuple[str, list[ParamRef]]]:
    """The same in the order in which the weights are needed.

    Backward needs a unit first for the last read of it in forward. A unit with weights that forward reads again comes
    where those units are that were read for the first time by then; all others stay in the canonical order.
    """
    units = _by_unit(refs, ctx)
    if ctx.phase != "backward":
        return units
    place = {unit: i for i, unit in enumerate(dict.fromkeys(ctx.units.values()))}
    order = {unit: (place[unit], -1) for unit, _ in units}
    present, seen, latest = set(refs), set[ParamRef](), 0
    for at, ref in enumerate(ctx.reads):
        if ref not in ctx.units:
            continue
        unit = ctx.units[ref]
        latest = max(latest, place[unit])
        if ref in seen and ref in present:
            order[unit] = latest, at
        seen.add(ref)
    return sorted(units, key=lambda item: order[item[0]], reverse=True)


def _bucket_gathers(graph: fx.Graph, ctx: Context, bucket_bytes: int) -> None:
    old: dict[ParamRef, fx.Node] = {}
    device: torch.device | None = None
    for node in graph.find_nodes(op="call_function", target=ops.gather):
        (ref,) = facts.params(node)
        if facts.tile(node) is not None:
            continue  # tiles are gathered where they are used
        (wait,) = node.users
        (element,) = wait.users
        old[ref], device = element, node.args[4]
    wanted = set(old) | {
        r for r in ctx.gathered or () if ctx.params[r].sharded and not ctx.params[r].tile_rows
    }
    if not wanted:
        return
    if device is None:
        device = _device(graph)
    first_use = {ref: _first_use(element) for ref, element in old.items()}
    (output,) = graph.find_nodes(op="output")
    at: fx.Node | None = None
    for unit, refs in reversed(_gathered_by_unit(wanted, ctx)):
        # Transfers keep their order: a unit never waits after the next one does.
        uses = [first_use[r] for r in refs if r in first_use]
        if at is not None:
            uses.append(at)
        if not uses:
            uses = [output]  # nothing reads this unit, nor any unit after it
        point = min(uses)
        started: list[fx.Node] = []
        with graph.inserting_before(point):
            for bucket in buckets(
                refs,
                ctx,
                bucket_bytes,
                lambda r: _gather_key(ctx, r),
            ):
                known = {r: facts.value(old[r]) for r in bucket if r in old}
                elements = emit_gather(graph, bucket, unit, ctx, device, known)
                started.append(elements[0].args[0].args[0])
                for ref, element in zip(bucket, elements, strict=True):
                    if ref in old:
                        old[ref].replace_all_uses_with(element)
        at = started[0]
    for element in old.values():
        wait = element.args[0]
        start = wait.args[0]
        for node in (element, wait, start):
            graph.erase_node(node)


def _gather_key(ctx: Context, ref: ParamRef) -> object:
    """What all members of a gather have in common. The dtype at rest too: hops from other tiers bring those bytes."""
    plan = ctx.params[ref]
    return plan.dtype, plan.gather_dtype, plan.wire, ref.owner, plan.released, plan.path


def _device(graph: fx.Graph) -> torch.device:
    values = (facts.value(n) for n in graph.find_nodes(op="placeholder"))
    return next((v.device for v in values if isinstance(v, torch.Tensor)), torch.device("cpu"))


def _first_use(element: fx.Node) -> fx.Node:
    """The first node that computes with a weight, looking through views of it."""
    best: fx.Node | None = None
    todo = [element]
    while todo:
        node = todo.pop()
        for user in node.users:
            if node in facts.aliased_inputs(user):
                todo.append(user)
            # A view must itself stand after the wait, so it counts as a use too.
            if best is None or user < best:
                best = user
    return best if best is not None else element


def emit_gather(
    graph: fx.Graph,
    refs: Sequence[ParamRef],
    unit: str,
    ctx: Context,
    device: torch.device,
    known: Mapping[ParamRef, object] | None = None,
) -> list[fx.Node]:
    """A gather, its wait and its elements, at the graph's point of insertion.

    Args:
        known: values of full weights that these elements take over; others are made.
    """
    plans = [ctx.params[r] for r in refs]
    sizes, dims = ops.flat_sizes([p.shape for p in plans])
    args = ([r.name for r in refs], sizes, dims, plans[0].gather_dtype, device)
    known = known or {}
    vals = [
        known[r] if r in known else _empty(p.shape, p.gather_dtype, device, graph)
        for r, p in zip(refs, plans, strict=True)
    ]
    return _emit(graph, ops.gather, args, refs, unit, vals)


def _emit(
    graph: fx.Graph,
    target: fx.node.Target,
    args: tuple[object, ...],
    refs: Sequence[ParamRef],
    unit: str,
    vals: Sequence[object],
) -> list[fx.Node]:
    start = graph.call_function(target, args)
    facts.set_params(start, refs)
    facts.set_unit(start, unit)
    facts.set_value(start, list(vals))
    wait = graph.call_function(ops.wait, (start,))
    facts.set_unit(wait, unit)
    facts.set_value(wait, list(vals))
    elements = []
    for i, val in enumerate(vals):
        element = graph.call_function(operator.getitem, (wait, i))
        facts.set_value(element, val)
        elements.append(element)
    return elements


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, graph: fx.Graph) -> object:
    return facts.fake_empty(graph, shape, dtype, device)


def _bucket_reductions(graph: fx.Graph, ctx: Context, bucket_bytes: int) -> None:
    old: dict[ParamRef, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=ops.reduce):
        (ref,) = facts.params(node)
        if facts.tile(node) is not None:
            continue
        (wait,) = node.users
        (element,) = wait.users
        old[ref] = element
    if not old:
        return
    start_of = {ref: e.args[0].args[0] for ref, e in old.items()}
    waits = [
        n for n in graph.find_nodes(op="call_function", target=ops.wait) if n.args[0].target is ops.gather
    ]
    boundaries = _unit_starts(waits)
    (output,) = graph.find_nodes(op="output")
    groups = [
        (unit, group)
        for unit, refs in _by_unit(old, ctx)
        for group in _reduced_together(refs, ctx, bucket_bytes)
    ]
    made = _last_writes(graph)
    ends: list[fx.Node] = []
    for _, group in groups:
        grads = [start_of[r].args[0][0] for bucket in group for r in bucket]
        ends.append(max([*grads, *(made[g] for g in grads if g in made), *ends[-1:]]))
    # All points first: what is inserted at one must not move the next.
    points: list[fx.Node] = []
    for i, end in enumerate(ends):
        # At the next unit's wait, where a segment ends anyway; but not behind the next reduction.
        k = bisect_right(boundaries, end)
        if k < len(boundaries) and (i + 1 == len(ends) or not ends[i + 1] < boundaries[k]):
            points.append(boundaries[k])
        else:
            points.append(_behind(end) if i + 1 < len(ends) else output)
    new_of: dict[fx.Node, fx.Node] = {}
    for point, (unit, group) in zip(points, groups, strict=True):
        with graph.inserting_before(point):
            for bucket in group:
                sizes, dims = ops.flat_sizes([facts.value(old[r]).shape for r in bucket])
                plan = ctx.params[bucket[0]]
                grads = [start_of[r].args[0][0] for r in bucket]
                args = (grads, sizes, dims, plan.dtype, not plan.sharded)
                elements = _emit(graph, ops.reduce, args, bucket, unit, [facts.value(old[r]) for r in bucket])
                new_of.update(zip((old[r] for r in bucket), elements, strict=True))
    facts.replace_all(new_of)
    for element in old.values():
        wait = element.args[0]
        for node in (element, wait, wait.args[0]):
            graph.erase_node(node)


def _last_writes(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Of values whose memory is written behind them, the last node that does so: a gradient that tiles are put into, or
    added to, is whole then."""
    roots = facts.alias_roots(graph)
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for written in facts.written_inputs(node):
            last |= dict.fromkeys(roots[written], node)
    return {
        node: max(last[r] for r in of if r in last)
        for node, of in roots.items()
        if any(r in last for r in of)
    }


def _behind(node: fx.Node) -> fx.Node:
    """The node behind ``node`` and the results beside it: an operator with several keeps them in its segment."""
    node = node.next
    while node.target is operator.getitem and not facts.is_element(node):
        node = node.next
    return node


def _reduced_together(
    refs: Sequence[ParamRef], ctx: Context, bucket_bytes: int
) -> list[list[list[ParamRef]]]:
    """Buckets of a unit in groups that are reduced at one point, in the order in which backward makes them.

    Full gradients wait for their group to be complete. In memory that ranks share they wait in the arena: there large
    ones go as soon as those that wait would pass the bytes of the largest one, so that a layer's gradients are never
    all held at once; no sooner, since each point ends a compute segment. The small ones close with the unit.
    """
    large: list[list[ParamRef]] = []
    small: list[list[ParamRef]] = []
    for bucket in buckets(refs, ctx, bucket_bytes, lambda r: (_reduce_key(ctx, r), r.owner)):
        plan = ctx.params[bucket[0]]
        (large if plan.shared and plan.gather_bytes >= bucket_bytes else small).append(bucket)
    out: list[list[list[ParamRef]]] = [[]]
    room = max((ctx.params[r].reduce_bytes for (r,) in large), default=0)
    held = 0
    for bucket in reversed(large):
        nbytes = ctx.params[bucket[0]].reduce_bytes
        if held + nbytes > room:
            out.append([])
            held = 0
        out[-1].append(bucket)
        held += nbytes
    out[-1] += small
    return out


def _reduce_key(ctx: Context, ref: ParamRef) -> object:
    plan = ctx.params[ref]
    return (plan.dtype, plan.reduce_dtype, plan.sharded, plan.grad_path)


def _unit_starts(waits: list[fx.Node]) -> list[fx.Node]:
    """The first gather of each unit's group of gathers."""
    out, seen = [], set()
    for wait in waits:
        if facts.unit(wait) not in seen:
            seen.add(facts.unit(wait))
            out.append(wait.args[0])
    return out
