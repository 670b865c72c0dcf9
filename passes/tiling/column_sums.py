"""Sums over the columns of logits: what one sweep over tiles of them finds, and what follows from it.

A loss reads each token's logits through few numbers: the log-sum-exp, the logit that is the target, their sum, their
largest. Each can be found a tile of columns at a time. But the sums that a loss is written in often run over what
another sum is in already (log-probabilities, say). :class:`ColumnSums` writes the computation anew, so that every sum
runs over what is known before: sums go through additions and factors that are equal in all columns, and what is zero in
all columns but one is the value there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx
from torch.utils._pytree import tree_map

from zero_compiler.ir import dump, facts

from ..emitter import Emitter
from . import row_propagation
from .row_propagation import Left, Rows

aten = torch.ops.aten
prims = torch.ops.prims

# Operators that are told the sizes of their result.
SIZED = {*row_propagation._VIEWS, aten.expand.default, aten.full.default}
_CASTS = {aten._to_copy.default, prims.convert_element_type.default}
_NOTHING = {aten.alias.default, aten.detach.default, aten.contiguous.default, aten.lift_fresh_copy.default}
_HALF = (torch.float16, torch.bfloat16)


class ColumnSums:
    """A graph of one tile of tokens (see :func:`tile_graph`), written anew.

    ``graph`` has the values of ``ROWS`` tokens, told apart from all other sizes: a node is *wide* where it has tokens
    and columns. ``sums`` are the sums over columns, each ``[rows, 1]`` and of what is known before any of them.

    Args:
        bare: takes the number of rows, then its inputs.
        given: a fake value of each input (or a size), and the dimension of its rows if it has some.
        late: inputs that backward brings.
        width: columns.
        like: an emitter of the graph that it stands in.

    Raises:
        Left: it needs more than one sweep, or mixes columns in a way that is not known.
    """

    def __init__(
        self,
        bare: fx.Graph,
        given: Sequence[tuple[object, int | None]],
        late: Sequence[bool],
        width: int,
        like: Emitter,
    ) -> None:
        self.width = width
        self.graph = fx.Graph()
        self.emit = Emitter(self.graph, like.origin)
        self.emit.mode = like.mode
        tensors = [(val, dim) for val, dim in given if isinstance(val, torch.Tensor)]
        self.rows = _unlike(
            [width, *(s for val, dim in tensors for d, s in enumerate(val.shape) if d != dim)]
        )
        self.sums: dict[fx.Node, str] = {}
        self._after: set[fx.Node] = set()  # what sums are in
        self.late: set[fx.Node] = set()
        self._made: dict[str, fx.Node] = {}
        device = tensors[0][0].device
        r, *names = bare.find_nodes(op="placeholder")
        env: dict[fx.Node, object] = {r: self.graph.placeholder("rows")}
        self.r: fx.Node = env[r]
        facts.set_value(self.r, self.rows)
        self.inputs: list[fx.Node] = []
        for name, (val, dim), back in zip(names, given, late, strict=True):
            env[name] = self.graph.placeholder(name.name)
            if isinstance(val, torch.Tensor):
                val = self.emit.empty([self.rows if d == dim else s for d, s in enumerate(val.shape)], val)
            facts.set_value(env[name], val)
            if self.wide(env[name]):
                raise Left(f"%{name.name}, as large as the logits, is made elsewhere")
            self.inputs.append(env[name])
            if back:
                self.late.add(env[name])
        # Columns by number, from 1: where there are more columns than the weight has rows, those have 0.
        self.numbers = self._put(
            prims.iota.default, width, start=1, step=1, dtype=torch.int64, device=device, requires_grad=False
        )
        self.outs: list[fx.Node] = []
        for node in bare.nodes:
            if node.op == "call_function":
                args, kwargs = tree_map(
                    lambda a: env[a] if isinstance(a, fx.Node) else a, (node.args, node.kwargs)
                )
                env[node] = self._written(node.target, args, kwargs)
            elif node.op == "output":
                self.outs = [env[n] for n in node.args[0]]

    # What a value is ---------------------------------------------------------------------------------------

    def row_dim(self, node: fx.node.Argument) -> int | None:
        return self._dim_of(node, self.rows)

    def column_dim(self, node: fx.node.Argument) -> int | None:
        return self._dim_of(node, self.width)

    def wide(self, node: fx.node.Argument) -> bool:
        return self.row_dim(node) is not None and self.column_dim(node) is not None

    def with_dims(self, node: fx.Node, more: int) -> fx.Node:
        """Sums over tokens, which are one dimension here, with so many ``more`` of them."""
        for _ in range(more):
            node = self._put(aten.unsqueeze.default, node, 0)
        return node

    def _dim_of(self, node: fx.node.Argument, size: int) -> int | None:
        val = facts.value(node) if isinstance(node, fx.Node) else None
        dims = [d for d, s in enumerate(val.shape) if s == size] if isinstance(val, torch.Tensor) else []
        if len(dims) > 1:
            raise Left(f"%{node.name} has two dimensions as long as the vocabulary")
        return dims[0] if dims else None

    # Writing -----------------------------------------------------------------------------------------------

    def _put(self, target: object, *args: fx.node.Argument, **kwargs: object) -> fx.Node:
        """A node; the one that is there already where it computes the same."""
        key = f"{target} {args} {kwargs}"
        if key not in self._made:
            node = self._made[key] = self.emit(target, *args, **kwargs)
            if any(n in self._after or n in self.sums for n in node.all_input_nodes):
                self._after.add(node)
            if any(n in self.late for n in node.all_input_nodes):
                self.late.add(node)
        return self._made[key]

    def _written(self, t: object, args: fx.node.Argument, kwargs: fx.node.Argument) -> fx.Node:
        first = args[0] if args else None
        if t is aten._log_softmax.default and self.wide(first):
            return self._log_softmax(*args)
        if t is aten._log_softmax_backward_data.default and self.wide(first):
            return self._log_softmax_gradient(*args)
        if t is aten.gather.default and self.wide(first) and self._across(first, args[1]):
            return self._each(self._pick(first, self._hit(args[2])), first)
        if t is aten.scatter.value and self.wide(first) and self._across(first, args[1]):
            base = self._number(0, first) if row_propagation.is_zero(first) else first
            return self._put(aten.where.self, self._hit(args[2]), self._number(args[3], first), base)
        if t is aten.scatter_add.default and self._across(first, args[1]) and row_propagation.is_zero(first):
            if row_propagation.shape(args[3]) != row_propagation.shape(args[2]):  # the rest of it is not read
                raise Left("not all of what is added is read")
            return self._put(aten.where.self, self._hit(args[2]), args[3], self._number(0, first))
        if self.wide(first) and (t in row_propagation._REDUCTIONS or t is aten.sum.default):
            out = self._reduced(t, args, kwargs)
            if out is not None:
                return out
        node = self._put(t, *args, **kwargs)
        if self._unchanged(node, first):
            return first
        self._check(node)
        return node

    def _unchanged(self, node: fx.Node, given: fx.node.Argument) -> bool:
        if node.target not in row_propagation._VIEWS | _CASTS | _NOTHING or not isinstance(given, fx.Node):
            return False
        mine, theirs = facts.value(node), facts.value(given)
        return mine.shape == theirs.shape and mine.dtype == theirs.dtype and mine.stride() == theirs.stride()

    def _across(self, node: fx.Node, dim: fx.node.Argument) -> bool:
        return isinstance(dim, int) and dim % len(row_propagation.shape(node)) == self.column_dim(node)

    def _check(self, node: fx.Node) -> None:
        """Each column of it is made of the same column of what it is made of, or it is a product or sum of all."""
        column = self.column_dim(node)
        for given in node.all_input_nodes:
            theirs = self.column_dim(given)
            if theirs is None or not (self.wide(node) or self.wide(given)):
                continue
            product = node.target in row_propagation._PRODUCTS
            if column is None:
                if not product:
                    raise Left(f"{dump.target_text(node)} mixes the vocabulary")
            elif self.wide(given):
                if row_propagation.result(node, given, Rows(theirs, 1)) != Rows(column, 1):
                    raise Left(f"{dump.target_text(node)} mixes the vocabulary")
            elif not (product or row_propagation.is_pointwise(node) or node.target is aten.expand.default):
                raise Left(
                    f"nothing is known of how {dump.target_text(node)} reads a vector of the vocabulary"
                )

    def _in_float(self, node: fx.Node) -> fx.Node:
        return self._cast(node, torch.float32) if facts.value(node).dtype in _HALF else node

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        same = facts.value(node).dtype == dtype
        return node if same else self._put(prims.convert_element_type.default, node, dtype)

    def _log_softmax(self, given: fx.Node, dim: int, to_float: bool) -> fx.Node:
        if not self._across(given, dim):
            raise Left("a softmax runs over tokens")
        exact = self._in_float(given)
        out = self._put(aten.sub.Tensor, exact, self._sum_of(exact, "logsumexp"))
        return self._cast(out, torch.float32 if to_float else facts.value(given).dtype)

    def _log_softmax_gradient(self, grad: fx.Node, out: fx.Node, dim: int, dtype: torch.dtype) -> fx.Node:
        grad, out = self._in_float(grad), self._in_float(out)
        share = self._put(aten.mul.Tensor, self._put(aten.exp.default, out), self._total(grad))
        return self._cast(self._put(aten.sub.Tensor, grad, share), dtype)

    # Sums --------------------------------------------------------------------------------------------------

    def _sum_of(self, node: fx.Node, how: str = "sum") -> fx.Node:
        """A sum over columns that a sweep finds."""
        if node in self.late or node in self._after or not self.wide(node):
            raise Left(
                f"{dump.target_text(node)} is summed over the vocabulary, and is known only when another such sum is"
            )
        if (self.row_dim(node), self.column_dim(node)) != (0, 1) or len(row_propagation.shape(node)) != 2:
            raise Left(f"{dump.target_text(node)} has tokens behind the vocabulary")
        target = {"sum": aten.sum.dim_IntList, "max": aten.amax.default}.get(how, aten.logsumexp.default)
        out = self._put(target, node, [1], True)
        self.sums[out] = how
        return out

    def _reduced(self, t: object, args: fx.node.Argument, kwargs: fx.node.Argument) -> fx.Node | None:
        """A reduction of what is wide; None where it is over tokens alone."""
        node = args[0]
        if kwargs.get("dtype") is not None:
            node = self._cast(node, kwargs["dtype"])
        ndim = len(row_propagation.shape(node))
        dims = list(range(ndim)) if t is aten.sum.default else row_propagation._dims(node, args[1], ndim)
        column = self.column_dim(node)
        if column not in dims:
            return None
        if t in (aten.sum.default, aten.sum.dim_IntList):
            out = self._total(node)
        elif t is aten.mean.dim and len(dims) == 1:
            out = self._put(aten.div.Tensor, self._total(node), self.width)
        elif t in (aten.amax.default, aten.logsumexp.default) and len(dims) == 1:
            exact = self._in_float(node)
            out = self._sum_of(exact, "max" if t is aten.amax.default else "logsumexp")
            out = self._cast(out, facts.value(node).dtype)
        else:
            raise Left(f"nothing is known of {t} over the vocabulary")
        keep = t is not aten.sum.default and len(args) > 2 and bool(args[2])
        if len(dims) > 1:
            return self._put(aten.sum.dim_IntList, out, dims, keep)
        return out if keep else self._put(aten.squeeze.dim, out, 1)

    def _total(self, node: fx.Node, times: fx.Node | None = None) -> fx.Node:
        """The sum over columns of ``node``, each column ``times`` its entry of a vector; ``[rows, 1]``."""
        return self._each(self._sum(node, times), node)

    def _each(self, out: fx.node.Argument, like: fx.Node) -> fx.Node:
        """One for each token."""
        out = self._number(out, like)
        return (
            out
            if row_propagation.shape(out) == [self.rows, 1]
            else self._put(aten.expand.default, out, [self.r, 1])
        )

    def _sum(self, node: fx.node.Argument, times: fx.Node | None) -> fx.node.Argument:
        if self.column_dim(node) is None:  # equal in all columns
            return self._times(node, self.width if times is None else self._put(aten.sum.default, times))
        if not self.wide(node):
            vector = node if times is None else self._put(aten.mul.Tensor, node, times)
            return self._put(aten.sum.default, vector)
        hit = self._zero_outside(node)
        if hit is not None:
            at = self._pick(node, hit)
            if times is not None:
                at = self._times(at, self._pick(times, hit))
            return self._where_there_is(hit, self._number(at, node))
        if node not in self.late and node not in self._after:
            return self._sum_of(node if times is None else self._put(aten.mul.Tensor, node, times))
        t, args, kwargs = node.target, node.args, node.kwargs
        if t in (aten.add.Tensor, aten.sub.Tensor) and not kwargs:
            return self._put(t, *[self._number(self._sum(a, times), node) for a in args])
        if t is aten.mul.Tensor:
            for a, b in (args, args[::-1]):
                if self.column_dim(a) is None:
                    return self._times(self._sum(b, times), a)
                if not self.wide(a):
                    return self._sum(b, a if times is None else self._put(aten.mul.Tensor, a, times))
        if t in (aten.div.Tensor, aten.div.Scalar, aten.mul.Scalar) and self.column_dim(args[1]) is None:
            return self._put(t, self._number(self._sum(args[0], times), node), args[1])
        if t is aten.where.self and self.column_dim(args[0]) is None:
            return self._put(t, args[0], *[self._number(self._sum(a, times), node) for a in args[1:]])
        if t is aten.neg.default or t in _CASTS or t is aten.clone.default:
            more = kwargs if t in _CASTS else {}
            return self._put(t, self._number(self._sum(args[0], times), node), *args[1:], **more)
        if t is aten.expand.default:
            return self._sum(args[0], times)
        if t is aten.exp.default and times is None and args[0].target is aten.sub.Tensor:
            left, right = args[0].args[:2]
            if self.wide(left) and self.column_dim(right) is None:
                whole = self._sum_of(self._in_float(left), "logsumexp")
                out = self._put(aten.exp.default, self._put(aten.sub.Tensor, whole, right))
                return self._cast(out, facts.value(node).dtype)
        raise Left(
            f"{dump.target_text(node)} is summed over the vocabulary, and is known only when another such sum is"
        )

    def _times(self, a: fx.node.Argument, b: fx.node.Argument) -> fx.node.Argument:
        if not isinstance(a, fx.Node):
            return a * b if not isinstance(b, fx.Node) else self._put(aten.mul.Tensor, b, a)
        return self._put(aten.mul.Tensor, a, b)

    def _number(self, a: object, like: fx.Node) -> fx.Node:
        """As a tensor where it is a number."""
        if isinstance(a, fx.Node):
            return a
        val = facts.value(like)
        return self._put(aten.full.default, [], a, dtype=val.dtype, device=val.device)

    # One column of each token ------------------------------------------------------------------------------

    def _hit(self, index: fx.Node) -> fx.Node:
        """Where the column is the one that ``index``, one a token, names."""
        if row_propagation.shape(index) != [self.rows, 1]:
            raise Left("more than one column of a token is looked up")
        # Looked up, and not counted on: an index that names no column is an error then, as it is of whole logits.
        named = self._put(
            aten.gather.default, self._put(aten.view.default, self.numbers, [self.width, 1]), 0, index
        )
        return self._put(aten.eq.Tensor, named, self._put(aten.view.default, self.numbers, [1, self.width]))

    def _is_hit(self, node: fx.node.Argument) -> bool:
        return self._compared(node) is not None

    def _compared(self, node: fx.node.Argument) -> tuple[fx.Node, int] | None:
        """The index that the numbers of columns are compared with, and the number of the first."""
        if not isinstance(node, fx.Node) or node.target is not aten.eq.Tensor or not self.wide(node):
            return None
        for a, b in (node.args, node.args[::-1]):
            while a.target is aten.expand.default:
                a = a.args[0]
            numbers = b
            while numbers.target in row_propagation._VIEWS or numbers.target in (
                aten.unsqueeze.default,
                aten.expand.default,
            ):
                numbers = numbers.args[0]
            first = _counts_from(numbers)
            if self.column_dim(a) is None and first is not None:
                return a, first
        return None

    def _where_there_is(self, hit: fx.Node, at: fx.Node) -> fx.Node:
        """``at`` for tokens of which a column is hit, else 0."""
        return self._put(aten.where.self, self._place(hit)[1], at, self._number(0, at))

    def _place(self, hit: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Number of the column that is hit, from 0, and whether there is one."""
        found = self._compared(hit)
        assert found is not None
        index, first = found
        inside = self._put(
            aten.logical_and.default,
            self._put(aten.ge.Scalar, index, first),
            self._put(aten.lt.Scalar, index, first + self.width),
        )
        return self._put(aten.sub.Tensor, index, first), inside

    def _zero_outside(self, node: fx.node.Argument) -> fx.Node | None:
        """Which column alone of each token is not zero."""
        if not isinstance(node, fx.Node) or not self.wide(node):
            return None
        t, args = node.target, node.args
        if t is aten.where.self and row_propagation.is_zero(args[2]):
            return args[0] if self._is_hit(args[0]) else self._zero_outside(args[1])
        if t is aten.mul.Tensor:
            return self._zero_outside(args[0]) or self._zero_outside(args[1])
        if t in (
            aten.neg.default,
            aten.div.Tensor,
            aten.div.Scalar,
            aten.mul.Scalar,
            aten.clone.default,
            *_CASTS,
        ):
            return self._zero_outside(args[0])
        return None

    def _pick(self, node: fx.node.Argument, hit: fx.Node) -> fx.node.Argument:
        """Of each token, the column that is hit."""
        if self.column_dim(node) is None:
            return node
        t, args = node.target, node.args
        if t is aten.where.self and args[0] is hit:
            return self._pick(args[1], hit)
        if not self.wide(node):
            place, inside = self._place(hit)
            place = self._put(aten.where.self, inside, place, self._number(0, place))
            return self._put(aten.index.Tensor, self._put(aten.view.default, node, [self.width]), [place])
        if node not in self.late and node not in self._after:
            return self._sum_of(self._put(aten.where.self, hit, node, self._number(0, node)))
        if t is aten.expand.default:
            return self._pick(args[0], hit)
        if row_propagation.is_pointwise(node) or t in row_propagation._SAME:
            return self._put(t, *_mapped(args, lambda a: self._pick(a, hit)), **node.kwargs)
        raise Left(f"nothing is known of how {dump.target_text(node)} makes one column")


def _counts_from(node: fx.Node) -> int | None:
    """The first of numbers that follow each other."""
    t, args = node.target, node.args
    if t is prims.iota.default and node.kwargs["step"] == 1:
        return node.kwargs["start"]
    if t is aten.arange.default:
        return 0
    one = t is aten.arange.start or (t is aten.arange.start_step and (len(args) < 3 or args[2] == 1))
    return args[0] if one else None


def _mapped(args: object, of: Callable[[fx.Node], fx.node.Argument]) -> fx.node.Argument:
    return tree_map(lambda a: of(a) if isinstance(a, fx.Node) else a, args)


def _unlike(sizes: Sequence[object]) -> int:
    """A number of rows that is no other size."""
    if any(isinstance(s, torch.SymInt) for s in sizes):
        raise Left("a size beside that of tokens is symbolic")
    return next(n for n in range(2, len(sizes) + 3) if n not in sizes)
