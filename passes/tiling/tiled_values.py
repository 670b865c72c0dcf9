"""Tiles of values: rows of a weight that lie along a dimension of an activation or of a gradient.

A value that exists is split (:func:`parts`); a gradient is not made whole where its operators can make a tile of it
(:func:`gradient`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from zero_compiler.ir import dump, facts, ops
from zero_compiler.ir.facts import Tile

from ..base import ParamPlan
from ..emitter import Emitter
from . import readers, row_propagation
from .row_propagation import Left, Rows

aten = torch.ops.aten

_FREE = row_propagation._VIEWS | row_propagation._PERMUTES | {aten.unsqueeze.default, aten.squeeze.dim}
_PUTS = {aten.index_put.default, aten._unsafe_index_put.default}
# As Inductor takes it apart: rows that are masked out add nothing, wherever their index points.
_MASKED_PUT = aten._unsafe_masked_index_put_accumulate.default
_ABOVE = _FREE | row_propagation._SAME | readers._CASTS


def parts(
    emit: Emitter, node: fx.Node, dim: int, plan: ParamPlan, tiles: Sequence[Tile]
) -> dict[int, fx.Node]:
    """Views of ``node``, one for each of the ``tiles`` that are written out, by the number of the tile: the weight's
    rows along ``dim`` as two dimensions, ranks and rows of the tile.

    Padded with zeros where ranks do not divide the rows.
    """
    size, of_weights = list(facts.value(node).shape), _of_weights(node)
    missing = plan.world * plan.chunk_rows - plan.shape[0]
    if missing and size[dim] == plan.shape[0]:
        node = emit(aten.constant_pad_nd.default, node, [*[0, 0] * (len(size) - 1 - dim), 0, missing], 0)
    node = emit(aten.view.default, node, [*size[:dim], plan.world, plan.chunk_rows, *size[dim + 1 :]])
    split = emit(aten.split.Tensor, node, plan.tile_rows, dim + 1)
    out = {tile.index: emit(operator.getitem, split, tile.index) for tile in tiles}
    if not of_weights:
        return out
    # A segment makes views of weights by itself, each at another place: then no two segments are equal.
    copies = {k: emit(aten.clone.default, p, memory_format=torch.contiguous_format) for k, p in out.items()}
    return {k: facts.set_stays(copy) for k, copy in copies.items()}


def part(emit: Emitter, given: fx.Node, dim: int, plan: ParamPlan, tile: Tile) -> fx.Node:
    """A tile with its rows in one dimension, rank after rank, as those of a gathered tile are."""
    size = list(facts.value(given).shape)
    return emit.reshaped(given, [*size[:dim], plan.world * tile.rows, *size[dim + 2 :]])


def _of_weights(node: fx.Node) -> bool:
    while not facts.is_weight(node):
        aliased = facts.aliased_inputs(node)
        if len(aliased) != 1:
            return False
        node = aliased[0]
    return True


@dataclass(eq=False)
class Sliced:
    """How a tile of ``node`` along ``dim`` is made: of tiles of its operands, of which ``given`` has those that differ;
    without any it is a part of ``node``, which exists."""

    node: fx.Node
    dim: int
    given: list[tuple[fx.Node, Sliced]] = field(default_factory=list)
    special: bool = False  # an operator that has a tile of its own kind
    born: bool = False  # what a loop over tiles of the weight makes a tile of at a time

    def leaves(self) -> Iterator[Sliced]:
        if not self.given and not self.special and not self.born:
            yield self
        for _, f in self.given:
            yield from f.leaves()

    def loops(self) -> Iterator[fx.Node]:
        """Results of loops that go into it."""
        if self.born:
            yield self.node
        for _, f in self.given:
            yield from f.loops()

    def specials(self) -> Iterator[Sliced]:
        if self.special:
            yield self
        for _, f in self.given:
            yield from f.specials()

    def prepare(
        self, emit: Emitter, plan: ParamPlan, tiles: Sequence[Tile]
    ) -> Callable[[Tile, Mapping[fx.Node, fx.Node]], fx.Node]:
        return _SPECIAL[self.node.target](self.node, emit, plan, tiles)


def gradient(grad: fx.Node) -> Sliced:
    """How tiles of a gradient are made, none of them of the whole.

    Raises:
        Left: its last operator is not known.
    """
    form = _above(grad, 0)
    for leaf in form.leaves():
        if (
            row_propagation.shape(leaf.node) == row_propagation.shape(grad)
            and leaf.node.op == "call_function"
        ):
            raise Left(f"{dump.target_text(leaf.node)} makes it")
    return form


def _above(node: fx.Node, dim: int) -> Sliced:
    """Down to the products that make a gradient: sums, casts and views of what nobody else reads."""
    if len(node.users) > 1 or node.op != "call_function":
        return Sliced(node, dim)
    t = node.target
    if t in (aten.mm.default, aten.bmm.default):
        return Sliced(node, dim, [(n, _below(n, d)) for n, d in _factors(node, dim)])
    if dim == 0 and (t is aten.embedding_dense_backward.default or _adds_rows(node)):
        return Sliced(node, dim, special=True)
    if t is operator.getitem and node.args[0].target is ops.tiled:
        columns = facts.tiling(node.args[0]).columns
        return Sliced(node, dim, born=columns is not None and columns.outputs[node.args[1]] == dim)
    if t is operator.getitem and node.args[1] == 1 and dim == 0:
        call = node.args[0]
        if call.target is aten.convolution_backward.default and readers.plain_convolution(call):
            return Sliced(node, dim, special=True)
    if t in _ABOVE and _one_each(node, dim):
        return Sliced(node, dim, [(n, _above(n, r.at)) for n, r in _rows(node, dim) if r is not None])
    if t is aten.add.Tensor and all(
        isinstance(a, fx.Node) and row_propagation.shape(a) == row_propagation.shape(node) for a in node.args
    ):
        return Sliced(node, dim, [(n, _above(n, dim)) for n in node.all_input_nodes])
    return Sliced(node, dim)


def _adds_rows(node: fx.Node) -> bool:
    """The gradient of an embedding as compilers write it: rows are added to zeros at indices."""
    if node.target in _PUTS:
        base, picks, *_, accumulate = (*node.args, False) if len(node.args) < 4 else node.args
    elif node.target is _MASKED_PUT:
        base, _, picks, _ = node.args
        accumulate = True
    else:
        return False
    return (
        accumulate is True
        and len(picks) == 1
        and isinstance(picks[0], fx.Node)
        and row_propagation.is_zero(base)
    )


def _below(node: fx.Node, dim: int) -> Sliced:
    """Views of an activation, down to what exists."""
    if node.op == "call_function" and node.target in _FREE:
        try:
            (found,) = _rows(node, dim)
        except Left:
            return Sliced(node, dim)
        if found[1] is not None and found[1].count == 1:
            return Sliced(node, dim, [(found[0], _below(found[0], found[1].at))])
    return Sliced(node, dim)


def _rows(node: fx.Node, dim: int) -> list[tuple[fx.Node, Rows | None]]:
    return list(row_propagation.operands(node, Rows(dim, 1)).items())


def _one_each(node: fx.Node, dim: int) -> bool:
    """Whether a part of the dimension is as long in every operand that has it. It is not where a view merges it with a
    dimension of one that a sum has left, as for a gradient that was broadcast in forward."""
    return all(rows is None or rows.count == 1 for _, rows in _rows(node, dim))


def _factors(node: fx.Node, dim: int) -> list[tuple[fx.Node, int]]:
    a, b = node.args
    if node.target is aten.mm.default:
        return [(a, 0)] if dim == 0 else [(b, 1)]
    return [(a, 0), (b, 0)] if dim == 0 else [(a, 1)] if dim == 1 else [(b, 2)]


def _of_embedding(node: fx.Node, emit: Emitter, plan: ParamPlan, tiles: Sequence[Tile]) -> fx.node.Argument:
    """What is not of the tile is added to a row behind the others, which nobody keeps."""
    val = facts.value(node)
    lists = next((a for a in node.args if isinstance(a, (list, tuple))), None)  # of what adds rows to zeros
    picks = node.args[1] if lists is None else lists[0]
    if lists is not None:  # which may count from the end
        rows = emit(aten.add.Tensor, picks, plan.shape[0])
        picks = emit(aten.where.self, emit(aten.lt.Scalar, picks, 0), rows, picks)
    find = readers.looked_up(emit, picks, plan, tiles)
    found = {}
    for tile in tiles:
        place, inside = find(tile)
        if lists is None:
            inside = emit(aten.logical_and.default, inside, emit(aten.ne.Scalar, picks, node.args[3]))
        found[tile] = readers.either(emit, inside, place, plan.world * tile.rows)

    def make(tile: Tile, env: Mapping[fx.Node, fx.Node]) -> fx.Node:
        rows, place = plan.world * tile.rows, found[tile]
        if lists is not None:
            zeros = emit(aten.full.default, [rows + 1, *val.shape[1:]], 0, dtype=val.dtype, device=val.device)
            args = [[place] if a is lists else a for a in node.args[1:]]
            out = emit(node.target, zeros, *args)
        else:
            out = emit(node.target, node.args[0], place, rows + 1, rows, node.args[4])
        return emit(aten.slice.Tensor, out, 0, 0, rows)

    return make


def _of_convolution(node: fx.Node, emit: Emitter, plan: ParamPlan, tiles: Sequence[Tile]) -> fx.node.Argument:
    call = node.args[0]
    grad, given, weight = call.args[:3]
    pieces = parts(emit, grad, 1, plan, tiles)
    val = facts.value(weight)

    def make(tile: Tile, env: Mapping[fx.Node, fx.Node]) -> fx.Node:
        shape = readers.shape_of(emit, val, plan.world * tile.rows)
        piece = part(emit, pieces[tile.index], 1, plan, tile)
        out = emit(call.target, piece, given, shape, None, *call.args[4:10], [False, True, False])
        return emit(operator.getitem, out, 1)

    return make


_SPECIAL: dict[fx.node.Target, Callable[[fx.Node, Emitter, ParamPlan, Sequence[Tile]], fx.node.Argument]] = {
    aten.embedding_dense_backward.default: _of_embedding,
    **dict.fromkeys((*_PUTS, _MASKED_PUT), _of_embedding),
    operator.getitem: _of_convolution,
}
