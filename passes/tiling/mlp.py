"""The part of a graph that runs over the tokens of one MLP: what it is, and ``zero.tiled`` in its place."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import fx

from zero_compiler.cost.cost import CostModel, at_hints, reread_bytes, tile_rows
from zero_compiler.cost.hardware import HardwareSpec
from zero_compiler.ir import facts, ops
from zero_compiler.ir.facts import Tiling

from ..emitter import Emitter
from . import row_propagation
from .expand_tiles import ACTIVATIONS, LEAST_ROWS, MEMORY, SPEED, UNKNOWN, limit_text, tiles_that_hold
from .head import name_of, weight_behind, weight_of
from .row_propagation import Left, Rows, Summed
from .tile_graph import constant, hoist, tile_graph

aten = torch.ops.aten


@dataclass(frozen=True)
class Chain:
    """What looks like an MLP: products with weights that make rows wider, and what reads them in forward, up to one
    that makes them narrower."""

    ups: tuple[fx.Node, ...]
    down: fx.Node


class Limits(NamedTuple):
    """Most bytes of a tile, where there is a limit (see :class:`~zero_compiler.passes.base.PassOptions`)."""

    tile_bytes: int | None
    mlp_bytes: int | None


@dataclass
class _MlpPart:
    """Nodes that are done tile by tile, with what they read (and which rows of it) and what is read of them."""

    nodes: list[fx.Node]
    results: list[fx.Node]
    inputs: dict[tuple[fx.Node, Rows | None], None] = field(default_factory=dict)


class Mlp:
    """Forward and backward of one MLP.

    Args:
        known: the values of symbols in the graph, which of as many MLPs as layers each may not look for itself.

    Raises:
        Left: it cannot be done tile by tile, or something else needs its intermediate whole.
    """

    def __init__(
        self, graph: fx.Graph, chain: Chain, tangents: Collection[fx.Node], known: Mapping[object, int]
    ) -> None:
        self.graph, self.chain, self.tangents, self.known = graph, chain, tangents, known
        self.total = row_propagation.shape(chain.down)[0]
        self.width = min(row_propagation.shape(up)[1] for up in chain.ups)
        self.rows: dict[fx.Node, Rows] = dict.fromkeys(chain.ups, Rows(0, 1))
        self.sums: dict[fx.Node, Summed] = {}
        self.ends: set[fx.Node] = set()
        for up in chain.ups:
            self._check_tokens(up, self.rows[up])
        self._grow()
        inner = [n for n in self.rows if n not in tangents and n not in self.ends]
        self._absorb()
        self.first = self._part([*self._behind([chain.down], set(inner)), chain.down], [chain.down])
        back = [n for n in (*self.rows, *self.sums) if n in tangents]
        self.second = None
        if back:
            again = self._behind(back, set(inner))
            results = [n for n in back if n in self.sums or n in self.ends]
            self.second = self._part([*again, *back], [n for n in results if self._readers(n, back)])
        self._check_readers({*inner, *back, chain.down})

    # What belongs to it --------------------------------------------------------------------------------------

    def _grow(self) -> None:
        for late in (False, True):  # readers in forward first: those in backward may read several of them
            seen = set(self.rows)
            todo: list[fx.Node] = []
            found = [n for n in self.rows if n not in self.ends]
            while found or todo:
                for user in (u for n in found for u in n.users):
                    if user not in seen and (user in self.tangents) == late:
                        seen.add(user)
                        heapq.heappush(todo, user)
                if not todo:
                    break
                # In the order of the graph, so that all that it reads is known; and one at a time: the first that
                # cannot be taken ends the walk, which would else reach the end of the model.
                node = heapq.heappop(todo)
                self._add_node(node)
                found = [node] if node in self.rows and node not in self.ends else []

    def _add_node(self, node: fx.Node) -> None:
        if node.op == "output":
            raise Left("the intermediate is returned")
        given = [n for n in node.all_input_nodes if n in self.rows and n not in self.ends]
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise Left(f"{node.target} draws random numbers, which a tile that is made again would draw anew")
        found = [row_propagation.result(node, n, self.rows[n]) for n in given]
        first = found[0]
        late = node in self.tangents
        if isinstance(first, Summed):
            if not late or not all(isinstance(f, Summed) for f in found):
                raise Left(f"{node.target} mixes tokens")
            self.sums[node] = first
            return
        if any(f != first for f in found):
            raise Left(f"{node.target} reads tokens of two kinds")
        self._check_tokens(node, first)
        self.rows[node] = first
        if row_propagation.is_product(node):
            if not late and node is not self.chain.down:
                raise Left(f"%{node.name} multiplies it too")
            self.ends.add(node)

    def _check_tokens(self, node: fx.Node, rows: Rows) -> None:
        """A tile of each value holds the same tokens: nothing is sliced away, and nothing is one for all of them."""
        if rows.picked is not None or not row_propagation.count_is(
            row_propagation.shape(node)[rows.at : rows.end], self.total
        ):
            raise Left(f"%{node.name} has other tokens than %{self.chain.down.name}")

    def _absorb(self) -> None:
        """Take in what is as large and comes of the gradient alone: that of the intermediate, above all."""
        todo = [n for n in (*self.rows, *self.sums) if n in self.tangents]
        while todo:
            node = todo.pop()
            for n, need in row_propagation.operands(node, self._form(node)).items():
                if n in self.rows and n not in self.ends:
                    have = self.rows[n]
                    if need is None and row_propagation.same(self.total, 1):
                        continue  # a single token is as well one for all
                    if need is None or (have.at, have.count) != (need.at, need.count):
                        raise Left(f"{node.target} reads tokens of two kinds")
                elif need is not None and n in self.tangents and self._wide(n, need):
                    product = (
                        row_propagation.is_product(n) and need == Rows(0, 1) and n.target is aten.mm.default
                    )
                    if not product and not row_propagation.absorbable(n):
                        raise Left(f"%{n.name}, as large as it, is made by {n.target}")
                    self.rows[n] = need
                    todo.append(n)

    def _form(self, node: fx.Node) -> Rows | Summed:
        return self.rows[node] if node in self.rows else self.sums[node]

    def _wide(self, node: fx.Node, rows: Rows) -> bool:
        sizes = row_propagation.shape(node)
        return any(isinstance(s, int) and s >= self.width for s in (*sizes[: rows.at], *sizes[rows.end :]))

    def _behind(self, nodes: Iterable[fx.Node], inner: set[fx.Node]) -> list[fx.Node]:
        """Those of ``inner`` that ``nodes`` are made of."""
        seen: set[fx.Node] = set()
        todo = list(nodes)
        while todo:
            for n in todo.pop().all_input_nodes:
                if n in inner and n not in seen:
                    seen.add(n)
                    todo.append(n)
        return list(seen)

    def _part(self, nodes: Iterable[fx.Node], results: list[fx.Node]) -> _MlpPart:
        part = _MlpPart(sorted(nodes), results)
        made = set(part.nodes)
        for node in part.nodes:
            for n, need in row_propagation.operands(node, self._form(node)).items():
                if n in self.sums:
                    raise Left(f"{node.target} reads a sum over all tokens")
                if n in made or constant(n, need):
                    continue
                if not isinstance(facts.value(n), torch.Tensor):
                    raise Left(f"{node.target} reads a size, %{n.name}")
                if need is not None and self._wide(n, need):
                    raise Left(f"%{n.name}, as large as it, is made elsewhere")
                if need is not None:
                    self._check_tokens(n, need)
                part.inputs[n, need] = None
        late = part.nodes[-1] in self.tangents
        own = {n for n in part.nodes if not late or n in self.tangents}
        for n, _ in part.inputs:
            if _comes_of(n, own):
                raise Left(f"%{n.name} must be known before, and comes of it")
        return part

    def _readers(self, node: fx.Node, inside: Collection[fx.Node]) -> list[fx.Node]:
        return [u for u in node.users if u not in inside]

    def _check_readers(self, made: set[fx.Node]) -> None:
        results = {self.chain.down, *(self.second.results if self.second else ())}
        for node in sorted(made - results):
            for user in node.users:
                if user not in made:
                    raise Left(f"%{user.name} reads %{node.name} too")

    # Rewriting -----------------------------------------------------------------------------------------------

    def replace(self, machine: HardwareSpec | None, limits: Limits, key: str) -> None:
        """Put a ``zero.tiled`` in the place of its forward, and one in that of its backward."""
        tilings = [
            (part, self._tiling(machine, limits, part))
            for part in (self.first, self.second)
            if part is not None
        ]
        for k, (part, tiling) in enumerate(tilings):
            made = set(part.nodes) if k == 0 else {n for n in part.nodes if n in self.tangents}
            readers = [u for n in part.results for u in self._readers(n, made)]
            if not readers:
                continue
            emit = Emitter(self.graph, part.results[0])
            # Forward where it was: an input that it reads may be written to before the result is read.
            with self.graph.inserting_before(min(readers) if k else self.chain.down.next):
                given = [self._given(emit, n, need) for n, need in part.inputs]
                values = [emit.empty(row_propagation.shape(n), facts.value(n)) for n in part.results]
                tiled = emit.node(ops.tiled, (given, f"{key}.{k}"), {}, values)
                facts.set_tiling(tiled, tiling)
                got = [emit(operator.getitem, tiled, i) for i in range(len(part.results))]
            if k == 0:
                for node in (tiled, *got):
                    facts.copy_region(self.chain.down, node)
            for node, new in zip(part.results, got, strict=True):
                for reader in self._readers(node, made):
                    reader.replace_input_with(node, new)
            hoist(emit.made)

    def _given(self, emit: Emitter, node: fx.Node, need: Rows | None) -> fx.Node:
        """An input with its tokens in one dimension."""
        if need is None or need.count == 1:
            return node
        sizes = row_propagation.shape(node)
        return emit.reshaped(node, [*sizes[: need.at], self.total, *sizes[need.end :]])

    def _tiling(self, machine: HardwareSpec | None, limits: Limits, part: _MlpPart) -> Tiling:
        graph, kinds = tile_graph(part.nodes, self.rows, self.sums, part.inputs, part.results)
        inputs = tuple(None if need is None else need.at for _, need in part.inputs)
        row_bytes = sum(row_propagation.shape(n)[1] * facts.value(n).element_size() for n in self.chain.ups)
        row_bytes += (
            row_propagation.shape(self.chain.down.args[-2])[1] * facts.value(self.chain.down).element_size()
        )
        back = part is self.second
        weights = [facts.value(n.args[-1]) for n in (*self.chain.ups, self.chain.down)]
        again = sum(reread_bytes(w.numel(), w.dtype) if back else facts.bytes_of(w) for w in weights)
        rows, why = self._tile_rows(machine, limits, row_bytes)
        tiles = tiles_that_hold(self.total, rows, limits.tile_bytes)
        products = self.chain.ups if back else (*self.chain.ups, self.chain.down)
        us = self._us(machine, products)
        what = f"intermediate of {' and '.join(map(weights_of, self.chain.ups))}"
        if back:
            what += f", made again in {us:,.0f} us, with its gradient"
        return Tiling(
            graph, inputs, kinds, self.total, tiles, what, row_bytes, again, us, why=why, asked=tiles
        )

    def _us(self, machine: HardwareSpec | None, products: Iterable[fx.Node]) -> float:
        """Time of products that are done once more, where a machine is given."""
        if machine is None:
            return 0.0
        cost = CostModel(machine)
        return sum(at_hints(cost.node_us(n), self.known) for n in products)

    def _tile_rows(self, machine: HardwareSpec | None, limits: Limits, row_bytes: int) -> tuple[int, str]:
        """Tokens of a tile, and what it is for: a budget, since nothing else asks for tiles of an MLP, and what says
        that they are no larger."""
        rows, size = facts.hint(self.total), UNKNOWN
        budget = MEMORY if limits.mlp_bytes is None else ACTIVATIONS
        if machine is not None:
            rows = tile_rows(machine, str(facts.value(self.chain.down).dtype).removeprefix("torch."))
            size = SPEED
        for limit_bytes, words in ((limits.tile_bytes, limit_text), (limits.mlp_bytes, lambda _: "")):
            if limit_bytes is not None and max(LEAST_ROWS, limit_bytes // row_bytes) < rows:
                rows, size = max(LEAST_ROWS, limit_bytes // row_bytes), words(limit_bytes)
        return rows, f"{budget}{' and ' if size else ''}{size}"


def _comes_of(node: fx.Node, nodes: set[fx.Node]) -> bool:
    begin, todo, seen = min(nodes), [node], {node}
    while todo:
        n = todo.pop()
        if n in nodes:
            return True
        if begin < n:
            todo += [i for i in n.all_input_nodes if i not in seen]
            seen.update(n.all_input_nodes)
    return False


def chains(graph: fx.Graph, tangents: Collection[fx.Node]) -> list[Chain]:
    """What looks like an MLP, in order."""
    found: dict[fx.Node, dict[fx.Node, None]] = {}
    for node in graph.nodes:
        if node in tangents or not _changes_width(node, 1):
            continue
        for down in _downs(node, tangents):
            found.setdefault(down, {})[node] = None
    taken: set[fx.Node] = set()
    out = []
    for down, ups in found.items():
        if taken.isdisjoint(ups):
            out.append(Chain(tuple(ups), down))
        taken.update(ups)
    return out


def _changes_width(node: fx.Node, sign: int) -> bool:
    """Whether it is a product with a weight that makes rows wider (``sign`` 1) or narrower (-1)."""
    given = _multiplied(node)
    if given is None:
        return False
    inner, columns = row_propagation.shape(given)[-1], row_propagation.shape(node)[-1]
    return isinstance(inner, int) and isinstance(columns, int) and sign * (columns - inner) > 0


def _multiplied(node: fx.Node) -> fx.Node | None:
    """What a weight of two dimensions or three (experts) is multiplied by; None for any other operator."""
    if (
        node.op != "call_function"
        or not isinstance(facts.value(node), torch.Tensor)
        or node.target in _OTHERS
    ):
        return None
    if row_propagation.is_product(node):
        return node.args[-2] if weight_of(node) is not None else None
    if row_propagation.is_pointwise(node) or node.target in _FOLLOWED or not node.args:
        return None
    given = node.args[0]
    if (
        not isinstance(given, fx.Node)
        or not row_propagation.shape(given)
        or not facts.value(given).is_floating_point()
    ):
        return None
    weights = [
        n
        for n in node.all_input_nodes
        if len(row_propagation.shape(n)) in (2, 3) and weight_behind(n) is not None
    ]
    return given if len(weights) == 1 and weights[0] is not given and row_propagation.shape(node) else None


def weights_of(node: fx.Node) -> str:
    """Names of the weights that a product reads."""
    given = node.args[-1:] if row_propagation.is_product(node) else node.all_input_nodes[1:]
    found = (weight_behind(n) for n in given if len(row_propagation.shape(n)) in (2, 3))
    return " and ".join(name_of(w) for w in found if w is not None)


def _downs(up: fx.Node, tangents: Collection[fx.Node]) -> Sequence[fx.Node]:
    seen, todo, downs = {up}, [up], []
    while todo and len(seen) <= _NEAR:
        node = todo.pop()
        for user in node.users:
            if user in seen or user in tangents or user.op != "call_function":
                continue
            seen.add(user)
            if _changes_width(user, -1) and _multiplied(user) is node:
                downs.append(user)
            elif row_propagation.is_pointwise(user) or user.target in _FOLLOWED:
                todo.append(user)
    return downs


_NEAR = 64  # operators between the two products at most
_OTHERS = {aten.embedding.default, aten.convolution.default, *row_propagation._PERMUTES}
_FOLLOWED = {
    *row_propagation._VIEWS,
    *row_propagation._SAME,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.native_dropout.default,
    operator.getitem,
}
