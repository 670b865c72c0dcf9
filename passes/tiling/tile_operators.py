"""Forward or backward graph: an operator with a large weight is computed for a tile of the weight at a time."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from zero_compiler.ir import dump, facts, ops
from zero_compiler.ir.facts import Tile

from ..base import Context, ParamPlan
from ..emitter import Emitter
from . import readers
from .readers import Reader
from .row_propagation import Left
from .tiled_values import gradient, part, parts
from .tiles import TileContext, erase_unread, gathered, note, on_tile, reduced, slicer
from .vocab_tile_loop import Sweep

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class TileOperators:
    """Gather, use and release a weight that is too large to be gathered whole tile by tile, and reduce its gradient
    tile by tile as it is born (memory-centric tiling: ZeRO-Infinity, Rajbhandari et al. 2021, section 5.1.3).

    A tile is the same range of every rank's rows. Gathered, they lie rank after rank; so what is computed with a tile
    is laid into the columns of the result that are those rows, rank by rank.

    Before::

        %w  = gathered [w]                                  f32[64,8]
        %wt = aten.t %w
        %y  = aten.mm %x, %wt                               f32[4,64]

    After (two ranks, two tiles)::

        %y  = aten.empty [4,64]                             as [4,2,32]: columns of each rank
        %w0 = gathered [w], tile 1 of 2                     f32[32,8]
        %y0 = aten.mm %x, %w0t                              f32[4,32]
              aten.copy_ %y[:,:,:16], %y0
              zero.release %w0
        %w1 = gathered [w], tile 2 of 2
        ...

    Where the rows of the weight are summed over (the gradient of the input) the tiles' products are added up, in
    float32 for half precision. Where tile loops stand among the other transfers follows the order of the graph, which
    is that of the model's operators: readers of large weights are never made again by choice.

    Refuses: nothing. What is left whole, with the reason in the report: weights and gradients whose operators it does
    not know.
    """

    tile_bytes: int | None = None
    bytes_only: bool = False
    some_tiles: bool = False
    name: str = "tile-operators"

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        if not any(plan.tile_rows for plan in ctx.params.values()):
            return
        how = TileContext(ctx.machine, self.tile_bytes, self.bytes_only, self.some_tiles)
        for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
            _separate_gradients(graph, node, ctx)
        for start in graph.find_nodes(op="call_function", target=ops.gather):
            plan = ctx.params[facts.params(start)[0]]
            if plan.tile_rows and facts.tile(start) is None:
                _tile_weight(graph, start, plan, how)
        for start in graph.find_nodes(op="call_function", target=ops.reduce):
            plan = ctx.params[facts.params(start)[0]]
            if plan.tile_rows and facts.tile(start) is None:
                _tile_gradient(graph, start, plan, how)


def _separate_gradients(graph: fx.Graph, node: fx.Node, ctx: Context) -> None:
    """Give every gradient of a convolution an operator of its own: that of the input alone reads the weight."""
    weight = readers.weight_behind(node.args[2])
    if weight is None or not readers.plain_convolution(node):
        return
    if not ctx.params[facts.params(weight.args[0].args[0])[0]].tile_rows:
        return
    for user in list(node.users):
        k, emit = user.args[1], Emitter(graph, node)
        with graph.inserting_before(user):
            if k == 2:
                dims = [d for d in range(len(facts.value(node.args[0]).shape)) if d != 1]
                new = emit(aten.sum.dim_IntList, node.args[0], dims)
            else:
                given = node.args[2] if k == 0 else readers.shape_of(emit, facts.value(node.args[2]))
                args = (*node.args[:2], given, None, *node.args[4:10])
                new = emit(operator.getitem, emit(node.target, *args, [i == k for i in range(3)]), k)
        user.replace_all_uses_with(new)
        graph.erase_node(user)
    graph.erase_node(node)


def _tile_weight(graph: fx.Graph, start: fx.Node, plan: ParamPlan, how: TileContext) -> None:
    (wait,) = start.users
    (weight,) = wait.users
    try:
        found = readers.of(weight)
    except Left as why:
        what = f"{plan.ref.name}, {plan.gather_bytes:,} bytes"
        facts.add_note(graph, f"gathered whole: {what}, because {why}")
        return
    sweeps: dict[fx.Node, list[Reader]] = {}
    for k, reader in enumerate(sorted(found, key=lambda r: r.node)):  # in the order of the graph
        if reader.node.target is ops.tiled:
            sweeps.setdefault(reader.node, []).append(reader)
            continue
        with graph.inserting_before(reader.node):
            new = _Loop(how, reader, start, plan, k).write()
        reader.node.replace_all_uses_with(new)
        graph.erase_node(reader.node)
        if reader.call is not reader.node:
            graph.erase_node(reader.call)
    _sweep(
        graph, [Sweep(how, r, start, plan, len(found) + k) for k, r in enumerate(sweeps.values())], plan, how
    )
    _erase(graph, weight)


def _sweep(graph: fx.Graph, sweeps: list[Sweep], plan: ParamPlan, how: TileContext) -> None:
    """Write what is done in tiles of tokens and of the weight; its gradient where it is reduced, if nothing else comes
    of that sweep, else where the sweep is."""
    if not sweeps:
        return
    reduction = next(
        (
            n
            for n in graph.find_nodes(op="call_function", target=ops.reduce)
            if facts.params(n) == (plan.ref,)
        ),
        None,
    )
    inside = [] if reduction is None else _made_in(reduction, sweeps)
    for sweep in sweeps:
        if sweep in inside:
            continue
        with graph.inserting_before(sweep.node):
            sweep.begin()
            for tile in how.written(plan):
                sweep.tile(tile)
            sweep.finish()
    if inside:
        assert reduction is not None
        at = next((s.node for s in inside if s.gives_more), reduction)
        _tile_gradient(graph, reduction, plan, how, at, inside)
    for sweep in sweeps:
        sweep.erase()


def _made_in(reduction: fx.Node, sweeps: Iterable[Sweep]) -> list[Sweep]:
    """The sweeps that make what is reduced, each tile of it where it is reduced."""
    try:
        form = gradient(reduction.args[0][0])
    except Left:
        return []
    makers = {n.args[0] for n in form.loops()}
    out = [s for s in sweeps if s.node in makers]
    for sweep in out:
        sweep.reduced = {n.args[1] for n in form.loops() if n.args[0] is sweep.node}
    single = not any(form.leaves()) and not any(form.specials()) and len(out) == 1
    # One that another loop adds to, which is not done in tiles of the weight, is made whole.
    if makers <= {s.node for s in out} and (single or not any(s.gives_more for s in out)):
        return out
    for sweep in out:
        sweep.reduced = set()
    return []


def _erase(graph: fx.Graph, weight: fx.Node) -> None:
    """Drop a weight that nobody reads any more, and the views of it."""
    wait = weight.args[0]
    start = wait.args[0]
    views = [weight]
    for node in views:
        views += node.users
    for node in (*reversed(views), wait, start):
        graph.erase_node(node)


class _Loop:
    """The tiles of one operator that reads a weight."""

    def __init__(self, how: TileContext, reader: Reader, start: fx.Node, plan: ParamPlan, k: int) -> None:
        self.how, self.reader, self.start, self.plan, self.k = how, reader, start, plan, k
        self.graph = graph = start.graph
        self.emit = Emitter(graph, reader.node)
        self.tiles = how.written(plan)

    def write(self) -> fx.Node:
        emit, reader, plan = self.emit, self.reader, self.plan
        self._cut()
        given = {n: parts(emit, n, dim, plan, self.tiles) for n, dim in reader.slices.items()}
        find = None if reader.picks is None else readers.looked_up(emit, reader.picks, plan, self.tiles)
        if find is not None:
            self._cut()
        result, places = self._result()
        for said in (facts.note(reader.node) or "").splitlines():
            facts.add_note(self.graph, said)
        facts.set_note(result, self._note(given))
        for tile in self.tiles:
            env = {reader.operand: self._weight(tile)}
            env |= {n: part(emit, p[tile.index], reader.slices[n], plan, tile) for n, p in given.items()}
            if reader.laid is None:
                self._add(result, env)
            elif find is not None:
                env[reader.picks], inside = find(tile)
                piece = reader.piece(emit, env)
                inside = emit(aten.unsqueeze.default, inside, -1)
                self._lay(result, emit(aten.where.self, inside, piece, result))
            else:
                size = list(facts.value(places[tile.index]).shape)
                self._lay(places[tile.index], reader.piece(emit, env), size)
        self._cut()
        return self._final(result)

    def _lay(self, place: fx.Node, piece: fx.Node, size: list[fx.node.Argument] | None = None) -> None:
        self._cut()
        self.emit(aten.copy_.default, place, piece if size is None else self.emit.reshaped(piece, size))
        self._cut()

    def _cut(self) -> None:
        self.graph.call_function(ops.cut, ())

    def _result(self) -> tuple[fx.Node, Mapping[int, fx.Node]]:
        val, laid, plan = facts.value(self.reader.node), self.reader.laid, self.plan
        sizes, emit = list(val.shape), self.emit
        if laid is None:
            dtype = torch.float32 if val.dtype in _HALF else val.dtype
            return emit(aten.full.default, sizes, 0, dtype=dtype, device=val.device), {}
        if self.reader.picks is not None:
            return emit(aten.full.default, sizes, 0, dtype=val.dtype, device=val.device), {}
        sizes[laid] = plan.world * plan.chunk_rows
        result = emit(aten.empty.memory_format, sizes, dtype=val.dtype, device=val.device)
        return result, parts(emit, result, laid, plan, self.tiles)

    def _final(self, result: fx.Node) -> fx.Node:
        val, reader, emit = facts.value(self.reader.node), self.reader, self.emit
        if reader.laid is not None and reader.picks is None and self.plan.shape[0] % self.plan.world:
            result = emit(aten.slice.Tensor, result, reader.laid, 0, self.plan.shape[0])
            result = emit(aten.clone.default, result, memory_format=torch.contiguous_format)
        if reader.bias is not None:
            result = emit(aten.add.Tensor, result, reader.bias)
        return emit.cast(result, val.dtype)

    def _add(self, total: fx.Node, env: dict[fx.Node, fx.Node]) -> None:
        emit, reader = self.emit, self.reader
        factors = reader.factors(env)
        if factors is not None and facts.value(total).dtype == facts.value(factors[0]).dtype:
            self._cut()
            emit(aten.addmm_.default, total, *factors)
            self._cut()
            return
        piece = reader.piece(emit, env)
        self._cut()
        emit(aten.add_.Tensor, total, piece)
        self._cut()

    def _weight(self, tile: Tile) -> fx.Node:
        """The gathered tile, through the views and casts that stand before the operator."""
        plan, emit = self.plan, self.emit
        out = gathered(emit, self.start, plan, tile, f"{self.k}.{tile.index}")
        for node, dim in self.reader.path:
            out = on_tile(emit, node, {node.all_input_nodes[0]: out}, dim, plan.world * tile.rows)
        return out

    def _note(self, given: Iterable[fx.Node]) -> str:
        """Beside the same operator on the whole weight: what is laid is copied, and every tile adds to a sum."""
        tiles, result = self.plan.tile_count, facts.bytes_of(facts.value(self.reader.node))
        again = 2 * result * (1 if self.reader.laid is not None else tiles - 1)
        again += 2 * sum(facts.bytes_of(facts.value(n)) for n in given) * (self.plan.world > 1)
        what = f"{dump.target_text(self.reader.call)} with {self.plan.ref.name}"
        return note(what, "all_gather", self.plan, self.how, again)


def _tile_gradient(
    graph: fx.Graph,
    start: fx.Node,
    plan: ParamPlan,
    how: TileContext,
    at: fx.Node | None = None,
    sweeps: Sequence[Sweep] = (),
) -> None:
    """Reduce a gradient in tiles, before ``at`` (or where it is reduced whole): each as it is born of ``sweeps``."""
    (wait,) = start.users
    (old,) = wait.users
    grad = start.args[0][0]
    try:
        form = gradient(grad)
        if not {n.args[0] for n in form.loops()} <= {s.node for s in sweeps}:
            raise Left("the loop that makes it is not done in tiles of the weight")
    except Left as why:
        what = f"the gradient of {plan.ref.name}, {plan.gather_bytes:,} bytes"
        facts.add_note(graph, f"made whole: {what}, because {why}")
        return
    emit = Emitter(graph, grad)
    born: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(at or start):
        graph.call_function(ops.cut, ())
        for sweep in sweeps:
            sweep.begin()
        tiles = how.written(plan)
        make = slicer(emit, form, plan, born, tiles)
        for tile in tiles:
            graph.call_function(ops.cut, ())
            for sweep in sweeps:
                born |= sweep.tile(tile)
            element = reduced(emit, make(tile), old, plan, tile)
        for sweep in sweeps:
            sweep.finish()
    again = 2 * sum(facts.bytes_of(facts.value(leaf.node)) for leaf in form.leaves()) * (plan.world > 1)
    facts.add_note(graph, note(f"gradient of {plan.ref.name}", "reduce_scatter", plan, how, again))
    # The old element becomes the new one: the output, with its thousands of gradients, is not copied for each of them.
    element.append(old)
    old.args, old.meta = element.args, element.meta
    for node in (element, wait, start):
        graph.erase_node(node)
    erase_unread(graph, grad)
