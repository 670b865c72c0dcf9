"""Inserts the nodes of one tile of a weight: its gather, the operator on it, the reduction of its gradient."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import fx

from zero_compiler.cost.cost import reread_us
from zero_compiler.cost.hardware import HardwareSpec
from zero_compiler.ir import facts, ops
from zero_compiler.ir.facts import ParamRef, Tile

from ..base import ParamPlan
from ..emitter import Emitter
from . import readers
from .expand_tiles import MEMORY, limit_text
from .tiled_values import Sliced, part, parts

MOST_ALIKE = 3  # tiles of a weight of which all are written out in any case


class TileContext(NamedTuple):
    """What whoever writes tiles of a weight knows beside its plan: the machine, most bytes of a tile if the user says
    so, whether bytes alone are asked, and whether of a weight's tiles that are alike not all are written out."""

    machine: HardwareSpec | None
    tile_bytes: int | None
    bytes_only: bool
    some_tiles: bool = False

    def written(self, plan: ParamPlan) -> list[Tile]:
        """The tiles of a weight that are written out: all, or the first two and the last. Those between hold what the
        second one does, while the one behind it is on its way."""
        if not self.some_tiles or plan.tile_count <= MOST_ALIKE:
            return plan.tiles
        return [plan.tile(index) for index in (0, 1, plan.tile_count - 1)]


def gathered(emit: Emitter, old: fx.Node, plan: ParamPlan, tile: Tile, name: str) -> fx.Node:
    """A tile of the weight that ``old`` gathers whole."""
    shape = (plan.world * tile.rows, *plan.shape[1:])
    sizes, dims = ops.flat_sizes([shape])
    val = facts.fake_empty(emit.graph, shape, plan.gather_dtype, old.args[4])
    start = emit.node(ops.gather, ([plan.ref.name], sizes, dims, plan.gather_dtype, old.args[4]), {}, [val])
    return waited(emit, start, plan.ref, tile, name, [val])


def reduced(emit: Emitter, value: fx.Node, old: fx.Node, plan: ParamPlan, tile: Tile) -> fx.Node:
    """Reduce a tile of the gradient that ``old`` is this rank's part of; the last one gives all of that."""
    dtype, val = old.args[0].args[0].args[3], facts.value(old)
    sizes, dims = ops.flat_sizes([val.shape])
    start = emit.node(ops.reduce, ([value], sizes, dims, dtype, False), {}, [val])
    element = waited(emit, start, plan.ref, tile, f"gradient {tile.index}", [val])
    if not tile.last:
        emit.graph.erase_node(element)
    return element


def waited(
    emit: Emitter, start: fx.Node, ref: ParamRef, tile: Tile, name: str, vals: list[object]
) -> fx.Node:
    """The wait of a tile's transfer, and its element. Every tile is a unit of its own, so that the next one starts
    while this one is used."""
    unit = f"{ref.owner}:{ref.name}[{name}]"
    facts.set_params(start, [ref])
    facts.set_tile(start, tile)
    facts.set_unit(start, unit)
    wait = emit.node(ops.wait, (start,), {}, vals)
    facts.set_unit(wait, unit)
    return emit.node(operator.getitem, (wait, 0), {}, vals[0])


def on_tile(emit: Emitter, node: fx.Node, env: Mapping[fx.Node, fx.Node], dim: int, rows: int) -> fx.Node:
    """``node`` on operands of which some are tiles; the rows of its result lie along ``dim``."""
    if node.target in readers.SIZED:
        sizes = list(facts.value(node).shape)
        sizes[dim] = rows
        return emit(node.target, env.get(node.args[0], node.args[0]), sizes)
    return emit.like(node, env)


def note(what: str, kind: str, plan: ParamPlan, how: TileContext, again: int) -> str:
    """For the report: what, why, bytes saved, time paid.

    Args:
        kind: of the transfers, one a tile in place of one for the whole.
        again: bytes that are read or written once more.
    """
    tile = plan.tile(0)
    row = plan.world * (plan.numel // plan.shape[0]) * plan.gather_dtype.itemsize
    why = MEMORY if how.tile_bytes is None else limit_text(how.tile_bytes)
    more, time = f"{tile.of - 1} more transfer{'s' if tile.of != 2 else ''}", ""
    if how.machine is not None:
        latency = how.machine.collective(kind, plan.world, plan.shared).latency_us
        time = f", {reread_us(how.machine, again) + (tile.of - 1) * latency:,.0f} us"
    return (
        f"tiled: {what}: {tile.of} tiles of {tile.rows} rows a rank, {row * tile.rows:,} bytes at a time, for {why}; "
        f"saves {row * (plan.chunk_rows - tile.rows):,} bytes; costs {more} and "
        f"{again:,} bytes of memory traffic{time}"
    )


def slicer(
    emit: Emitter, form: Sliced, plan: ParamPlan, born: Mapping[fx.Node, fx.Node], tiles: Sequence[Tile]
) -> Callable[[Tile], fx.Node]:
    """Writes what all ``tiles`` share, and gives what writes one tile of a gradient.

    Args:
        born: of what a loop makes a tile of at a time, the present one.
    """
    leaves = {leaf: parts(emit, leaf.node, leaf.dim, plan, tiles) for leaf in form.leaves()}
    prepared = {f: f.prepare(emit, plan, tiles) for f in form.specials()}

    def make(tile: Tile) -> fx.Node:
        done: dict[Sliced, fx.Node] = {}

        def build(f: Sliced) -> fx.Node:
            if f not in done:
                if f.node in born:
                    done[f] = born[f.node]
                elif f in leaves:
                    done[f] = part(emit, leaves[f][tile.index], f.dim, plan, tile)
                elif f in prepared:
                    done[f] = prepared[f](tile, {n: build(g) for n, g in f.given})
                else:
                    env = {n: build(g) for n, g in f.given}
                    done[f] = on_tile(emit, f.node, env, f.dim, plan.world * tile.rows)
            return done[f]

        return build(form)

    return make


def erase_unread(graph: fx.Graph, node: fx.Node) -> None:
    """Drop what nobody reads, and what only that has read."""
    todo = [node]
    while todo:
        n = todo.pop()
        if n.users or n.op != "call_function" or n.target is ops.tiled:
            continue
        if not facts.is_compute(n) or not facts.is_pure(n):
            continue
        given = n.all_input_nodes
        graph.erase_node(n)
        todo += given
