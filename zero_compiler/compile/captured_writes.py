"""Elementwise writes to weights in a captured graph: they are taken out of it, and done to the rows before it runs."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ..layout import Layout
from ..params.weight_op import weight
from ..tensors.row_writes import IN_PLACE, NAMES, OPERATORS, rows_of, write_rows

_IN_PLACE_FUNCTIONS = frozenset(getattr(operator, f"i{n}") for n in OPERATORS)
_OUT_OF_PLACE = frozenset(NAMES) | {
    "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isfinite", "isinf", "logical_and", "logical_or", "logical_not",
    "maximum", "minimum", "where", "clone", "to", "float", "double", "half", "bfloat16", "type", "detach",
}  # fmt: skip
_PLAIN_OPERATORS = frozenset(
    getattr(operator, name)
    for name in "add sub mul truediv floordiv mod pow neg pos abs eq ne lt le gt ge and_ or_ xor invert".split()
)
_DATA = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]


@dataclass(frozen=True)
class CapturedWrite:
    """Writes of a captured graph to one parameter, ``arg`` among its inputs, called ``name`` in the model ``owner``.

    ``graph`` takes the rows and, of the inputs ``operands``, what goes with them; it writes to the first.
    """

    arg: int
    owner: str
    name: str
    graph: fx.GraphModule
    operands: tuple[int, ...]

    def run(self, args: Sequence[Any], layout: Layout, rank: int) -> None:
        param = args[self.arg]
        device = param._local_tensor.device
        operands = [rows_of(args[i], layout, rank, device) for i in self.operands]
        write_rows(param, lambda rows: self.graph(rows, *operands))


def extract_writes(gm: fx.GraphModule) -> list[CapturedWrite]:
    """Take the elementwise writes to weights out of ``gm``: they are to be done before it runs, to the rows.

    Those stay that come after a use of the weight, or need more than the weight and inputs of the graph.
    """
    nodes = list(gm.graph.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    placeholders = [n for n in nodes if n.op == "placeholder"]
    out = []
    for param in placeholders:
        markers = [u for u in param.users if u.target is weight]
        if markers and (found := _WriteChain(markers, order).taken(placeholders)) is not None:
            graph, operands = found
            owner, name = str(markers[0].args[1]), str(markers[0].args[2])
            out.append(CapturedWrite(placeholders.index(param), owner, name, graph, operands))
    return out


class _WriteChain:
    """What a graph does to one weight: nodes that are the weight itself, and of these those that write to it."""

    def __init__(self, markers: Sequence[fx.Node], order: dict[fx.Node, int]) -> None:
        self.order = order
        self.same = set(markers)  # the weight itself, by whichever name
        self.writers: list[fx.Node] = []
        # Of these, which are made by code that counts its writes apart (.data): all of them must be known.
        self.counting = set(markers)
        for node in order:
            first = node.args[0] if node.args else None
            if first not in self.same:
                continue
            if node.op == "call_function" and node.target is _DATA:
                self.same.add(node)
                self.counting.add(node)
            elif node.op == "call_method" and node.target == "detach":
                self.same.add(node)
            elif _writes(node):
                self.same.add(node)  # an operator in place returns what it has written to
                self.writers.append(node)

    def taken(self, placeholders: Sequence[fx.Node]) -> tuple[fx.GraphModule, tuple[int, ...]] | None:
        """The writes as a graph of their own, with the inputs that it needs; None where they cannot be taken out."""
        # Several reads of one weight have the same value.
        values = {id(value): value for value in (n.meta.get("example_value") for n in self.counting)}
        counted = sum(map(_version, values.values()))
        if not self.writers or counted != len(self.writers):
            return None
        last = self.order[self.writers[-1]]
        inputs: list[fx.Node] = []
        needed: set[fx.Node] = set()
        for writer in self.writers:
            if not all(self._follow(n, inputs, needed) for n in writer.all_input_nodes):
                return None
        # What reads the weight otherwise must come behind all writes: it reads what they have made.
        for node in (*self.same, *needed):
            for user in node.users:
                inner = user in self.same or user in needed
                if not inner and (node in needed or self.order[user] < last):
                    return None
        graph = self._graph(inputs, needed)
        for writer in self.writers:
            writer.replace_all_uses_with(writer.args[0])
        for node in sorted(self.writers + list(needed), key=self.order.__getitem__, reverse=True):
            node.graph.erase_node(node)
        for node in sorted(self.same - set(self.writers), key=self.order.__getitem__, reverse=True):
            if not node.users:
                node.graph.erase_node(node)
            else:
                node.meta["example_value"] = _unwritten(node.meta["example_value"])
        return graph, tuple(placeholders.index(n) for n in inputs)

    def _follow(self, node: fx.Node, inputs: list[fx.Node], needed: set[fx.Node]) -> bool:
        """Whether an operand is made from the weight and inputs of the graph, element by element."""
        if node in self.same or node in needed or node in inputs:
            return True
        if node.op == "placeholder":
            inputs.append(node)
            return not any(u.target is weight for u in node.users)
        if not _elementwise(node) or not all(self._follow(n, inputs, needed) for n in node.all_input_nodes):
            return False
        needed.add(node)
        return True

    def _graph(self, inputs: Sequence[fx.Node], needed: set[fx.Node]) -> fx.GraphModule:
        graph = fx.Graph()
        rows = graph.placeholder("rows")
        made = {n: graph.placeholder(f"operand_{i}") for i, n in enumerate(inputs)}
        made.update(dict.fromkeys(self.same - set(self.writers), rows))
        for node in sorted(needed | set(self.writers), key=self.order.__getitem__):
            made[node] = graph.node_copy(node, lambda n: made[n])
        graph.output(rows)
        return fx.GraphModule(torch.nn.Module(), graph)


def _version(value: object) -> int:
    return value._version if isinstance(value, FakeTensor) and not value.is_inference() else 0


def _unwritten(value: torch.Tensor) -> torch.Tensor:
    """The same fake value, of which no writes have been counted."""
    with torch.no_grad():
        return torch.empty_like(value).requires_grad_(value.requires_grad)


def _writes(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in IN_PLACE
    return node.op == "call_function" and node.target in _IN_PLACE_FUNCTIONS


def _elementwise(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or any(isinstance(k, str) and k == "out" for k in node.kwargs):
        return False
    if node.op == "call_method":
        return node.target in _OUT_OF_PLACE
    if node.op != "call_function":
        return False
    return node.target is _DATA or node.target in _PLAIN_OPERATORS or _of_torch(node.target)


def _of_torch(target: object) -> bool:
    name = getattr(target, "__name__", "")
    return name in _OUT_OF_PLACE and getattr(torch, name, None) is target
