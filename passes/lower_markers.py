"""Forward or backward graph: markers become transfers."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from zero_compiler.ir import facts, ops
from zero_compiler.ir.facts import ParamRef

from .base import Context


@dataclass(frozen=True)
class LowerMarkers:
    """Replace each marker by a transfer and its wait; a weight that every rank holds whole needs no gather.

    Before::

        %w = zero.unshard %p [w]                %g = zero.reduce_grad %full [w]

    After::

        %s = zero.gather [w]                    %s = zero.reduce %full [w]
        %t = zero.wait %s                       %t = zero.wait %s
        %w = getitem %t, 0                      %g = getitem %t, 0

    Refuses: nothing.
    """

    name: str = "lower-markers"

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        for node in graph.find_nodes(op="call_function", target=ops.unshard):
            plan = ctx.params[ParamRef(node.args[3], node.args[4])]
            with graph.inserting_before(node):
                new = _gather(graph, node, plan) if plan.sharded else _whole(graph, node, plan)
            node.replace_all_uses_with(new)
            graph.erase_node(node)
        reduced = {}
        for node in graph.find_nodes(op="call_function", target=ops.reduce_grad):
            plan = ctx.params[ParamRef(node.args[3], node.args[4])]
            with graph.inserting_before(node):
                reduced[node] = _reduce(graph, node, plan)
        facts.replace_all(reduced)
        for node in reduced:
            graph.erase_node(node)


def _gather(graph, node, plan):
    val = facts.value(node)
    sizes, dims = ops.flat_sizes([plan.shape])
    start = graph.call_function(ops.gather, ([plan.ref.name], sizes, dims, plan.gather_dtype, val.device))
    return waited(graph, start, [plan.ref], [val], node)


def _whole(graph, node, plan):
    if plan.gather_dtype == plan.dtype:
        return node.args[0]
    # The operator that both ways to compute know: Inductor takes aten._to_copy for one that was taken apart before.
    new = graph.call_function(torch.ops.prims.convert_element_type.default, (node.args[0], plan.gather_dtype))
    facts.set_value(new, facts.value(node))
    return new


def _reduce(graph, node, plan):
    grad, size = node.args[0], node.args[1]
    sizes, dims = ops.flat_sizes([size])
    start = graph.call_function(ops.reduce, ([grad], sizes, dims, plan.dtype, not plan.sharded))
    return waited(graph, start, [plan.ref], [facts.value(node)], node)


def waited(graph, start, refs, vals, like):
    """Wait for ``start`` (the point of insertion is the caller's); returns its only element."""
    facts.set_params(start, refs)
    facts.set_value(start, list(vals))
    wait = graph.call_function(ops.wait, (start,))
    facts.set_value(wait, list(vals))
    element = graph.call_function(operator.getitem, (wait, 0))
    facts.set_value(element, vals[0])
    for new in (start, wait, element):
        for key in ("nn_module_stack", "fwd_nn_module_stack", "seq_nr"):
            if key in like.meta:
                new.meta[key] = like.meta[key]
    return element
