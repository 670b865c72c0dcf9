"""Forward or backward graph: what is done tile by tile becomes its tiles."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from zero_compiler.cost.cost import REREAD, reread_us
from zero_compiler.ir import facts, ops
from zero_compiler.ir.facts import ParamRef, TileOutput, Tiling

from ..base import Context
from ..emitter import Emitter

aten = torch.ops.aten
LEAST_ROWS = 16  # rows of a tile: with fewer, products are no faster than reading the weight
_HALF = (torch.float16, torch.bfloat16)

# What tiles are for, in the words of the report.
MEMORY, ACTIVATIONS = "the memory budget", "the activation budget"
SPEED = f"products that take {1 / REREAD:.0f} times as long as reading the weight again for each"
UNKNOWN = "want of a description of the machine"


def limit_text(tile_bytes: int) -> str:
    """That the user has said so."""
    return f"tile_bytes={tile_bytes:,}"


@dataclass(frozen=True)
class ExpandTiles:
    """Write out the tiles of every ``zero.tiled``.

    Between two ``zero.cut`` stands what one tile computes, then what adds it to the results, in place: so all tiles
    have equal segments, which are compiled once. Sums over tiles of half-precision values are kept in float32.

    Before::

        %t = zero.tiled [%x, %w]
        %y = getitem %t, 0

    After (two tiles, ``y`` a sum over them of products)::

        %x0, %x1 = aten.split %x, 8
        %y = aten.full [61,8], 0
             zero.cut
        ...
             zero.cut
             aten.addmm_ %y, %g0, %x0
             zero.cut
        ...

    Refuses: nothing.
    """

    bytes_only: bool = False
    name: str = "expand-tiles"

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        for node in list(graph.find_nodes(op="call_function", target=ops.tiled)):
            with graph.inserting_before(node):
                results = _expand(graph, node, facts.tiling(node), ctx, self.bytes_only)
            for user in list(node.users):
                user.replace_all_uses_with(results[user.args[1]])
                graph.erase_node(user)
            graph.erase_node(node)


# By the layout of what a tile is given: the value of each operator in it.
Known = dict[tuple[object, ...], dict[fx.Node, object]]


def tiles_in(graph: fx.Graph) -> list[int]:
    """In how many tiles each computation is done that is done in tiles."""
    return [facts.tiling(n).tiles for n in graph.find_nodes(op="call_function", target=ops.tiled)]


def set_tiles(graph: fx.Graph, tiles: Sequence[int]) -> None:
    """Inverse of :func:`tiles_in`."""
    nodes = graph.find_nodes(op="call_function", target=ops.tiled)
    for node, count in zip(nodes, tiles, strict=True):
        facts.set_tiling(node, replace(facts.tiling(node), tiles=count))


def coarsest(graphs: Iterable[fx.Graph]) -> None:
    """Undo :func:`finer`: every computation is done in as few tiles as were asked for."""
    for node in (n for g in graphs for n in g.find_nodes(op="call_function", target=ops.tiled)):
        tiling = facts.tiling(node)
        facts.set_tiling(node, replace(tiling, tiles=tiling.asked))


def finer(graphs: Iterable[fx.Graph]) -> bool:
    """Split every computation that is done in tiles into twice as many; False where none can be split further."""
    found = False
    for node in (n for g in graphs for n in g.find_nodes(op="call_function", target=ops.tiled)):
        tiling = facts.tiling(node)
        total = facts.hint(tiling.total)
        tiles = tiles_of(total, tiling.tile // 2)
        if tiling.tile > LEAST_ROWS and tiles > tiling.tiles:
            facts.set_tiling(node, replace(tiling, tiles=tiles))
            found = True
    return found


def read_by_tiles(graph: fx.Graph) -> set[ParamRef]:
    """Weights that are gathered whole because what is done in tiles reads them, of a graph with markers."""
    made = facts.made_of_weights(graph)
    out = set()
    for node in graph.find_nodes(op="call_function", target=ops.tiled):
        if facts.tiling(node).columns is not None:
            continue
        for mark in set().union(*(made[n] for n in node.all_input_nodes if n in made)):
            out.add(ParamRef(mark.args[3], mark.args[4]))
    return out


def tiles_of(total: int, rows: int) -> int:
    """Number of tiles of at most ``rows`` rows: equal ones where less than twice as many allow it."""
    total = max(1, total)  # of no rows there is one tile, as long
    least = max(1, -(-total // max(1, rows)))
    even = next((n for n in range(least, min(2 * least, total + 1)) if total % n == 0), None)
    if even is not None:
        return even
    return -(-total // -(-total // least))  # none of them empty


def tiles_that_hold(total: object, rows: int, tile_bytes: int | None) -> int:
    """Number of tiles of at most ``rows`` rows; with ``tile_bytes``, which is a promise, at all sizes of one graph.

    The number of tiles is a graph's own. Where sizes may change it is a power of two, and the graph is for as many rows
    as these tiles hold: Dynamo compiles another one for more, so once each time that they double.
    """
    tiles = tiles_of(facts.hint(total), rows)
    if tile_bytes is None or not isinstance(total, torch.SymInt):
        return tiles
    more = 1 << (tiles - 1).bit_length()
    length = max(1, facts.hint(total))
    if -(-length // -(-length // more)) == more:  # none of them empty
        tiles = more
    bool(total <= tiles * rows)  # a guard
    return tiles


def _note(tiling: Tiling, ctx: Context) -> str:
    """For the report: what, why, bytes saved, time paid."""
    total = facts.hint(tiling.total)
    saved = (total - tiling.tile) * tiling.row_bytes
    again = (tiling.tiles - 1) * tiling.reread_bytes
    time = "" if ctx.machine is None else f", {reread_us(ctx.machine, again):,.0f} us"
    why = tiling.why if tiling.tiles <= tiling.asked else MEMORY
    return (
        f"tiled: {tiling.what}: {tiling.tiles} tiles of {tiling.tile} rows, {tiling.tile * tiling.row_bytes:,} bytes "
        f"at a time, for {why}; saves {saved:,} bytes; costs {again:,} bytes of memory traffic{time}"
    )


def written(tiling: Tiling, bytes_only: bool) -> Sequence[int]:
    """The tiles of tokens that are written out: where only bytes are asked, the first two and the last. Those between
    hold what the second one does, and there may be many more of them than there are operators in the model."""
    every = range(tiling.tiles)
    return every if not bytes_only or tiling.tiles <= 3 else (*every[:2], every[-1])


def _expand(graph: fx.Graph, node: fx.Node, tiling: Tiling, ctx: Context, bytes_only: bool) -> list[fx.Node]:
    given: Sequence[fx.Node] = node.args[0]
    wholes: Sequence[torch.Tensor] = facts.value(node)
    tiles, note = written(tiling, bytes_only), _note(tiling, ctx)
    emit = Emitter(graph, node)
    if tiling.tiles > 1:
        graph.call_function(ops.cut, ())
    parts = [token_tiles(emit, n, dim, tiling, tiles) for n, dim in zip(given, tiling.inputs, strict=True)]
    if tiling.tiles == 1:
        outs = one_tile(emit, tiling, [p[0] for p in parts])
        facts.set_note(outs[0], note)
        done = []
        for kind in tiling.outputs:
            done.append(emit(aten.mm.default, outs.pop(0), outs.pop(0)) if kind.product else outs.pop(0))
        return done
    results = [_result(emit, kind, val) for kind, val in zip(tiling.outputs, wholes, strict=True)]
    facts.set_note(results[0], note)
    places = [
        token_tiles(emit, r, kind.rows, tiling, tiles)
        for r, kind in zip(results, tiling.outputs, strict=True)
    ]
    known: Known = {}
    for t in range(len(tiles)):
        graph.call_function(ops.cut, ())
        outs = one_tile(emit, tiling, [p[t] for p in parts], known)
        graph.call_function(ops.cut, ())
        for kind, place in zip(tiling.outputs, places, strict=True):
            _add(emit, kind, place[t], outs)
    graph.call_function(ops.cut, ())
    return [emit.cast(r, val.dtype) for r, val in zip(results, wholes, strict=True)]


def token_tiles(
    emit: Emitter, node: fx.Node, dim: int | None, tiling: Tiling, tiles: Sequence[int]
) -> list[fx.Node]:
    """Those ``tiles`` of a value; the whole of it for each where no dimension is split."""
    if dim is None or tiling.tiles == 1:
        return [node] * len(tiles)
    split = emit(aten.split.Tensor, node, -(-facts.value(node).shape[dim] // tiling.tiles), dim)
    return [emit(operator.getitem, split, t) for t in tiles]


def _result(emit: Emitter, kind: TileOutput, val: torch.Tensor) -> fx.Node:
    if kind.rows is not None:
        return emit(aten.empty.memory_format, list(val.shape), dtype=val.dtype, device=val.device)
    dtype = torch.float32 if val.dtype in _HALF else val.dtype
    return emit(aten.full.default, list(val.shape), 0, dtype=dtype, device=val.device)


def one_tile(
    emit: Emitter, tiling: Tiling, given: Sequence[fx.Node], known: Known | None = None
) -> list[fx.Node]:
    """What one tile computes, written out: its outputs one after the other.

    Args:
        known: values of tiles that were written out before, which one with inputs of the same layout has too, but for
            views of these, whose offsets are others: to run every operator of many tiles on fake tensors takes
            longer than all else. Grows.
    """
    rows, *names = list(tiling.graph.find_nodes(op="placeholder"))
    env: dict[fx.Node, object] = {}
    if tiling.columns is not None:
        env[names.pop(0)] = tiling.columns.size
    env |= zip(names, given, strict=True)
    first, dim = next((g, d) for g, d in zip(given, tiling.inputs, strict=True) if d is not None)
    env[rows] = facts.value(first).shape[dim]
    vals = [facts.value(n) for n in given]
    fixed = known is not None and not any(facts.symbols_of(v) for v in vals)
    alike = (
        known.setdefault(tuple((v.shape, v.stride()) for v in vals), {})
        if known is not None and fixed
        else {}
    )
    # The first tile of a layout is noted for those after it.
    roots = facts.alias_roots(tiling.graph) if fixed and not alike else {}
    outs: list[fx.Node] = []
    for inner in tiling.graph.nodes:
        if inner.op == "output":
            outs = [env[n] for n in inner.args[0]]
        elif inner.op == "call_function":
            args, kwargs = facts.mapped(
                lambda a: env[a] if isinstance(a, fx.Node) else a, (inner.args, inner.kwargs)
            )
            if inner in alike:
                env[inner] = emit.node(inner.target, args, kwargs, alike[inner])
            else:
                env[inner] = emit(inner.target, *args, **kwargs)
                if roots and all(root.op == "call_function" for root in roots[inner]):
                    alike[inner] = facts.value(env[inner])
    return outs


def _add(emit: Emitter, kind: TileOutput, place: fx.Node, outs: list[fx.Node]) -> None:
    """Take what this output needs off ``outs`` and lay it in its place, or add it there."""
    if kind.product:
        left, right = outs.pop(0), outs.pop(0)
        if kind.rows is None and facts.value(place).dtype == facts.value(left).dtype:
            emit(aten.addmm_.default, place, left, right)
            return
        out = emit(aten.mm.default, left, right)
    else:
        out = outs.pop(0)
    emit(aten.copy_.default if kind.rows is not None else aten.add_.Tensor, place, out)
