"""Joint graph: backward sees the values that forward saw of inputs that forward writes to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from zero_compiler.ir import facts

from .base import Context

_aten = torch.ops.aten


@dataclass(frozen=True)
class KeepOldValues:
    """Read an input that forward writes to (a buffer, mostly) through a copy, where backward needs what it held.

    Before::

        %a = aten.add %steps, 1
        %y = aten.mul %x, %a
        %g = aten.mul %tangents_1, %a
        %c = aten.copy_ %steps, %a

    After::

        %o = aten.clone %steps           (not to be made again in backward)
        %a = aten.add %o, 1
        ...

    A partitioner may save ``%steps`` and make ``%a`` again in backward, when ``%steps`` has been written to.

    Refuses: nothing.
    """

    name: str = "keep-old-values"

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        tangents = facts.depends_on_tangents(graph)
        for node in graph.find_nodes(op="placeholder"):
            writes = [
                u
                for u in node.users
                if u.target is _aten.copy_.default and u.args[0] is node and u not in tangents
            ]
            if not writes or not _reaches(node, set(writes), tangents):
                continue
            with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
                old = graph.call_function(_aten.clone.default, (node,))
            facts.set_value(old, facts.value(node).clone())
            facts.tag_recompute(old, CheckpointPolicy.MUST_SAVE, 0)
            for user in list(node.users):
                if user is old:
                    continue
                if user in writes:
                    user.args = (node, *(old if a is node else a for a in user.args[1:]))
                else:
                    user.replace_input_with(node, old)


def _reaches(node: fx.Node, writes: set[fx.Node], tangents: set[fx.Node]) -> bool:
    """Whether backward reads ``node``, or what forward makes of it."""
    seen, todo = {node}, [node]
    while todo:
        for user in todo.pop().users:
            if user in tangents:
                return True
            if user not in seen and user not in writes:
                seen.add(user)
                todo.append(user)
    return False
