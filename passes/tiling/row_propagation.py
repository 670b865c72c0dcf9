"""How rows pass through operators: the analysis behind tiling.

A value has *rows* where some adjacent dimensions of it run over tokens, each entry computed from the same token's
entry of its operands. A tile of such a value holds some of the rows, as one dimension.

Not a rewrite: what an operator does to rows (:func:`result`), what it asks of its operands (:func:`operands`), and
the operator on a tile (:func:`on_tile`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.utils._pytree import tree_map
from torch.utils._sympy.functions import FloorDiv

from zero_compiler.ir import facts

aten = torch.ops.aten


class Left(Exception):
    """Why something is left whole; one clause for the report."""


@dataclass(frozen=True)
class Rows:
    """Dimensions ``at`` to ``at + count - 1`` of a value run over rows.

    ``picked`` is the slice (dimension counted from ``at``, start, end) that chose these rows among all of them;
    ``padded`` says that the value has all rows, and zeros outside of the picked ones.
    """

    at: int
    count: int
    picked: tuple[object, ...] | None = None
    padded: bool = False

    @property
    def end(self) -> int:
        return self.at + self.count

    def moved(self, at: int, count: int | None = None) -> Rows:
        return Rows(at, self.count if count is None else count, self.picked, self.padded)


@dataclass(frozen=True)
class Summed:
    """The operator adds over all rows: what it makes is the sum over tiles of what it makes of each."""

    rows: Rows  # of the operands


_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_SAME = {
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten._to_copy.default,
    aten.full_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.contiguous.default,
    aten.lift_fresh_copy.default,
}
# dims, keepdim: positions among the arguments.
_REDUCTIONS = {
    aten.sum.dim_IntList: (1, 2),
    aten.amax.default: (1, 2),
    aten.amin.default: (1, 2),
    aten.logsumexp.default: (1, 2),
    aten.mean.dim: (1, 2),
    aten.argmax.default: (1, 2),
}
# Along one dimension, position of which is given; all tensor operands have the same sizes beside it.
_ALONG = {
    aten._log_softmax.default: 1,
    aten._softmax.default: 1,
    aten._log_softmax_backward_data.default: 2,
    aten._softmax_backward_data.default: 2,
    aten.gather.default: 1,
    aten.scatter.value: 1,
    aten.scatter.src: 1,
    aten.scatter_add.default: 1,
}
_PERMUTES = {aten.t.default, aten.permute.default, aten.transpose.int}
_ABSORBABLE = {
    aten.expand.default,
    aten.full.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    *_VIEWS,
    *_PERMUTES,
    *_SAME,
    *_REDUCTIONS,
    *_ALONG,
}
_PRODUCTS = {aten.mm.default, aten.addmm.default}


def is_product(node: fx.Node) -> bool:
    return node.target in _PRODUCTS


def is_pointwise(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def arg(node: fx.Node, i: int, default: fx.node.Argument = None) -> fx.node.Argument:
    return node.args[i] if i < len(node.args) else default


def shape(node: fx.Node) -> list[Any]:
    val = facts.value(node)
    return list(val.shape) if isinstance(val, torch.Tensor) else []


def same(a: object, b: object) -> bool:
    """Equal sizes, without asking a symbol for its value."""
    return bool(sympy.expand(_expr(a) - _expr(b)) == 0)


def _expr(size: Any) -> sympy.Expr:
    if not isinstance(size, torch.SymInt):
        return sympy.Integer(int(size))
    return size.node.expr.replace(FloorDiv, _quotient)


def _quotient(a: int | torch.SymInt, b: int | torch.SymInt) -> object:
    """``a // b``, where one symbol stands for several sizes without the division: ``s**2 // s``."""
    exact = sympy.cancel(a / b)
    return exact if sympy.denom(exact) == 1 else FloorDiv(a, b)


def _count(sizes: Sequence[object]) -> sympy.Expr:
    out = sympy.Integer(1)
    for s in sizes:
        out = out * _expr(s)
    return sympy.expand(out)


def count_is(sizes: Sequence[object], total: object) -> bool:
    """Whether these dimensions have ``total`` entries together, without asking a symbol for its value."""
    return bool(sympy.expand(_count(sizes) - _expr(total)) == 0)


def _is_one(size: object) -> bool:
    return same(size, 1)


def _dim(node: fx.Node, d: fx.node.Argument, ndim: int) -> int:
    if not isinstance(d, int):
        raise Left(f"{node.target} has no constant dimension")
    return d % max(ndim, 1)


def _dims(node: fx.Node, given: fx.node.Argument, ndim: int) -> list[int]:
    given = [given] if isinstance(given, int) else list(given or [])
    return [_dim(node, d, ndim) for d in given] or list(range(ndim))


def _permutation(node: fx.Node) -> list[int]:
    ndim = len(shape(node))
    if node.target is aten.t.default:
        return list(range(ndim))[::-1]
    if node.target is aten.transpose.int:
        out = list(range(ndim))
        i, j = _dim(node, node.args[1], ndim), _dim(node, node.args[2], ndim)
        out[i], out[j] = out[j], out[i]
        return out
    return [_dim(node, d, ndim) for d in node.args[1]]


# What an operator makes of rows ------------------------------------------------------------------------------


# Long: one row for each kind of operator.
def result(node: fx.Node, operand: fx.Node, rows: Rows) -> Rows | Summed:
    """What ``node`` makes of the rows of ``operand``.

    Raises:
        Left: rows are mixed, or nothing is known of the operator.
    """
    t, mine, ndim = node.target, shape(operand), len(shape(node))
    if t in _PRODUCTS:
        return _product(node, operand, rows)
    if t is aten.slice.Tensor:
        return _slice(node, rows)
    if t in (aten.slice_backward.default, aten.slice_scatter.default):
        return _unslice(node, operand, rows)
    if is_pointwise(node) or t in _SAME or t is aten.expand.default:
        at = rows.at + ndim - len(mine)
        padded = rows.padded and _keeps_zeros(node, operand)
        if rows.padded and not padded:
            raise Left("tokens that are sliced away are used too")
        return Rows(at, rows.count, rows.picked, rows.padded)
    if t in _VIEWS:
        return _view(node, mine, shape(node), rows)
    if t in _PERMUTES:
        order = _permutation(node)
        at = order.index(rows.at)
        if order[at : at + rows.count] != list(range(rows.at, rows.end)):
            raise Left(f"{t} takes the dimensions of tokens apart")
        return rows.moved(at)
    if t is aten.unsqueeze.default:
        d = _dim(node, node.args[1], ndim)
        if rows.at < d < rows.end:
            raise Left("a dimension is put between those of tokens")
        return rows.moved(rows.at + (d <= rows.at))
    if t in (aten.squeeze.dim, aten.squeeze.dims):
        gone = [d for d in _dims(node, node.args[1], len(mine)) if _is_one(mine[d])]
        if any(rows.at <= d < rows.end for d in gone):
            raise Left("a dimension of tokens is squeezed")
        return rows.moved(rows.at - sum(d < rows.at for d in gone))
    if t is aten.sum.default:
        return Summed(rows)
    if t in _REDUCTIONS:
        i, k = _REDUCTIONS[t]
        dims = _dims(node, arg(node, i), len(mine))
        over = [d for d in dims if rows.at <= d < rows.end]
        if not over:
            keep = bool(arg(node, k, False))
            return rows if keep else rows.moved(rows.at - sum(d < rows.at for d in dims))
        if t is aten.sum.dim_IntList and len(over) == rows.count:
            return Summed(rows)
        raise Left(f"{t} runs over tokens")
    if t in _ALONG:
        if rows.at <= _dim(node, node.args[_ALONG[t]], len(mine)) < rows.end:
            raise Left(f"{t} runs over tokens")
        if rows.padded:
            raise Left(f"{t} of rows that were sliced away")
        # torch takes an index of fewer tokens, which are the first.
        for other in map(shape, node.all_input_nodes):
            if len(other) != len(mine) or not all(
                same(p, q) for p, q in zip(other[rows.at : rows.end], mine[rows.at : rows.end], strict=True)
            ):
                raise Left(f"{t} reads some of the tokens alone")
        return rows
    raise Left(f"nothing is known of how {t} treats tokens")


def _keeps_zeros(node: fx.Node, operand: fx.Node) -> bool:
    if node.target in (aten.mul.Tensor, aten.mul.Scalar, aten.neg.default, *_SAME - {aten.full_like.default}):
        return True
    if node.target in (
        aten.tanh_backward.default,
        aten.threshold_backward.default,
        aten.sigmoid_backward.default,
    ):
        return node.args[0] is operand
    if node.target in (aten.div.Tensor, aten.div.Scalar, torch.ops.prims.convert_element_type.default):
        return node.args[0] is operand
    return node.target in (aten.zeros_like.default, aten.expand.default)


def _product(node: fx.Node, operand: fx.Node, rows: Rows) -> Rows | Summed:
    a, b = node.args[-2], node.args[-1]
    bias = node.args[0] if node.target is aten.addmm.default else None
    if operand is bias or (operand is a and operand is b):
        raise Left(f"rows are an operand of {node.target} that may have none")
    if rows.count != 1:
        raise Left("a product of more than two dimensions")
    if operand is a:
        if rows.at == 0:
            if rows.padded and bias is not None:
                raise Left("a bias is added to rows that were sliced away")
            return rows
    elif rows.at == 1:
        return rows
    if bias is not None:
        raise Left("a bias is added to a sum over tokens")
    return Summed(rows)


def _slice(node: fx.Node, rows: Rows) -> Rows:
    mine = shape(node.args[0])
    d = _dim(node, arg(node, 1, 0), len(mine))
    if not rows.at <= d < rows.end:
        return rows
    if same(mine[d], shape(node)[d]):
        return rows
    if rows.picked is not None or arg(node, 4, 1) != 1:
        raise Left("tokens are sliced twice, or with a step")
    picked = _picked(d - rows.at, arg(node, 2), mine[rows.at : rows.end], shape(node)[d])
    return Rows(rows.at, rows.count, picked)


def _unslice(node: fx.Node, operand: fx.Node, rows: Rows) -> Rows:
    """The transpose of a slice: rows among zeros."""
    mine = shape(node)
    if node.target is aten.slice_backward.default:
        given, dim, step = node.args[0], node.args[2], node.args[5]
    else:
        base, given, dim, step = node.args[0], node.args[1], arg(node, 2, 0), arg(node, 5, 1)
        if not is_zero(base):
            raise Left("rows are written into other ones")
    d = _dim(node, dim, len(mine))
    if operand is not given or step != 1 or not rows.at <= d < rows.end:
        raise Left(f"{node.target} of something else than rows")
    if same(shape(given)[d], mine[d]):
        return rows  # the gradient of a slice of all
    lead = mine[rows.at : rows.end]
    if rows.picked != _picked(d - rows.at, arg(node, 3), lead, shape(given)[d]):
        raise Left("the gradient of a slice that was not seen in forward")
    return Rows(rows.at, rows.count, rows.picked, padded=True)


def _picked(dim: int, start: object, lead: Sequence[object], length: object) -> tuple[object, ...]:
    """A slice of ``length`` entries of dimension ``dim`` of ``lead``, comparable."""
    begin = _expr(facts.value(start)) if isinstance(start, fx.Node) else sympy.Integer(start or 0)
    if begin.is_negative:
        begin = begin + _expr(lead[dim])
    return (dim, str(sympy.expand(begin)), str(_expr(length)), _key(lead))


def _key(sizes: Sequence[object]) -> str:
    return ",".join(str(_expr(s)) for s in sizes)


def is_zero(node: fx.node.Argument) -> bool:
    if not isinstance(node, fx.Node):
        return node == 0
    if node.target in (aten.full.default,):
        return node.args[1] == 0
    if node.target is aten.scalar_tensor.default:
        return node.args[0] == 0
    return node.target in (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)


def _view(
    node: fx.Node, mine: list[int | torch.SymInt], theirs: list[int | torch.SymInt], rows: Rows
) -> Rows:
    """Rows before and after a view: as many of them, with the same dimensions before and behind."""
    before, behind = mine[: rows.at], mine[rows.end :]
    total = _count(mine[rows.at : rows.end])
    for at in range(len(theirs)):
        for end in range(at + 1, len(theirs) + 1):
            if (
                _count(theirs[at:end]) == total
                and len(theirs) - end == len(behind)
                and all(same(p, q) for p, q in zip(behind, theirs[end:], strict=True))
                and len(before) == at
                and all(same(p, q) for p, q in zip(before, theirs[:at], strict=True))
            ):
                return rows.moved(at, end - at)
    raise Left("a view mixes tokens with something else")


# What an operator asks of its operands -----------------------------------------------------------------------


# Long: one row for each kind of operator.
def operands(node: fx.Node, out: Rows | Summed) -> dict[fx.Node, Rows | None]:
    """Rows that each tensor operand must have (None: it has none, and every tile reads all of it)."""
    t = node.target
    rows = out.rows if isinstance(out, Summed) else out
    tensors = list(node.all_input_nodes)
    if t in (aten.expand.default, aten.full.default):
        tensors = [n for n in tensors if isinstance(facts.value(n), torch.Tensor)]  # sizes are the tile's own
    if t in _PRODUCTS:
        a, b = node.args[-2], node.args[-1]
        need: dict[fx.Node, Rows | None] = {n: None for n in tensors}
        if isinstance(out, Summed):
            need[a], need[b] = rows.moved(1, 1), rows.moved(0, 1)
        else:
            need[a if rows.at == 0 else b] = rows
            if t is aten.addmm.default and (theirs := shape(node.args[0])):
                at = rows.at - 2 + len(theirs)
                if at >= 0 and not _is_one(theirs[at]):
                    need[node.args[0]] = rows.moved(at)  # something else is added than a bias
        return need
    if isinstance(out, Summed) or t is aten.slice.Tensor:
        return {}
    if t in _REDUCTIONS:
        i, k = _REDUCTIONS[t]
        theirs = shape(tensors[0])
        gone = _dims(node, arg(node, i), len(theirs))
        left = [d for d in range(len(theirs)) if d not in gone or bool(arg(node, k, False))]
        return {tensors[0]: rows.moved(left[rows.at])}
    if t in (aten.slice_backward.default, aten.slice_scatter.default):
        return {}
    if t in _VIEWS:
        return {tensors[0]: _view(node, shape(node), shape(tensors[0]), rows)}
    if t in _PERMUTES:
        order = _permutation(node)[rows.at : rows.end]
        if order != list(range(order[0], order[0] + rows.count)):
            raise Left(f"{t} takes the dimensions of tokens apart")
        return {tensors[0]: rows.moved(order[0])}
    if t is aten.unsqueeze.default:
        d = _dim(node, node.args[1], len(shape(node)))
        if rows.at <= d < rows.end:
            raise Left("a dimension is put between those of tokens")
        return {tensors[0]: rows.moved(rows.at - (d < rows.at))}
    if t in (aten.squeeze.dim, aten.squeeze.dims):
        theirs = shape(tensors[0])
        gone = [d for d in _dims(node, node.args[1], len(theirs)) if _is_one(theirs[d])]
        left = [d for d in range(len(theirs)) if d not in gone]
        if left[rows.end - 1] - left[rows.at] >= rows.count:
            raise Left("a dimension between those of tokens is squeezed")
        return {tensors[0]: rows.moved(left[rows.at])}
    if t in _ALONG:
        return dict.fromkeys(tensors, rows)
    mine, need = shape(node), {}
    for n in tensors:
        theirs = shape(n)
        shift = len(mine) - len(theirs)
        dims = [d - shift for d in range(rows.at, rows.end)]
        between_ones = rows.count > 1 and dims[0] >= 0 and all(_is_one(s) for s in mine[rows.at : rows.end])
        if all(d < 0 or _is_one(theirs[d]) for d in dims) and not between_ones:
            if rows.count > 1 and dims[-1] >= 0:
                raise Left(f"an operand of {t} is repeated over several dimensions of tokens")
            need[n] = None
        elif all(d >= 0 and same(theirs[d], mine[d + shift]) for d in dims):
            need[n] = Rows(dims[0], rows.count, rows.picked, rows.padded)
        else:
            raise Left(f"an operand of {t} has some of the dimensions of tokens and not the others")
    return need


def absorbable(node: fx.Node) -> bool:
    """An operator that may be made tile by tile though none of its operands has rows of a tile yet."""
    return is_pointwise(node) or node.target in _ABSORBABLE


# The operator on a tile --------------------------------------------------------------------------------------


def on_tile(
    graph: fx.Graph,
    node: fx.Node,
    out: Rows | Summed,
    given: Rows | None,
    of: Callable[[fx.Node], fx.Node],
    r: fx.Node,
) -> fx.Node:
    """Append ``node`` as it is on a tile, its rows one dimension.

    Args:
        given: rows of the first operand that has some.
        of: the tile of an operand.
        r: number of rows of the tile.
    """
    t, sizes = node.target, shape(node)
    rows = out.rows if isinstance(out, Summed) else out
    args, kwargs = tree_map(lambda a: of(a) if isinstance(a, fx.Node) else a, (node.args, node.kwargs))
    if t in (aten.slice.Tensor, aten.slice_backward.default, aten.slice_scatter.default) and (
        t is not aten.slice.Tensor or rows.at <= _dim(node, arg(node, 1, 0), len(sizes)) < rows.end
    ):
        return of(node.args[1] if t is aten.slice_scatter.default else node.args[0])
    if t in _VIEWS or t in (aten.expand.default, aten.full.default):
        new = [r if d == rows.at else s for d, s in enumerate(sizes) if not rows.at < d < rows.end]
        if any(isinstance(s, torch.SymInt) for s in new):
            raise Left("a size beside that of tokens is symbolic")
        if t in _VIEWS:
            new = [-1 if s is r else s for s in new]
        return graph.call_function(t, (new, *args[1:]) if t is aten.full.default else (args[0], new), kwargs)
    if t in (aten.squeeze.dim, aten.squeeze.dims):
        # A tile may be of one token, which stays.
        span, ndim = given or rows, len(shape(node.args[0]))
        dims = [d for d in _dims(node, args[1], ndim) if not span.at <= d < span.end]
        dims = [d - (span.count - 1) if d >= span.end else d for d in dims]
        return graph.call_function(aten.squeeze.dims, (args[0], dims)) if dims else args[0]
    many = (given or rows).count - 1
    if many and not is_pointwise(node) and t not in _SAME:
        span = given or rows
        ndim = len(shape(node.args[0]))

        def dim(d: fx.node.Argument) -> int:
            d = _dim(node, d, ndim + (t is aten.unsqueeze.default))
            return d - many if d >= span.end else d

        if t in _PERMUTES:
            order = [dim(d) for d in _permutation(node) if not span.at < d < span.end]
            return graph.call_function(aten.permute.default, (args[0], order))
        if t in (aten.unsqueeze.default, aten.slice.Tensor):
            args = (args[0], dim(arg(node, 1, 0)), *args[2:])
        elif t in _REDUCTIONS:
            dims = [dim(d) for d in _dims(node, arg(node, 1), ndim) if not span.at < d < span.end]
            args = (args[0], dims[0] if t is aten.argmax.default else dims, *args[2:])
        elif t in _ALONG:
            i = _ALONG[t]
            args = (*args[:i], dim(args[i]), *args[i + 1 :])
    return graph.call_function(t, args, kwargs)
