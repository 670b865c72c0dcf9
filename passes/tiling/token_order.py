"""Losses that are given their columns before their tokens: the same with the columns last."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from zero_compiler.ir import facts

from ..emitter import Emitter
from . import row_propagation
from .row_propagation import Left, Rows

aten = torch.ops.aten
_MADE = {aten.expand.default, aten.full.default}
_ONES = {aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, *row_propagation._VIEWS}


def columns_last(graph: fx.Graph, head: fx.Node) -> None:
    """Write what follows a head with its tokens side by side, where a permutation took them apart.

    ``cross_entropy(logits.transpose(1, 2), labels)``, as PyTorch has it for several dimensions of tokens, computes on
    ``[batch, columns, tokens]``. What does not depend on the order of dimensions is done before the permutation, which
    so moves down: to where the dimensions are in their first order again, nothing is left of them, or an operator
    stands that is not known; there it is made. Numbers are the same but for the order of sums.
    """
    apart = _apart(head)
    if apart:
        _Moved(graph, head, apart).rewrite()


def _apart(head: fx.Node) -> list[fx.Node]:
    """Permutations that put something between dimensions of tokens."""
    rows, todo, out = {head: Rows(0, 1)}, [head], []
    while todo:
        given = todo.pop()
        for node in given.users:
            if node in rows:
                continue
            try:
                found = row_propagation.result(node, given, rows[given])
            except Left:
                if node.target in row_propagation._PERMUTES and rows[given].count > 1:
                    out.append(node)
                continue
            if isinstance(found, Rows) and not row_propagation.is_product(node):
                rows[node] = found
                todo.append(node)
    return out


_Order = list[int | None]
_DEPTH = 64  # of element-wise operators on numbers of tokens that are written anew


def _in_one_piece(node: fx.Node) -> bool:
    """Whether its last dimension lies densest, and so on; by hints, so that nothing is said about symbols."""
    val, step = facts.value(node), 1
    for size, stride in zip(reversed(val.shape), reversed(val.stride()), strict=True):
        if facts.hint(size) != 1 and facts.hint(stride) != step:
            return False
        step *= max(facts.hint(size), 1)
    return True


class _Moved:
    """Nodes as permutations of others: dimension i of ``node`` is dimension ``order[i]`` of ``given``, where
    ``given, order`` is ``of[node]``, or, where that is None, one entry that ``given`` does not have."""

    def __init__(self, graph: fx.Graph, head: fx.Node, apart: Sequence[fx.Node]) -> None:
        self.graph, self.emit = graph, Emitter(graph, head)
        self.apart = set(apart)
        self.of: dict[fx.Node, tuple[fx.Node, _Order]] = {}
        # Of nodes that are read by what is not known, what stands for them.
        self._whole: dict[fx.Node, fx.Node] = {}
        self._forms: dict[tuple[fx.Node, str], fx.Node] = {}

    def rewrite(self) -> None:
        node = min(self.apart)
        while node.op != "root":
            behind = node.next
            if node in self.apart:
                self.of[node] = (node.args[0], list(row_propagation._permutation(node)))
            elif any(n in self.of for n in node.all_input_nodes):
                self._pass(node)
            elif node.target in _MADE or (row_propagation.is_pointwise(node) and facts.is_pure(node)):
                self._make(node)
            node = behind
        self.graph.eliminate_dead_code()

    def _pass(self, node: fx.Node) -> None:
        with self.graph.inserting_before(node):
            if node.target is aten.sum.default:
                (given,) = node.all_input_nodes
                node.replace_all_uses_with(self.emit(node.target, self.of[given][0], **node.kwargs))
                return
            moved = self._moved(node) if node.op == "call_function" and facts.is_pure(node) else None
            if moved is None:
                for n in [n for n in node.all_input_nodes if n in self.of]:
                    node.replace_input_with(n, self._again(n))
                return
        given, order = moved
        if order == list(range(len(row_propagation.shape(given)))):
            node.replace_all_uses_with(given)
        else:
            self.of[node] = moved

    def _again(self, node: fx.Node) -> fx.Node:
        """``node`` as it was, and in one piece where it was: whoever reads it may rely on that."""
        if node not in self._whole:
            new = self._operand(node, list(range(len(row_propagation.shape(node)))))
            if _in_one_piece(node) and not _in_one_piece(new):
                new = self.emit(aten.clone.default, new, memory_format=torch.contiguous_format)
            self._whole[node] = new
        return self._whole[node]

    def _make(self, node: fx.Node) -> None:
        """What is laid as the logits are, and made of numbers of tokens and of columns."""
        first = next(iter(self.of))
        sizes, (given, order) = row_propagation.shape(node), self.of[first]
        if not _same_but_ones(row_propagation.shape(first), sizes) or _same_but_ones(
            row_propagation.shape(given), sizes
        ):
            return
        ones = [j for j, size in enumerate(row_propagation.shape(given)) if row_propagation._is_one(size)]
        order = _ranks(_with_ones(row_propagation.shape(first), order, ones, sizes))
        with self.graph.inserting_before(node):
            if node.target is aten.full.default:
                new = self.emit(node.target, _sizes(sizes, order), *node.args[1:], **node.kwargs)
            elif node.target is aten.expand.default:
                new = self.emit(node.target, self._operand(node.args[0], order), _sizes(sizes, order))
            else:
                new = self.emit.like(node, self._operands(node, order, True))
        self.of[node] = (new, order)

    def _moved(self, node: fx.Node) -> tuple[fx.Node, _Order] | None:
        """What ``node`` is a permutation of; None: nothing is known."""
        t, args, sizes = node.target, node.args, row_propagation.shape(node)
        operands = (n for n in node.all_input_nodes if n in self.of)
        first = max(operands, key=lambda n: len(row_propagation.shape(self.of[n][0])))
        given, order = self.of[first]
        if t in row_propagation._PERMUTES:
            return given, [order[d] for d in row_propagation._permutation(node)]
        if t in _ONES:
            return self._other_ones(node, first)
        if t in row_propagation._REDUCTIONS:
            return self._reduced(node, first)
        if len(sizes) != len(order):
            return None
        if any(j is None and not row_propagation._is_one(s) for s, j in zip(sizes, order, strict=True)):
            return None
        if t is aten.expand.default:
            return self.emit(t, given, _sizes(sizes, order)), order
        along = row_propagation._ALONG.get(t)
        dim = None if along is None else order[row_propagation._dim(node, args[along], len(order))]
        if dim is None and not row_propagation.is_pointwise(node) and t not in row_propagation._SAME:
            return None
        env = self._operands(node, order, along is None)
        new = [env.get(a, a) if isinstance(a, fx.Node) else a for a in args]
        if along is not None:
            new[along] = dim
        kwargs = {k: env.get(a, a) if isinstance(a, fx.Node) else a for k, a in node.kwargs.items()}
        return self.emit(t, *new, **kwargs), order

    def _reduced(self, node: fx.Node, first: fx.Node) -> tuple[fx.Node, _Order] | None:
        t, args = node.target, node.args
        given, order = self.of[first]
        i, k = row_propagation._REDUCTIONS[t]
        dims = row_propagation._dims(node, row_propagation.arg(node, i), len(order))
        over = [j for d in dims if (j := order[d]) is not None]
        if len(over) != len(dims) or (t is aten.argmax.default and len(dims) > 1):
            return None
        what = over[0] if t is aten.argmax.default else over
        out = self.emit(t, given, *args[1:i], what, *args[i + 1 :], **node.kwargs)
        if row_propagation.arg(node, k, False):
            return out, order
        return out, _ranks([j for d, j in enumerate(order) if d not in dims])

    def _other_ones(self, node: fx.Node, first: fx.Node) -> tuple[fx.Node, _Order] | None:
        """A view that differs in dimensions of one entry, which are all alike."""
        (given, order), mine, theirs = (
            self.of[first],
            row_propagation.shape(first),
            row_propagation.shape(node),
        )
        if not _same_but_ones(mine, theirs):
            return None
        ones: _Order = [
            j for j, size in enumerate(row_propagation.shape(given)) if row_propagation._is_one(size)
        ]
        new = _with_ones(mine, order, ones, theirs)
        for j in reversed(ones):
            if j not in new:
                given = self.emit(aten.squeeze.dim, given, j)
        return given, _ranks(new)

    def _operands(self, node: fx.Node, order: _Order, repeats: bool) -> dict[fx.Node, fx.Node]:
        """Operands of a node whose dimensions come in ``order``; if one ``repeats`` others over first dimensions, these
        come without them."""
        out, sizes = {}, _sizes(row_propagation.shape(node), order)
        for n in node.all_input_nodes:
            out[n] = self._operand(n, order)
            theirs = row_propagation.shape(out[n])
            first = next(
                (
                    d
                    for d, (a, b) in enumerate(zip(theirs, sizes, strict=False))
                    if row_propagation.same(a, b)
                ),
                0,
            )
            if repeats and first and len(theirs) == len(sizes):
                out[n] = self._formed(out[n], theirs[first:])
        return out

    def _operand(self, node: fx.Node, order: _Order) -> fx.Node:
        """An operand of something whose dimensions come in ``order``."""
        if not isinstance(facts.value(node), torch.Tensor) or not row_propagation.shape(node):
            return node
        mine = row_propagation.shape(node)
        given, have = self.of.get(node, (node, list(range(len(mine)))))
        more = len(order) - len(have)  # repeated over the first dimensions
        have, mine = [None] * more + have, [1] * more + mine
        sizes, theirs = _sizes(mine, order), row_propagation.shape(given)
        # Dimensions of given as they are to come, and those of one entry that have no place.
        come = [j for j in _sizes(have, order) if j is not None]
        come += [j for j in range(len(theirs)) if j not in come]
        while given.target in row_propagation._PERMUTES:
            before = row_propagation._permutation(given)
            come, given = [before[j] for j in come], given.args[0]
        theirs = row_propagation.shape(given)
        many = [j for j in come if not row_propagation._is_one(theirs[j])]
        if many != sorted(many):
            given = self.emit(aten.permute.default, given, come)
        return self._formed(given, sizes)

    def _formed(self, node: fx.Node, sizes: list[fx.node.Argument], depth: int = 0) -> fx.Node:
        """``node`` with ones in other places. What a view mixes is not known, so tokens can be followed to where they
        come from only if what lies between has these sizes too: as far as ``_DEPTH`` steps."""
        key = (node, str(sizes))
        if key not in self._forms:  # each once, whatever the number of ways to it
            self._forms[key] = self._form(node, sizes, depth)
        return self._forms[key]

    def _form(self, node: fx.Node, sizes: list[object], depth: int) -> fx.Node:
        mine = row_propagation.shape(node)
        if len(mine) == len(sizes) and all(map(row_propagation.same, mine, sizes)):
            return node
        t, tensors = node.target, [n for n in node.all_input_nodes if row_propagation.shape(n)]
        alike = depth < _DEPTH and all(_same_but_ones(row_propagation.shape(n), sizes) for n in tensors)
        if t in _ONES and alike:
            return self._formed(node.args[0], sizes, depth + 1)
        if t is aten.expand.default and not row_propagation.shape(node.args[0]):
            return self.emit(t, node.args[0], sizes)
        if row_propagation.is_pointwise(node) and facts.is_pure(node) and alike:
            return self.emit.like(node, {n: self._formed(n, sizes, depth + 1) for n in tensors})
        have, want, at = _gaps(mine), _gaps(sizes), len(mine)
        for k in reversed(range(len(want))):
            for _ in range(have[k] - want[k]):
                node = self.emit(aten.squeeze.dim, node, at - 1)
                at -= 1
            for _ in range(want[k] - have[k]):
                node = self.emit(aten.unsqueeze.default, node, at)
            at -= min(have[k], want[k]) + 1
        return node


def _same_but_ones(a: Sequence[object], b: Sequence[object]) -> bool:
    """Whether these are the same sizes, but for ones."""
    a, b = [s for s in a if not row_propagation._is_one(s)], [s for s in b if not row_propagation._is_one(s)]
    return len(a) == len(b) and all(row_propagation.same(s, t) for s, t in zip(a, b, strict=True))


def _with_ones(
    mine: Sequence[object], order: _Order, ones: Sequence[int | None], theirs: Sequence[object]
) -> _Order:
    """``order`` of sizes ``mine`` for sizes that differ in ones, which are ``ones`` as far as there are so many."""
    many = iter([j for j, size in zip(order, mine, strict=True) if not row_propagation._is_one(size)])
    few = iter([*ones, *[None] * len(theirs)])
    return [next(few if row_propagation._is_one(s) else many) for s in theirs]


def _gaps(sizes: Sequence[object]) -> list[int]:
    """How many ones stand before each size that is none, and behind the last."""
    out = [0]
    for size in sizes:
        if row_propagation._is_one(size):
            out[-1] += 1
        else:
            out.append(0)
    return out


def _sizes(of: Sequence[object], order: _Order) -> list[fx.node.Argument]:
    """What stands by dimension of a node, by dimension of what it is a permutation of."""
    places = sorted((j, d) for d, j in enumerate(order) if j is not None)
    return [of[d] for _, d in places]


def _ranks(order: _Order) -> _Order:
    """The same order, counted without gaps."""
    have = sorted(j for j in order if j is not None)
    return [None if j is None else have.index(j) for j in order]
