"""A ``zero.tiled`` whose weight is gathered in tiles: one loop over them, and in it one over tiles of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from zero_compiler.ir import facts, ops
from zero_compiler.ir.facts import Tile, TileOutput

from ..base import ParamPlan
from ..emitter import Emitter
from .expand_tiles import one_tile, token_tiles, written
from .readers import Reader
from .tiled_values import part, parts
from .tiles import TileContext, gathered, note, on_tile

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


class Sweep:
    """Writes such a loop, a tile of the weight at a time.

    :meth:`begin` lays out what all tiles share, :meth:`tile` gathers one, computes with it, and adds what it finds to
    the results, :meth:`finish` hands those over.

    Args:
        found: the operands that are views of the weight.
        start: what gathers the weight whole.
        k: number of this reader of the weight.
    """

    def __init__(
        self, how: TileContext, found: Sequence[Reader], start: fx.Node, plan: ParamPlan, k: int
    ) -> None:
        self.how, self.found, self.start, self.plan, self.k = how, found, start, plan, k
        self.node = node = found[0].node
        self.graph = node.graph
        self.emit = Emitter(self.graph, node)
        self.tiling = facts.tiling(node)
        self.written = written(self.tiling, how.bytes_only)
        assert self.tiling.columns is not None
        self.columns = self.tiling.columns
        self.given: Sequence[fx.Node] = node.args[0]
        self.got = {u.args[1]: u for u in node.users}
        self.reduced: set[int] = set()  # outputs of which each tile goes to a reduction, and none is laid

    @property
    def gives_more(self) -> bool:
        """Whether anything but a reduction reads its results."""
        return not set(self.got) <= self.reduced

    def begin(self) -> None:
        """Split what tiles read in parts, and make places for the results."""
        emit, plan, tiling = self.emit, self.plan, self.tiling
        self._cut()
        weights = {r.operand for r in self.found}
        self.tokens: dict[int, list[fx.Node]] = {}
        self.sliced: dict[int, tuple[int, Mapping[int, fx.Node]]] = {}  # along a dimension
        for i, (n, row, column) in enumerate(
            zip(self.given, tiling.inputs, self.columns.inputs, strict=True)
        ):
            if n in weights:
                continue
            if column is not None:
                self.sliced[i] = column, parts(emit, n, column, plan, self.how.written(plan))
            else:
                self.tokens[i] = token_tiles(emit, n, row, tiling, self.written)
        self.results: dict[int, fx.Node] = {}
        # By number of the tile of the weight, or of that of tokens.
        self.places: dict[int, Mapping[int, fx.Node]] = {}
        for i, (kind, how) in enumerate(zip(tiling.outputs, self.columns.outputs, strict=True)):
            if i in self.got and i not in self.reduced:
                self._result(i, kind, how)
        facts.add_note(self.graph, self._note())

    def _result(self, i: int, kind: TileOutput, how: str | int) -> None:
        emit, val = self.emit, facts.value(self.node)[i]
        if isinstance(how, int):
            sizes = list(val.shape)
            sizes[how] = self.plan.world * self.plan.chunk_rows
            result = emit(aten.empty.memory_format, sizes, dtype=val.dtype, device=val.device)
            self.places[i] = parts(emit, result, how, self.plan, self.how.written(self.plan))
        else:
            result = self._full(list(val.shape), 0 if how == "sum" else float("-inf"), val)
            self.places[i] = dict(enumerate(token_tiles(emit, result, kind.rows, self.tiling, self.written)))
        self.results[i] = result

    def _full(self, sizes: list[object], fill: float, like: torch.Tensor) -> fx.Node:
        dtype = torch.float32 if like.dtype in _HALF else like.dtype
        return self.emit(aten.full.default, sizes, fill, dtype=dtype, device=like.device)

    def _cut(self) -> None:
        self.graph.call_function(ops.cut, ())

    def tile(self, tile: Tile) -> dict[fx.Node, fx.Node]:
        """Compute with a tile of the weight; of the outputs in ``reduced``, this tile of each."""
        emit, plan = self.emit, self.plan
        columns = plan.world * tile.rows
        tiling = replace(self.tiling, columns=replace(self.columns, size=columns))
        weight = gathered(emit, self.start, plan, tile, f"{self.k}.{tile.index}")
        given = {i: part(emit, p[tile.index], dim, plan, tile) for i, (dim, p) in self.sliced.items()}
        for r in self.found:
            out = weight
            for node, dim in r.path:
                out = on_tile(emit, node, {node.all_input_nodes[0]: out}, dim, columns)
            given |= {i: out for i, n in enumerate(self.given) if n is r.operand}
        born = self._born(columns)
        for t in range(len(self.written)):
            self._cut()
            ins = given | {i: tokens[t] for i, tokens in self.tokens.items()}
            outs = one_tile(emit, tiling, [ins[i] for i in range(len(ins))])
            self._cut()
            for i, (kind, how) in enumerate(zip(tiling.outputs, self.columns.outputs, strict=True)):
                made = [outs.pop(0) for _ in range(1 + kind.product)]
                if i in born:
                    self._add(born[i], made)
                elif i in self.got and isinstance(how, int):
                    born[i] = emit(aten.mm.default, *made) if kind.product else made[0]
                elif i in self.got:
                    self._add_result(how, self.places[i][t], made)
        self._cut()
        return self._laid(born, tile)

    def _born(self, columns: int) -> dict[int, fx.Node]:
        """What tiles of tokens add this tile's outputs to, where there are several."""
        out = {}
        for i, how in enumerate(self.columns.outputs):
            if isinstance(how, int) and i in self.got and self.tiling.tiles > 1:
                val = facts.value(self.node)[i]
                out[i] = self._full([columns if d == how else s for d, s in enumerate(val.shape)], 0, val)
        return out

    def _laid(self, born: Mapping[int, fx.Node], tile: Tile) -> dict[fx.Node, fx.Node]:
        emit, out = self.emit, {}
        for i, value in born.items():
            val = facts.value(self.node)[i]
            value = emit.cast(value, val.dtype)
            if i in self.reduced:
                out[self.got[i]] = value
            else:
                place = self.places[i][tile.index]
                emit(aten.copy_.default, place, emit.reshaped(value, list(facts.value(place).shape)))
        if len(out) < len(born):
            self._cut()
        return out

    def _add_result(self, how: str | int, place: fx.Node, made: Sequence[fx.Node]) -> None:
        emit = self.emit
        if how == "sum":
            self._add(place, made)
        elif how == "max":
            emit(aten.copy_.default, place, emit(aten.maximum.default, place, made[0]))
        else:
            emit(aten.copy_.default, place, self._log_sum_exp(place, made[0]))

    def _log_sum_exp(self, a: fx.Node, b: fx.Node) -> fx.Node:
        emit = self.emit
        most = emit(aten.maximum.default, a, b)
        most = emit(aten.clamp_min.default, most, torch.finfo(facts.value(most).dtype).min)
        each = [emit(aten.exp.default, emit(aten.sub.Tensor, n, most)) for n in (a, b)]
        return emit(aten.add.Tensor, emit(aten.log.default, emit(aten.add.Tensor, *each)), most)

    def _add(self, place: fx.Node, made: Sequence[fx.Node]) -> None:
        emit = self.emit
        if len(made) == 2 and facts.value(place).dtype == facts.value(made[0]).dtype:
            emit(aten.addmm_.default, place, *made)
            return
        out = emit(aten.mm.default, *made) if len(made) == 2 else made[0]
        emit(aten.add_.Tensor, place, out)

    def finish(self) -> None:
        """Hand over the results; whoever reads reduced tiles has them already."""
        emit, rows = self.emit, self.plan.shape[0]
        for i, result in self.results.items():
            val, how = facts.value(self.node)[i], self.columns.outputs[i]
            if isinstance(how, int) and rows % self.plan.world:
                result = emit(aten.slice.Tensor, result, how, 0, rows)
                result = emit(aten.clone.default, result, memory_format=torch.contiguous_format)
            self.got[i].replace_all_uses_with(emit.cast(result, val.dtype))

    def erase(self) -> None:
        """Drop the ``zero.tiled``, of which nobody reads anything any more."""
        for user in list(self.node.users):
            self.graph.erase_node(user)
        self.graph.erase_node(self.node)

    def _note(self) -> str:
        """Every tile of the weight reads all tokens, every tile of tokens reads the weight."""
        plan, tiling = self.plan, self.tiling
        tokens = [n for i, n in enumerate(self.given) if tiling.inputs[i] is not None]
        again = (plan.tile_count - 1) * sum(facts.bytes_of(facts.value(n)) for n in tokens)
        again += (tiling.tiles - 1) * plan.gather_bytes
        what = f"{tiling.what}, {tiling.tile} tokens at a time"
        return note(what, "all_gather", plan, self.how, again)
