"""Forward or backward graph: no storage of a gathered weight leaves the Program, and gradients share none."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from zero_compiler.ir import facts, ops

from .base import Context


@dataclass(frozen=True)
class CloneEscapes:
    """Copy what is returned and may share storage with a gathered weight, and say so in the report.

    One rank has no reduction that would make new tensors of gradients: there, a gradient that shares storage
    with another one, or with any other value that outlives the Program, is copied too. Each ``p.grad`` is then
    a tensor of its own, as after plain accumulation.

    Before::

        %v = aten.slice %w, 0, 0, 32
        return %v

    After::

        %v = aten.slice %w, 0, 0, 32
        %c = aten.clone %v
        return %c

    Refuses: nothing.
    """

    name: str = "clone-escapes"

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        roots = facts.alias_roots(graph)
        (output,) = graph.find_nodes(op="output")
        for node in output.all_input_nodes:
            if any(facts.is_weight(r) for r in roots[node]):
                _copy(output, node, output, "a view of a gathered weight leaves the program: copied")
        if any(plan.world == 1 for plan in ctx.params.values()):
            self._own_gradients(graph, output)

    def _own_gradients(self, graph: fx.Graph, output: fx.Node) -> None:
        roots = facts.alias_roots(graph)  # with the copies that were just made
        taken = {r for node in output.all_input_nodes for r in roots[node]}
        for start in list(graph.find_nodes(op="call_function", target=ops.reduce)):
            for grad in start.all_input_nodes:
                if any(r in taken or r.op == "placeholder" or facts.is_weight(r) for r in roots[grad]):
                    _copy(start, grad, start, "a gradient shares storage with another value: copied")
                taken |= roots[grad]


def _copy(reader: fx.Node, node: fx.Node, before: fx.Node, note: str) -> None:
    """Give ``reader`` a copy of ``node``."""
    with before.graph.inserting_before(before):
        # Strides are part of what the caller was promised.
        copy = before.graph.call_function(
            torch.ops.aten.clone.default, (node,), {"memory_format": torch.preserve_format}
        )
    facts.set_value(copy, facts.value(node))
    facts.set_note(copy, note)
    reader.replace_input_with(node, copy)
