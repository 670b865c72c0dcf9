"""Forward and backward graph: what every tensor-parallel rank would save whole is saved in parts (Pa of ZeRO-R)."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils._pytree import tree_map, tree_map_only

from zero_compiler.ir import facts, ops
from zero_compiler.ir.facts import ParamRef
from zero_compiler.ranks.mesh import TENSOR

from .base import Context
from .offload_activations import last_uses

_aten = torch.ops.aten
_functional = torch.ops._c10d_functional
# What these return is the same on every rank of their group.
_ALIKE = frozenset({_functional.all_reduce.default, _functional.all_gather_into_tensor.default})
# A smaller tensor lies on one page of memory with others: nothing is saved.
WORTH_BYTES = 4096


@dataclass(frozen=True)
class PartitionActivations:
    """Save one part a rank of what forward saves alike on all tensor-parallel ranks; gather it before its use.

    Rajbhandari et al. 2020, section 6.1. Before, in forward and in backward::

        return (%loss, %x)

        %grad = aten.mm %t, %x

    After::

        %x_part = zero.part %x, 'tp', 2
        return (%loss, %x_part)

        %x_gather = _c10d_functional.all_gather_into_tensor %x_part, 2, 'tp'
        %x_whole  = _c10d_functional.wait_tensor %x_gather
        %x        = aten.view %x_whole, [4, 8]
        %grad     = aten.mm %t, %x

    Alike is what an all-reduce or an all-gather over those ranks returns, a weight that tensor parallelism does not
    cut, and what pure operators make of these alone. Their constants may be a rank's own (the rows that it takes of a
    tensor), and so may whole operators: a rank with nothing to subtract has no subtraction. So ranks show each other
    how each tensor was made and between which collectives backward first reads it, without names of nodes. What all
    of them show, each once and in one order, is saved in parts; every rank then issues the same collectives.

    Refuses: nothing. What is left whole: what is smaller than :data:`WORTH_BYTES`, or lies in no simple order; what
    the user is given as well; a view of something else that is saved; what has a symbolic size.

    Args:
        group, ranks: name and size of the process group of the tensor-parallel ranks.
        show: gives the texts of all of them, in order, for this rank's.
    """

    group: str
    ranks: int
    show: Callable[[str], Sequence[str]]
    name: str = "partition-activations"

    def run(self, forward: fx.Graph, backward: fx.Graph, num_outputs: int, ctx: Context) -> None:
        """Rewrite both graphs in place.

        Args:
            num_outputs: of the user, and of mutated inputs; what follows them is saved for backward.
        """
        (output,) = forward.find_nodes(op="output")
        values = list(output.args[0])
        roots = facts.alias_roots(forward)
        made = self._made_alike(forward, ctx)
        offers = self._offers(
            [n for n in self._wanted(values, num_outputs, roots) if n in made], made, backward
        )
        chosen = common([text.splitlines() for text in self.show("\n".join(offers))])
        self._note_left(forward, self._wanted(values, num_outputs, roots), {offers[text] for text in chosen})
        entries = {str(node.target): node for node in backward.find_nodes(op="placeholder")}
        last = last_uses(forward, roots)
        place = {v: k for k, v in enumerate(values) if k >= num_outputs and isinstance(v, fx.Node)}
        for node in (offers[text] for text in chosen):
            k = place[node]
            values[k] = self._save_part(node, roots[node], last, ctx)
            self._gather(entries[node.name], values[k])
        output.args = (type(output.args[0])(values),)

    def _offers(
        self, wanted: Sequence[fx.Node], made: Mapping[fx.Node, str], backward: fx.Graph
    ) -> dict[str, fx.Node]:
        """What may be saved in parts, by what this rank shows of each, in the order of first use in backward."""
        by_name = {node.name: node for node in wanted}
        out: dict[str, fx.Node] = {}
        twice = set()
        passed = 0
        for reader in backward.nodes:
            for entry in reader.all_input_nodes:
                node = by_name.pop(str(entry.target), None) if entry.op == "placeholder" else None
                if node is not None:
                    text = f"{made[node]} {list(facts.value(node).shape)} behind {passed}"
                    if text in out:
                        twice.add(text)
                    out[text] = node
            passed += self._sends(reader)
        return {text: node for text, node in out.items() if text not in twice}

    def _note_left(self, graph: fx.Graph, wanted: Sequence[fx.Node], in_parts: Collection[fx.Node]) -> None:
        """For the report: what is saved whole though it could be in parts, if it were known to be alike."""
        left = [facts.bytes_of(facts.value(n)) for n in wanted if n not in in_parts]
        if left:
            facts.add_note(
                graph,
                f"saved whole: {len(left)} tensors, {sum(left):,} bytes, which are not known to be equal on the "
                f"{self.ranks} tensor-parallel ranks: equal is what their collectives return, and what is made of that "
                "and of weights alone; what is made of inputs is not, such as the lookup of an embedding that "
                "parallelize_module does not cut",
            )

    def _sends(self, node: fx.Node) -> bool:
        """Whether the node is a collective over the group."""
        return facts.sends(node) and node.args[-1] == self.group

    def _wanted(
        self, values: list[fx.node.Argument], num_outputs: int, roots: Mapping[fx.Node, frozenset[fx.Node]]
    ) -> list[fx.Node]:
        """Saved tensors that can be saved in parts, in order."""
        users_own = {r for v in values[:num_outputs] if isinstance(v, fx.Node) for r in roots[v]}
        saved = [v for v in values[num_outputs:] if isinstance(v, fx.Node)]
        holders: dict[fx.Node, int] = {}
        for node in saved:
            for root in roots[node]:
                holders[root] = holders.get(root, 0) + 1
        out = []
        for node in saved:
            val = facts.value(node)
            unshared = all(
                holders[r] == 1 and r not in users_own and r.op != "placeholder" for r in roots[node]
            )
            if (
                isinstance(val, torch.Tensor)
                and unshared
                and val.is_contiguous()
                and facts.bytes_of(val) >= WORTH_BYTES
                and all(isinstance(n, int) for n in val.shape)
            ):
                out.append(node)
        return out

    def _made_alike(self, graph: fx.Graph, ctx: Context) -> dict[fx.Node, str]:
        """Nodes with equal values on all ranks of the group, if they were made in the same way, and that way."""
        made: dict[fx.Node, str] = {}
        passed = 0  # collectives of a group have one order on all its ranks
        for node in graph.nodes:
            if node.target is ops.unshard:
                plan = ctx.params[ParamRef(node.args[3], node.args[4])]
                if not plan.split:
                    made[node] = f"weight {plan.ref.name}"
            elif self._sends(node):
                passed += 1
                if node.target in _ALIKE:
                    made[node] = f"collective {passed}"
            elif node.target is _functional.wait_tensor.default:
                if node.args[0] in made:
                    made[node] = made[node.args[0]]
            elif _computes(node) and all(i in made for i in node.all_input_nodes):
                made[node] = _way(node, made)
        return made

    def _save_part(
        self, node: fx.Node, roots: Iterable[fx.Node], last: Mapping[fx.Node, fx.Node], ctx: Context
    ) -> fx.Node:
        # Behind the last reader of its storage, which is dead then.
        at = max(last[root] for root in roots)
        part = _after(at, ops.part, (node, self.group, self.ranks), f"{node.name}_part")
        whole, mine = facts.bytes_of(facts.value(node)), facts.bytes_of(facts.value(part))
        time = ""
        if ctx.machine is not None and ctx.machine.covers("c10d"):
            link = ctx.machine.collective("all_gather", self.ranks, over=TENSOR)
            time = f"; gathered back in {link.us(whole):,.0f} us"
        facts.set_note(
            part,
            f"{mine:,} of {whole:,} bytes are saved: one part of {self.ranks}, the others are equal{time}",
        )
        return part

    def _gather(self, entry: fx.Node, part: fx.Node) -> None:
        """Make the tensor again where backward first reads it; ``entry`` becomes this rank's part, by its name."""
        name, val = entry.name, facts.value(entry)
        readers = list(entry.users)
        first = min(readers)
        facts.set_value(entry, facts.value(part))
        entry.name = entry.target = part.name
        entry.meta.pop("tensor_meta", None)
        gather = _functional.all_gather_into_tensor.default
        at = _after(first.prev, gather, (entry, self.ranks, self.group), f"{name}_gather")
        at = _after(at, _functional.wait_tensor.default, (at,), f"{name}_padded")
        if facts.value(at).numel() != val.numel():
            at = _after(at, _aten.slice.Tensor, (at, 0, 0, val.numel()), f"{name}_flat")
        at = _after(at, _aten.view.default, (at, list(val.shape)), f"{name}_whole")
        for reader in readers:
            reader.replace_input_with(entry, at)


def common(shown: Sequence[Sequence[str]]) -> list[str]:
    """What all ranks show, in their order; nothing where they order it in different ways."""
    everywhere = set(shown[0]).intersection(*shown)
    first, *others = ([text for text in texts if text in everywhere] for texts in shown)
    return first if all(texts == first for texts in others) else []


def _after(node: fx.Node, target: fx.node.Target, args: tuple[fx.node.Argument, ...], name: str) -> fx.Node:
    with node.graph.inserting_after(node):
        new = node.graph.create_node("call_function", target, args, name=name)
    facts.set_value(new, target(*tree_map_only(fx.Node, facts.value, args)))
    return new


def _computes(node: fx.Node) -> bool:
    """Whether equal inputs and constants give equal values, wherever the node runs."""
    if node.op != "call_function" or not facts.is_pure(node):
        return False
    if node.target is operator.getitem:
        return True
    return node.target.namespace in ("aten", "prims") and "empty" not in node.target._schema.name


def _way(node: fx.Node, made: Mapping[fx.Node, str]) -> str:
    def text(arg: object) -> object:
        return made[arg] if isinstance(arg, fx.Node) else arg.type if isinstance(arg, torch.device) else arg

    args = tree_map(text, (node.args, dict(node.kwargs)))
    return hashlib.sha256(f"{node.target} {args}".encode()).hexdigest()[:32]
