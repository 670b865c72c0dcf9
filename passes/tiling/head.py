"""The part of a joint graph that runs over the tokens of one head: what it is, and one ``zero.tiled`` in its place."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from zero_compiler.cost.cost import reread_bytes, tile_rows
from zero_compiler.cost.hardware import HardwareSpec
from zero_compiler.ir import facts, ops
from zero_compiler.ir.facts import Tiling

from ..emitter import Emitter
from . import row_propagation
from .expand_tiles import SPEED, UNKNOWN, limit_text, tiles_that_hold
from .row_propagation import Left, Rows, Summed
from .tile_graph import constant, hoist, reached, tile_graph

aten = torch.ops.aten

_THROUGH = {aten.div.Tensor, aten.div.Scalar, torch.ops.prims.convert_element_type.default}
_OF_FIRST = {
    aten._log_softmax_backward_data.default,
    aten._softmax_backward_data.default,
    aten.tanh_backward.default,
    aten.sigmoid_backward.default,
    aten.threshold_backward.default,
    aten.slice_backward.default,
    aten.gather.default,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.neg.default,
    aten.mul.Scalar,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.slice.Tensor,
    *_THROUGH,
    *row_propagation._VIEWS,
    *row_propagation._PERMUTES,
    *(row_propagation._SAME - {aten.full_like.default, aten.ones_like.default}),
}


class Head:
    """The part of a joint graph that runs over the tokens of one head.

    Raises:
        Left: it has no such part, or another one needs it whole.
    """

    def __init__(self, graph: fx.Graph, head: fx.Node) -> None:
        self.graph, self.head = graph, head
        self.whole = ""  # why its weight cannot be gathered in tiles, where it should be
        self.width = row_propagation.shape(head)[1]
        self.rows: dict[fx.Node, Rows] = {head: Rows(0, 1)}
        self.sums: dict[fx.Node, Summed] = {}
        self.leave: dict[fx.Node, None] = {}
        self.pick: fx.Node | None = None  # the slice that chooses tokens
        self.inputs: dict[tuple[fx.Node, Rows | None], None] = {}
        self.order = {n: i for i, n in enumerate(graph.nodes)}
        self.tangents = reached([n for n in graph.nodes if facts.is_tangent(n)])
        self._grow()
        self._absorb()
        self.nodes = sorted({*self.rows, *self.sums}, key=self.order.__getitem__)
        self._check_picked()
        self._check_order()

    def _wide(self, node: fx.Node, rows: Rows) -> bool:
        rest = row_propagation.shape(node)
        return any(isinstance(s, int) and s >= self.width for s in (*rest[: rows.at], *rest[rows.end :]))

    def _grow(self) -> None:
        ends: set[fx.Node] = set()
        for node in self.graph.nodes:
            given = [n for n in node.all_input_nodes if n in self.rows and n not in ends]
            if not given:
                continue
            found: list[Rows | Summed] = []
            for n in given:
                try:
                    if node.op == "output":
                        raise Left("the logits, or something as large as they are, is returned")
                    found.append(self._picked_alike(row_propagation.result(node, n, self.rows[n])))
                except Left:
                    if found or self._wide(n, self.rows[n]):
                        raise
                    self.leave[n] = None  # a number a token may leave
            if not found:
                continue
            if len(found) < len(given):
                raise Left(f"{node.target} reads them together with something that has no tokens")
            first = found[0]
            if isinstance(first, Summed):
                if not all(isinstance(f, Summed) for f in found):
                    raise Left(f"{node.target} mixes tokens")
                self.sums[node] = first
                continue
            out = next((f for f in found if isinstance(f, Rows) and f.padded), first)
            assert isinstance(out, Rows)
            self.rows[node] = out
            if out.picked and self.pick is None:
                self.pick = node
            if multiplies(node):
                if node not in self.tangents:
                    raise Left(f"{node.name} multiplies them again in forward")
                ends.add(node)
                self.leave[node] = None
        self.ends = ends

    def _picked_alike(self, found: Rows | Summed) -> Rows | Summed:
        """Tiles are of the tokens that one slice chose: those that another one chooses are not among them."""
        if isinstance(found, Rows) and found.picked is not None and self.pick is not None:
            if found.picked != self.rows[self.pick].picked:
                raise Left("tokens are sliced in two ways")
        return found

    def _absorb(self) -> None:
        """Take in what feeds the head tile by tile though it does not depend on logits: what is as large, and the
        gradient of the loss spread over tokens."""
        todo: list[fx.Node] = [*self.rows, *self.sums]
        while todo:
            node = todo.pop()
            for n, need in row_propagation.operands(node, self._form(node)).items():
                if n in self.rows and n not in self.ends:
                    have = self.rows[n]
                    if need is None and self.pick is None and row_propagation.same(self.total(), 1):
                        continue  # a single token is as well one for all
                    if need is None or (have.at, have.count, self._all(have)) != (
                        need.at,
                        need.count,
                        self._all(need),
                    ):
                        raise Left(f"{node.target} reads tokens of two kinds")
                elif (
                    need is not None
                    and (n in self.tangents or self._wide(n, need))
                    and row_propagation.absorbable(n)
                ):
                    self.rows[n] = need
                    todo.append(n)
                elif need is not None and n in self.tangents:
                    raise Left("the loss is not reduced to one number inside of what is compiled")
                elif not constant(n, need):
                    self.inputs[n, need] = None

    def _form(self, node: fx.Node) -> Rows | Summed:
        return self.rows[node] if node in self.rows else self.sums[node]

    def _all(self, rows: Rows) -> bool:
        """Laid out over all tokens, and not over those that a slice chose."""
        return self.pick is None or rows.picked is None or rows.padded

    def _check_picked(self) -> None:
        if self.pick is None:
            return
        for node in (*self.sums, *self.leave):
            form = self._form(node)
            rows = form.rows if isinstance(form, Summed) else form
            if rows.picked is None:
                raise Left("tokens that are sliced away are used too")

    def _check_order(self) -> None:
        """Nothing that the head needs comes of what it makes, but for the gradient of the loss."""
        made = set(self.nodes)
        after = reached(self.nodes) - made
        scalars: set[fx.Node] = set()
        entries = [n for n, _ in self.inputs if n in self.tangents]
        todo = list(entries)
        while todo:
            node = todo.pop()
            if node not in scalars:
                scalars.add(node)
                todo += [n for n in node.all_input_nodes if n in self.tangents]
        self.scale: fx.Node | None = None
        if scalars:
            roots = [n for n in scalars if n.op == "placeholder"]
            early = not any(n in after or n in made for k in scalars for n in k.all_input_nodes)
            if early and len(roots) == 1:
                self.scale = roots[0]
            elif len(set(entries)) == 1:
                self.scale = entries[0]
            else:
                raise Left("its gradient is a sum of several that cannot be told apart in forward")
            if facts.value(self.scale).dim() != 0:
                raise Left("the loss is not reduced to one number inside of what is compiled")
        # From the scale on, in order: what forward can compute as if the scale were one.
        self.chain = [n for n in sorted(scalars, key=self.order.__getitem__) if self._from_scale(n)]
        for node, _ in self.inputs:
            if (node in after or node in made) and node not in scalars:
                raise Left(f"%{node.name} must be known before, and needs the sum over all tokens")
        for node in (*self.chain, *(n for n in self.nodes if n in self.tangents)):
            if not _linear(node, self.tangents):
                raise Left(f"the gradient is not linear in that of the loss: {node.target}")

    def _from_scale(self, node: fx.Node) -> bool:
        return node is not self.scale and (
            self.scale in node.all_input_nodes
            or any(self._from_scale(n) for n in node.all_input_nodes if n in self.tangents)
        )

    # Rewriting -----------------------------------------------------------------------------------------------

    def replace(self, machine: HardwareSpec | None, tile_bytes: int | None, key: str) -> None:
        """Put one ``zero.tiled`` in the place of all of it."""
        # Made in forward it would be that of an unscaled loss, of which float16 rounds the small numbers to nothing.
        if any(facts.value(n).dtype is torch.float16 for n in self.nodes if n in self.tangents):
            raise Left("the gradient of float16 logits needs the factor that the loss is scaled by")
        results = self.results()
        first = self.before_writes(min(u for n in results for u in self.readers(n)))
        emit = Emitter(self.graph, self.head)
        with self.graph.inserting_before(first):
            ones: dict[fx.Node, fx.Node] = {}
            if self.scale is not None:
                val = facts.value(self.scale)
                ones[self.scale] = emit(
                    aten.full.default, list(val.shape), 1, dtype=val.dtype, device=val.device
                )
            for node in self.chain:
                ones[node] = emit.like(node, ones)
            given = [self.given(emit, ones.get(n, n), need) for n, need in self.inputs]
            tiling = self._tiling(machine, tile_bytes, results)
            values = [self.collapsed(emit, n, tiling.total) for n in results]
            tiled = emit.node(ops.tiled, (given, key), {}, values)
            facts.set_tiling(tiled, tiling)
            got = [emit(operator.getitem, tiled, i) for i in range(len(results))]
            new = [self.restored(emit, n, g) for n, g in zip(results, got, strict=True)]
        for node, out in zip(results, new, strict=True):
            if node in self.tangents:
                with self.graph.inserting_before(min(self.readers(node))):
                    out = self._scaled(emit, out)
            for reader in self.readers(node):
                reader.replace_input_with(node, out)
        hoist(emit.made)

    def _scaled(self, emit: Emitter, out: fx.Node) -> fx.Node:
        """The gradient of the loss as it is, from that of the loss as if its factor were one.

        What was made of the loss, or of the number of labels, is no number where no label counts. The gradient of each
        logit is zero then, as tokens that do not count are masked behind that factor in the graph, and so they stay.
        """
        scaled = emit(aten.mul.Tensor, out, self.scale)
        if self.scale is None or self.scale.op == "placeholder":
            return scaled
        val = facts.value(out)
        zero = emit(aten.full.default, [], 0, dtype=val.dtype, device=val.device)
        return emit(aten.where.self, emit(aten.eq.Scalar, out, 0), zero, scaled)

    def before_writes(self, reader: fx.Node) -> fx.Node:
        """The first ``reader`` of what stands in the head's place, or a write to an input (of the graph) that comes
        between: what the head reads would be overwritten there."""
        writes = self.graph.find_nodes(op="call_function", target=aten.copy_.default)
        return min([reader, *(w for w in writes if self.head < w)])

    def readers(self, node: fx.Node) -> list[fx.Node]:
        return [u for u in node.users if u not in self.rows and u not in self.sums]

    def results(self) -> list[fx.Node]:
        return [n for n in self.nodes if (n in self.sums or n in self.leave) and self.readers(n)]

    def _lead(self) -> tuple[list[fx.node.Argument], tuple[int, fx.node.Argument, fx.node.Argument]]:
        """Dimensions of all tokens where some are chosen, and the slice that does it."""
        assert self.pick is not None
        given = self.pick.args[0]
        rows = self.rows[given]
        dim = row_propagation.arg(self.pick, 1, 0) % len(row_propagation.shape(given)) - rows.at
        return row_propagation.shape(given)[rows.at : rows.end], (
            dim,
            row_propagation.arg(self.pick, 2),
            row_propagation.arg(self.pick, 3),
        )

    def total(self) -> Any:
        if self.pick is None:
            return row_propagation.shape(self.head)[0]
        rows, total = self.rows[self.pick], 1
        for size in row_propagation.shape(self.pick)[rows.at : rows.end]:
            total = total * size
        return total

    def given(self, emit: Emitter, node: fx.Node, need: Rows | None) -> fx.Node:
        """An input of the head with its tokens in one dimension."""
        if need is None:
            return node
        sizes = row_propagation.shape(node)
        before, behind = sizes[: need.at], sizes[need.end :]
        if self.pick is not None and self._all(need):
            lead, (dim, start, end) = self._lead()
            node = emit.reshaped(node, [*before, *lead, *behind])
            node = emit(aten.slice.Tensor, node, need.at + dim, start, end)
        elif need.count == 1:
            return node
        return emit.reshaped(node, [*before, self.total(), *behind])

    def collapsed(self, emit: Emitter, node: fx.Node, total: object) -> torch.Tensor:
        val, sizes = facts.value(node), row_propagation.shape(node)
        if node in self.rows:
            rows = self.rows[node]
            sizes[rows.at : rows.end] = [total]
        return emit.empty(sizes, val)

    def restored(self, emit: Emitter, node: fx.Node, got: fx.Node) -> fx.Node:
        """A result as the readers of ``node`` know it, from one with tokens in one dimension."""
        if node in self.sums:
            return got
        rows, sizes = self.rows[node], row_propagation.shape(node)
        if self.pick is not None and self._all(rows):
            lead, (dim, start, end) = self._lead()
            picked = self.rows[self.pick]
            chosen = row_propagation.shape(self.pick)[picked.at : picked.end]
            before, behind = sizes[: rows.at], sizes[rows.end :]
            got = emit.reshaped(got, [*before, *chosen, *behind])
            val = facts.value(node)
            zeros = emit(aten.full.default, [*before, *lead, *behind], 0, dtype=val.dtype, device=val.device)
            got = emit(aten.slice_scatter.default, zeros, got, rows.at + dim, start, end)
        return emit.reshaped(got, sizes)

    def _tiling(
        self, machine: HardwareSpec | None, tile_bytes: int | None, results: Sequence[fx.Node]
    ) -> Tiling:
        graph, kinds = tile_graph(self.nodes, self.rows, self.sums, self.inputs, results)
        total = self.total()
        inputs = tuple(None if need is None else need.at for _, need in self.inputs)
        rows, why = rows_of_tiles(self.head, machine, tile_bytes, self.width)
        tiles = tiles_that_hold(total, rows, tile_bytes)
        sizes = self._sizes()
        return Tiling(graph, inputs, kinds, total, tiles, *sizes, whole=self.whole, why=why, asked=tiles)

    def _sizes(self) -> tuple[str, int, int]:
        """What :class:`Tiling` says for the report."""
        val, weight = facts.value(self.head), facts.value(self.head.args[-1])
        where = ", their gradient with them in forward" if self.scale is not None else ""
        again = reread_bytes(weight.numel(), val.dtype) if self.scale is not None else facts.bytes_of(weight)
        return f"logits of {factor_names(self.head)}{where}", self.width * val.element_size(), again


def _linear(node: fx.Node, tangents: set[fx.Node]) -> bool:
    """Whether ``node`` is linear in those of its operands that depend on the gradient of the loss."""
    of = [a for a in node.args if isinstance(a, fx.Node) and a in tangents]
    if len(of) != len([n for n in node.all_input_nodes if n in tangents]):
        return False
    t = node.target
    if t in (aten.add.Tensor, aten.sub.Tensor):
        return all(isinstance(a, fx.Node) and a in tangents for a in node.args[:2])
    if t in (aten.mul.Tensor, aten.mm.default):
        return len(of) == 1
    if t is aten.where.self:
        return node.args[0] not in tangents and all(
            a in tangents or row_propagation.is_zero(a) for a in node.args[1:]
        )
    if t is aten.masked_fill.Scalar:
        return of == [node.args[0]] and node.args[2] == 0
    if t is aten.slice_scatter.default:
        return of == [node.args[1]] and row_propagation.is_zero(node.args[0])
    if t is aten.scatter_add.default:
        return of == [node.args[3]] and row_propagation.is_zero(node.args[0])
    return t in _OF_FIRST and of == [node.args[0]]


def rows_of_tiles(
    head: fx.Node, machine: HardwareSpec | None, tile_bytes: int | None, columns: int
) -> tuple[int, str]:
    """Tokens of a tile with so many columns, and what so many are for."""
    val = facts.value(head)
    if tile_bytes is not None:
        return max(1, tile_bytes // (columns * val.element_size())), limit_text(tile_bytes)
    if machine is None:
        return facts.hint(val.numel()) // columns, UNKNOWN
    return tile_rows(machine, str(val.dtype).removeprefix("torch.")), SPEED


def weight_of(node: fx.Node) -> fx.Node | None:
    """The weight behind the second factor."""
    return weight_behind(node.args[-1])


def weight_behind(w: fx.Node) -> fx.Node | None:
    """A marker or an input of the graph, through views and casts of it."""
    while w.op == "call_function" and w.target is not ops.unshard:
        if len(w.all_input_nodes) != 1:
            return None
        w = w.all_input_nodes[0]
    return w if w.target is ops.unshard or w.op == "placeholder" else None


_STEPS = 32  # from a product to the weights that its second factor is made of


def factor_names(node: fx.Node) -> str:
    """Names of the weights that the second factor is made of, with nothing else; "" if it is not, or of many steps."""
    weight = weight_of(node)
    if weight is not None:
        return name_of(weight)
    seen: dict[fx.Node, None] = {}
    todo: list[fx.Node] = [node.args[-1]]
    leaves: dict[str, None] = {}
    while todo:
        given = todo.pop()
        if given.target is ops.unshard:
            leaves[name_of(given)] = None
        elif given not in seen:
            seen[given] = None
            made = given.op == "call_function" and bool(given.all_input_nodes) and facts.is_pure(given)
            if not made or len(seen) == _STEPS:
                return ""
            todo += reversed(given.all_input_nodes)
    return " and ".join(leaves)


def name_of(weight: fx.Node) -> str:
    return str(weight.args[4] if weight.target is ops.unshard else weight.name)


def multiplies(node: fx.Node) -> bool:
    return node.target in (
        *row_propagation._PRODUCTS,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
    )
