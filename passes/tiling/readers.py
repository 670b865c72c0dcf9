"""What reads a weight, and where the weight's rows go in it: the analysis behind :class:`TileOperators`.

Not a rewrite. Rows of a weight pass through views and casts of it; then an operator lays them along a dimension of its
result, sums over them, or looks some of them up.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from zero_compiler.ir import dump, facts, ops
from zero_compiler.ir.facts import Tile

from ..base import ParamPlan
from ..emitter import Emitter
from . import row_propagation
from .row_propagation import Left, Rows

aten = torch.ops.aten

# Operators that name the sizes of their result.
SIZED = row_propagation._VIEWS | {aten.expand.default}
_CASTS = {torch.ops.prims.convert_element_type.default}
_PASSES = (
    SIZED
    | row_propagation._PERMUTES
    | row_propagation._SAME
    | _CASTS
    | {aten.unsqueeze.default, aten.squeeze.dim}
)
_TWO = (True, False, False)


@dataclass(frozen=True)
class Reader:
    """An operator that reads a weight.

    Args:
        node: its result.
        call: the operator; another node than ``node`` where it has several results.
        operand: the view of the weight that it reads; of a ``zero.tiled``, which may read several, one.
        path: views and casts from the weight to there, each with the dimension that its rows lie along.
        laid: dimension of the result along which the rows lie; None where they are summed over.
        slices: its other operands that are split as the weight is, with the dimension.
        bias: what is added to the sum once.
        picks: the indices by which it looks rows up.
    """

    node: fx.Node
    call: fx.Node
    operand: fx.Node
    path: tuple[tuple[fx.Node, int], ...]
    laid: int | None
    slices: Mapping[fx.Node, int] = field(default_factory=dict)
    bias: fx.Node | None = None
    picks: fx.Node | None = None

    def piece(self, emit: Emitter, env: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """The operator on a tile of the weight and of what is split with it."""
        if self.bias is not None:
            return emit(aten.mm.default, *self._factors(env))
        out = emit.like(self.call, env)
        return out if self.call is self.node else emit(operator.getitem, out, self.node.args[1])

    def factors(self, env: Mapping[fx.Node, fx.Node]) -> tuple[fx.Node, fx.Node] | None:
        """The two matrices whose product is added to the sum; None where it is no product of two."""
        return (
            self._factors(env)
            if self.laid is None and self.call.target in row_propagation._PRODUCTS
            else None
        )

    def _factors(self, env: Mapping[fx.Node, fx.Node]) -> tuple[fx.Node, fx.Node]:
        a, b = self.call.args[-2:]
        return env.get(a, a), env.get(b, b)


def of(weight: fx.Node) -> list[Reader]:
    """All readers of a weight whose rows are its dimension 0.

    Raises:
        Left: one of them needs the weight whole, or nothing is known of it.
    """
    out: list[Reader] = []
    todo: list[tuple[fx.Node, int, tuple[tuple[fx.Node, int], ...]]] = [(weight, 0, ())]
    while todo:
        node, dim, path = todo.pop()
        for user in node.users:
            if user.target in _PASSES:
                rows = row_propagation.result(user, node, Rows(dim, 1))
                if not isinstance(rows, Rows) or rows.count != 1:
                    raise Left(f"{dump.target_text(user)} mixes its rows")
                todo.append((user, rows.at, (*path, (user, rows.at))))
            else:
                out.append(_reader(user, node, dim, path))
    once = [r for r in out if r.node.target is not ops.tiled]
    if len({r.node for r in once}) < len(once):
        raise Left(f"{dump.target_text(once[0].call)} reads it twice")
    for r in once:
        if r.picks is None and not _contiguous(facts.value(r.node)):
            raise Left(f"the result of {dump.target_text(r.call)} is not contiguous")
    return out


def _reader(node: fx.Node, operand: fx.Node, dim: int, path: tuple[tuple[fx.Node, int], ...]) -> Reader:
    if node.op == "output":
        raise Left("it is returned")
    t = node.target
    if t is ops.tiled:
        return _tiled(node, operand, dim, path)
    if t in row_propagation._PRODUCTS:
        return _product(node, operand, dim, path)
    if t is aten.bmm.default:
        return _batched(node, operand, dim, path)
    if t is aten.convolution.default and node.args[1] is operand and dim == 0 and plain_convolution(node):
        bias = node.args[2]
        return Reader(node, node, operand, path, 1, {} if bias is None else {bias: 0})
    if t is aten.convolution_backward.default and node.args[2] is operand and dim == 0:
        if plain_convolution(node) and tuple(node.args[10]) == _TWO:
            (result,) = node.users
            return Reader(result, node, operand, path, None, {node.args[0]: 1})
    if t is aten.embedding.default and node.args[0] is operand and dim == 0:
        return Reader(node, node, operand, path, 0, picks=node.args[1])
    raise Left(f"{dump.target_text(node)} reads it")


def _tiled(node: fx.Node, operand: fx.Node, dim: int, path: tuple[tuple[fx.Node, int], ...]) -> Reader:
    tiling = facts.tiling(node)
    if tiling.columns is None:
        raise Left(tiling.whole or f"{tiling.what}, in tiles of tokens, need it")
    read = {c for n, c in zip(node.args[0], tiling.columns.inputs, strict=True) if n is operand}
    if read != {dim}:
        raise Left(f"{tiling.what} run over another dimension of it")
    return Reader(node, node, operand, path, None)


def _product(node: fx.Node, operand: fx.Node, dim: int, path: tuple[tuple[fx.Node, int], ...]) -> Reader:
    a, b = node.args[-2:]
    bias = node.args[0] if node.target is aten.addmm.default else None
    if operand is bias or a is b or node.kwargs:
        raise Left(f"{dump.target_text(node)} reads it in a way that is not known")
    laid = dim if dim == (0 if operand is a else 1) else None
    if laid is None:
        other = {b: 0} if operand is a else {a: 1}
        return Reader(node, node, operand, path, None, other, bias)
    slices: dict[fx.Node, int] = {}
    if bias is not None:
        at = laid - 2 + len(row_propagation.shape(bias))
        if at >= 0 and row_propagation.shape(bias)[at] != 1:
            slices[bias] = at
    return Reader(node, node, operand, path, laid, slices)


def _batched(node: fx.Node, operand: fx.Node, dim: int, path: tuple[tuple[fx.Node, int], ...]) -> Reader:
    a, b = node.args
    if a is b:
        raise Left("aten.bmm reads it twice")
    other = b if operand is a else a
    if dim == 0:
        return Reader(node, node, operand, path, 0, {other: 0})
    if dim == (1 if operand is a else 2):
        return Reader(node, node, operand, path, dim)
    return Reader(node, node, operand, path, None, {other: 1 if operand is a else 2})


def plain_convolution(node: fx.Node) -> bool:
    """A convolution, or its gradient, of one group that is not transposed: its weight's rows are output channels."""
    first = 6 if node.target is aten.convolution.default else 7
    transposed, groups = node.args[first], node.args[first + 2]
    return not transposed and groups == 1


def weight_behind(node: fx.Node) -> fx.Node | None:
    """The gathered weight that ``node`` is a view or a cast of."""
    while not facts.is_weight(node):
        if node.op != "call_function" or node.target not in _PASSES:
            return None
        node = node.all_input_nodes[0]
    return node


def shape_of(emit: Emitter, val: torch.Tensor, rows: int | None = None) -> fx.Node:
    """A weight for the gradient of a convolution with respect to it, of which only the shape counts."""
    sizes = [val.shape[0] if rows is None else rows, *val.shape[1:]]
    return emit(aten.empty.memory_format, sizes, dtype=val.dtype, device=val.device)


def _contiguous(val: torch.Tensor) -> bool:
    want = 1
    for size, stride in zip(reversed(val.shape), reversed(val.stride()), strict=True):
        if facts.hint(size) != 1 and facts.hint(stride) != want:
            return False
        want *= facts.hint(size)
    return True


def looked_up(
    emit: Emitter, picks: fx.Node, plan: ParamPlan, tiles: Sequence[Tile]
) -> Callable[[Tile], tuple[fx.Node, fx.Node]]:
    """For each of ``tiles``, the row of the tile that an index names, and whether it names one (else row 0).

    An index that is none of the weight's names a row behind the first tile's, or before its first: an error, as of the
    whole weight.
    """
    if plan.shape[0] < plan.world * plan.chunk_rows:  # else it may name a row of the padding
        real = emit(aten.lt.Scalar, picks, plan.shape[0])
        picks = either(emit, real, picks, plan.world * plan.chunk_rows)
    rank = emit(aten.div.Tensor_mode, picks, plan.chunk_rows, rounding_mode="floor")
    row = emit(aten.remainder.Scalar, picks, plan.chunk_rows)
    found = {}
    for tile in tiles:
        above = emit(aten.ge.Scalar, row, tile.begin)
        inside = emit(aten.logical_and.default, above, emit(aten.lt.Scalar, row, tile.begin + tile.rows))
        place = emit(aten.add.Tensor, emit(aten.mul.Tensor, rank, tile.rows), row)
        place = emit(aten.sub.Tensor, place, tile.begin)
        found[tile] = either(emit, inside, place, 0), inside
    return found.__getitem__


def either(emit: Emitter, inside: fx.Node, place: fx.Node, other: int) -> fx.Node:
    """``place`` where ``inside``, else ``other``: in operators that stand in graphs that were decomposed."""
    val = facts.value(place)
    return emit(
        aten.where.self, inside, place, emit(aten.full.default, [], other, dtype=val.dtype, device=val.device)
    )
