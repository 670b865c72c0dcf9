"""Joint graph: one gather per weight, one reduction per gradient; gradients of tied uses are summed here."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import fx

from zero_compiler.errors import PassRefused
from zero_compiler.ir import facts, ops
from zero_compiler.ir.facts import ParamRef

from .base import Context


@dataclass(frozen=True)
class MergeMarkers:
    """Read each weight once, and sum the gradients of its uses before one reduction.

    Before::

        %a  = zero.unshard %p [w]        %ga = zero.reduce_grad %g1 [w]
        %b  = zero.unshard %p [w]        %gb = zero.reduce_grad %g2 [w]
                                         %s  = aten.add %ga, %gb
    After::

        %a  = zero.unshard %p [w]        %t  = aten.add %g1, %g2
                                         %s  = zero.reduce_grad %t [w]

    Refuses: a weight that is read from two different inputs; a reduced gradient that is used for anything
    but a sum of reductions of the same parameter.
    """

    name: str = "merge-markers"

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        first: dict[ParamRef, fx.Node] = {}
        for node in graph.find_nodes(op="call_function", target=ops.unshard):
            ref = ParamRef(node.args[3], node.args[4])
            if ref not in first:
                first[ref] = node
                continue
            if node.args[0] is not first[ref].args[0]:
                raise PassRefused(
                    f"weight {ref.name!r} is read from two different inputs, %{first[ref].args[0]} and "
                    f"%{node.args[0]}: the parameter was replaced between two forwards of one graph"
                )
            node.replace_all_uses_with(first[ref])
            graph.erase_node(node)

        found: dict[ParamRef, list[fx.Node]] = {}
        for node in graph.find_nodes(op="call_function", target=ops.reduce_grad):
            found.setdefault(ParamRef(node.args[3], node.args[4]), []).append(node)
        for ref, nodes in found.items():
            if len(nodes) > 1:
                _sum_before_reduction(graph, ref, nodes)


def _sum_before_reduction(graph: fx.Graph, ref: ParamRef, nodes: list[fx.Node]) -> None:
    # Reduction is linear: push each one below the sums that follow it until one is left.
    pending = set(nodes)
    todo = deque(nodes)
    while todo:
        node = todo.popleft()
        users = list(node.users)
        if node not in pending or len(users) != 1 or users[0].target is not torch.ops.aten.add.Tensor:
            continue
        total = users[0]
        left, right = total.args[0], total.args[1]
        if left not in pending or right not in pending or total.kwargs:
            continue  # the other summand may still become a reduction, and then comes here itself
        with graph.inserting_before(total):
            summed = graph.call_function(torch.ops.aten.add.Tensor, (left.args[0], right.args[0]))
            reduced = graph.call_function(ops.reduce_grad, (summed, *node.args[1:]))
        summed.meta.update(total.meta)
        facts.set_value(summed, facts.value(left.args[0]) + facts.value(right.args[0]))
        reduced.meta.update(total.meta)
        total.replace_all_uses_with(reduced)
        graph.erase_node(total)
        pending -= {left, right}
        for old in {left, right}:
            graph.erase_node(old)
        pending.add(reduced)
        todo.append(reduced)
    if len(pending) > 1:
        raise PassRefused(
            f"the gradient of {ref.name!r} is reduced {len(pending)} times and the results are not only summed"
        )
