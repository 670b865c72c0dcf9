"""The part of a joint graph that runs over the tokens of one head, written for tiles of the head's weight."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.utils._pytree import tree_map

from zero_compiler.cost.cost import CostModel, at_hints, hints, reread_bytes
from zero_compiler.cost.hardware import HardwareSpec
from zero_compiler.ir import facts, ops
from zero_compiler.ir.facts import Columns, ParamRef, TileOutput, Tiling

from ..base import Context, ParamPlan
from ..emitter import Emitter
from . import row_propagation
from .column_sums import SIZED, ColumnSums
from .expand_tiles import tiles_that_hold
from .head import Head, name_of, rows_of_tiles, weight_of
from .row_propagation import Left, Rows
from .tile_graph import hoist, tile_graph

aten = torch.ops.aten


def plan_of(head: fx.Node, ctx: Context) -> ParamPlan | None:
    """The plan of a head's weight, where that is cut between ranks: it could be gathered in tiles."""
    weight = weight_of(head)
    if weight is None or weight.target is not ops.unshard:
        return None
    plan = ctx.params.get(ParamRef(weight.args[3], weight.args[4]))
    return plan if plan is not None and plan.sharded else None


@dataclass(eq=False)
class _Result:
    """What a part of the graph gives: a node of it, and the node or the two factors that make it, written anew."""

    node: fx.Node
    made: tuple[fx.Node, ...]
    kind: TileOutput | None = (
        None  # None: it has no columns, nor a sum over them but those that a sweep finds
    )
    how: str | int = "sum"


@dataclass(eq=False)
class _Body:
    """What a tile of tokens and columns computes."""

    sums: ColumnSums
    ragged: bool  # some columns of a tile are none of the weight's
    graph: fx.Graph = field(default_factory=fx.Graph)

    def __post_init__(self) -> None:
        self.rows, self.columns = self.graph.placeholder("rows"), self.graph.placeholder("columns")
        self.inputs: dict[fx.Node, fx.Node] = {}
        self._made: dict[fx.Node, fx.Node] = {self.sums.r: self.rows}
        self._masked: dict[tuple[fx.Node, float], fx.Node] = {}

    def of(self, node: fx.Node) -> fx.Node:
        if node in self._made:
            return self._made[node]
        if not self.sums.wide(node):
            return self._input(node)
        todo = [node]
        while todo:  # without recursion: chains of operators may be long
            n = todo[-1]
            missing = [i for i in n.all_input_nodes if i not in self._made and self.sums.wide(i)]
            if missing:
                todo += missing
                continue
            todo.pop()
            if n not in self._made:
                self._made[n] = self._copy(n)
        return self._made[node]

    def _input(self, node: fx.Node) -> fx.Node:
        if node not in self._made:
            with self.graph.inserting_after(list(self.inputs.values() or [self.columns])[-1]):
                self._made[node] = self.inputs[node] = self.graph.placeholder(node.name)
        return self._made[node]

    def _copy(self, node: fx.Node) -> fx.Node:
        sized = node.target in SIZED

        def own(a: fx.node.Argument) -> fx.node.Argument:
            if isinstance(a, fx.Node):
                return self.of(a)
            return self.columns if sized and type(a) is int and a == self.sums.width else a

        args, kwargs = tree_map(own, (node.args, node.kwargs))
        return self.graph.call_function(node.target, args, kwargs)

    def masked(self, node: fx.Node, other: float = 0.0) -> fx.Node:
        """``node``, with ``other`` in columns that are none of the weight's."""
        if not self.ragged or not self.sums.wide(node):
            return self.of(node)
        if (node, other) not in self._masked:
            self._masked[node, other] = self._mask(node, other)
        return self._masked[node, other]

    def _mask(self, node: fx.Node, other: float) -> fx.Node:
        g, val, column = self.graph, facts.value(node), self.sums.column_dim(node)
        if node.target in row_propagation._PERMUTES:
            return g.call_function(node.target, (self.masked(node.args[0], other), *node.args[1:]))
        real = g.call_function(aten.gt.Scalar, (self._input(self.sums.numbers), 0))
        sizes = [self.columns if d == column else 1 for d in range(val.dim())]
        fill = g.call_function(aten.full.default, ([], other), {"dtype": val.dtype, "device": val.device})
        return g.call_function(
            aten.where.self, (g.call_function(aten.view.default, (real, sizes)), self.of(node), fill)
        )

    def summed(self, node: fx.Node, how: str) -> fx.Node:
        """A sum over the columns of the tile."""
        given, g = node.args[0], self.graph
        if how == "sum":
            return g.call_function(aten.sum.dim_IntList, (self.masked(given), [1], True))
        out = self.masked(given, float("-inf"))
        return (
            g.call_function(aten.amax.default, (out, [1], True))
            if how == "max"
            else self._log_sum_exp(out, given)
        )

    def _log_sum_exp(self, out: fx.Node, node: fx.Node) -> fx.Node:
        # In operators that stand in graphs that were decomposed; of nothing but -inf it is -inf.
        def call(target: object, *args: fx.node.Argument) -> fx.Node:
            return self.graph.call_function(target, args)

        least = torch.finfo(facts.value(node).dtype).min
        most = call(aten.clamp_min.default, call(aten.amax.default, out, [1], True), least)
        total = call(
            aten.sum.dim_IntList, call(aten.exp.default, call(aten.sub.Tensor, out, most)), [1], True
        )
        return call(aten.add.Tensor, call(aten.log.default, total), most)


class Vocabulary:
    """A head whose weight is gathered in tiles.

    Forward finds the sums over the vocabulary that the loss is made of, in one sweep over tiles of the weight. Backward
    makes each tile's logits again, and of them the gradients: that of the weight is reduced as it is born. Where it is
    added to another one (of a tied embedding), it is made where that is, in a sweep of its own.

    Raises:
        Left: the loss needs more than one sweep, or mixes columns in a way that is not known.
    """

    def __init__(
        self, head: Head, plan: ParamPlan, machine: HardwareSpec | None, tile_bytes: int | None, key: str
    ) -> None:
        self.head, self.plan, self.key = head, plan, key
        self.machine, self.tile_bytes = machine, tile_bytes
        if plan.shape[0] != head.width:
            raise Left("its rows are not the vocabulary")
        self.emit = emit = Emitter(head.graph, head.head)
        results = head.results()
        bare, kinds = tile_graph(head.nodes, head.rows, head.sums, head.inputs, results)
        self.given = list(head.inputs)
        self.sums = ColumnSums(
            bare,
            [(self._flat(n, need), None if need is None else need.at) for n, need in self.given],
            [n in head.tangents for n, _ in self.given],
            head.width,
            emit,
        )
        outs = iter(self.sums.outs)
        self.results = [
            self._result(n, [next(outs) for _ in range(1 + kind.product)], kind)
            for n, kind in zip(results, kinds, strict=True)
        ]
        self.total = head.total()
        self._whole: dict[fx.Node, fx.Node] = {}

    def _flat(self, node: fx.Node, need: Rows | None) -> fx.node.Argument:
        """The value of an input with its tokens in one dimension, however many."""
        val = facts.value(node)
        if need is None:
            return val
        sizes = row_propagation.shape(node)
        return self.emit.empty([*sizes[: need.at], 1, *sizes[need.end :]], val)

    # What the results are ----------------------------------------------------------------------------------

    def _result(self, node: fx.Node, made: Sequence[fx.Node], kind: TileOutput) -> _Result:
        sums = self.sums
        if kind.product:
            if node not in self.head.tangents:
                raise Left(f"%{node.name} multiplies them in forward")
            columns = [sums.column_dim(m) for m in made]
            dim = next((d for d, c in enumerate(columns) if c is not None), None)
            if dim is None or None not in columns:
                raise Left(f"%{node.name} is no product of logits' gradient with something narrow")
            return _Result(node, tuple(made), kind, dim)
        (last,) = made
        if last in sums.sums or not any(sums.wide(n) for n in last.all_input_nodes):
            return _Result(node, (last,))
        column = sums.column_dim(last)
        if last.target is aten.mm.default and column is None:
            return _Result(node, tuple(last.args), TileOutput(kind.rows, product=True), "sum")
        if column is not None and sums.row_dim(last) is None:
            more = max(0, facts.value(node).dim() - facts.value(last).dim())
            return _Result(node, (sums.with_dims(last, more),), TileOutput(None), column + more)
        raise Left(f"%{node.name} is as large as logits, or is added to what they give")

    def _late(self, r: _Result) -> bool:
        return r.node in self.head.tangents

    def _is_separate(self, r: _Result) -> bool:
        """A gradient of the weight that is reduced as it is, and not after it was added to another one."""
        if not isinstance(r.how, int) or r.kind is None or not r.kind.product:
            return True
        return self._chain(r)[-1].target is ops.reduce_grad

    def _chain(self, r: _Result) -> list[fx.Node]:
        """Views and casts of a result, and the first that reads it and is neither."""
        readers = self.head.readers(r.node)
        out = readers[:1]
        while out and len(readers) == 1 and _passes(out[-1]):
            readers = list(out[-1].users)
            out += readers[:1]
        return out if len(readers) == 1 else out[:1]

    # Rewriting ---------------------------------------------------------------------------------------------

    def replace(self) -> None:
        """Put a ``zero.tiled`` in the place of forward's sums, and others in that of the gradients."""
        head, graph = self.head, self.head.graph
        early = [r for r in self.results if not self._late(r)]
        late = [r for r in self.results if self._late(r)]
        swept = [r for r in late if r.kind is not None]
        apart = [r for r in swept if not self._is_separate(r)]
        new: dict[fx.Node, fx.Node] = {}
        with graph.inserting_before(head.before_writes(self._first(early or late))):
            self._sweep_forward()
            for r in early:
                new[r.node] = head.restored(self.emit, r.node, self.whole(r.made[0]))
        if late:
            with graph.inserting_before(self._first(late)):
                for r in late:
                    if r.kind is None:
                        new[r.node] = head.restored(self.emit, r.node, self.whole(r.made[0]))
                self._sweep_backward([r for r in swept if r not in apart], new, "grads")
        for k, r in enumerate(apart):
            chain = self._chain(r)
            for node in chain[:-1]:
                chain[-1].prepend(node)  # so late as what it is added to
            with graph.inserting_before(chain[0]):
                self._sweep_backward([r], new, f"grad{k}")
        for node, out in new.items():
            for reader in head.readers(node):
                reader.replace_input_with(node, out)
        hoist(self.emit.made)

    def _first(self, results: Sequence[_Result]) -> fx.Node:
        return min(u for r in results for u in self.head.readers(r.node))

    def whole(self, node: fx.node.Argument) -> fx.node.Argument:
        """A value without columns, of all tokens, in the joint graph."""
        if node not in self._whole:
            self._whole[node] = self._emitted(node)
        return self._whole[node]

    def _emitted(self, node: fx.Node) -> fx.node.Argument:
        sums, emit = self.sums, self.emit
        if node is sums.r:
            return self.total
        if node.op == "placeholder":
            return self.head.given(emit, *self.given[sums.inputs.index(node)])
        if any(sums.wide(n) for n in node.all_input_nodes):
            raise Left(f"%{node.name} needs what is as large as logits")
        args, kwargs = tree_map(
            lambda a: self.whole(a) if isinstance(a, fx.Node) else a, (node.args, node.kwargs)
        )
        return emit(node.target, *args, **kwargs)

    def _needed(self) -> list[fx.Node]:
        """Sums that the results are made of."""
        seen: dict[fx.Node, None] = {}
        todo = [m for r in self.results for m in r.made]
        while todo:
            node = todo.pop()
            if node not in seen:
                seen[node] = None
                todo += [] if node in self.sums.sums else node.all_input_nodes
        return [n for n in self.sums.graph.nodes if n in seen and n in self.sums.sums]

    def _sweep_forward(self) -> None:
        sums = self._needed()
        if not sums:
            return
        body = _Body(self.sums, self._ragged())
        outs = [body.summed(n, self.sums.sums[n]) for n in sums]
        vals = [self.emit.empty([self.total, 1], facts.value(n)) for n in sums]
        hows: list[str | int] = [self.sums.sums[n] for n in sums]
        kinds = [TileOutput(0)] * len(sums)
        what = f"logits of {self._name()}, summed over the vocabulary"
        got = self._tiled(body, outs, kinds, hows, vals, what, "sums")
        self._whole.update(zip(sums, got, strict=True))

    def _sweep_backward(self, results: Sequence[_Result], new: dict[fx.Node, fx.Node], name: str) -> None:
        if not results:
            return
        body = _Body(self.sums, self._ragged())
        outs: list[fx.Node] = []
        for r in results:
            assert r.kind is not None
            if r.kind.product:
                outs += [body.masked(m) for m in r.made]
            else:
                (last,) = r.made
                args, kwargs = tree_map(
                    lambda a: body.masked(a) if isinstance(a, fx.Node) else a, (last.args, last.kwargs)
                )
                outs.append(body.graph.call_function(last.target, args, kwargs))
        vals = [self.head.collapsed(self.emit, r.node, self.total) for r in results]
        kinds = [r.kind for r in results if r.kind is not None]
        what = f"logits of {self._name()}, made again{self._time()}, and their gradient"
        got = self._tiled(body, outs, kinds, [r.how for r in results], vals, what, name)
        for r, out in zip(results, got, strict=True):
            new[r.node] = self.head.restored(self.emit, r.node, out)

    def _tiled(
        self,
        body: _Body,
        outs: Sequence[fx.Node],
        kinds: Sequence[TileOutput],
        hows: Sequence[str | int],
        vals: Sequence[torch.Tensor],
        what: str,
        name: str,
    ) -> list[fx.Node]:
        head, sums = self.head, self.sums
        body.graph.output(list(outs))
        given = [self.whole(n) for n in body.inputs]
        columns = Columns(head.width, tuple(sums.column_dim(n) for n in body.inputs), tuple(hows))
        val = facts.value(head.head)
        width = min(head.width, self.plan.world * (self.plan.tile_rows or self.plan.chunk_rows))
        rows, why = rows_of_tiles(head.head, self.machine, self.tile_bytes, width)
        tiles = tiles_that_hold(self.total, rows, self.tile_bytes)
        tiling = Tiling(
            body.graph,
            tuple(sums.row_dim(n) for n in body.inputs),
            tuple(kinds),
            self.total,
            tiles,
            what,
            width * val.element_size(),
            reread_bytes(width * row_propagation.shape(head.head.args[-2])[1], val.dtype),
            columns=columns,
            why=why,
            asked=tiles,
        )
        tiled = self.emit.node(ops.tiled, (given, f"{self.key}.{name}"), {}, list(vals))
        facts.set_tiling(tiled, tiling)
        return [self.emit(operator.getitem, tiled, i) for i in range(len(vals))]

    def _time(self) -> str:
        """Of the head's product, which a sweep in backward does once more; in words, where a machine is given."""
        if self.machine is None:
            return ""
        us = CostModel(self.machine).node_us(self.head.head)
        return f" in {at_hints(us, hints(self.head.graph)):,.0f} us"

    def _ragged(self) -> bool:
        return self.plan.shape[0] % self.plan.world != 0

    def _name(self) -> str:
        weight = weight_of(self.head.head)
        assert weight is not None
        return name_of(weight)


def _passes(node: fx.Node) -> bool:
    return node.target in row_propagation._VIEWS | row_propagation._PERMUTES | row_propagation._SAME | {
        torch.ops.prims.convert_element_type.default
    }
