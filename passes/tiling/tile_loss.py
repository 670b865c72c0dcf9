"""Joint graph: logits and what the loss makes of them are computed tile by tile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_map

from zero_compiler.ir import dump, facts

from ..base import Context
from ..emitter import Emitter
from . import row_propagation
from .head import Head, factor_names, multiplies, rows_of_tiles
from .row_propagation import Left
from .token_order import columns_last
from .vocabulary import Vocabulary, plan_of

aten = torch.ops.aten
# Operators that are split into simpler ones, so that the sum over tokens stands apart from its division.
_SPLIT = {
    aten.nll_loss_forward.default,
    aten.nll_loss_backward.default,
    aten.nll_loss2d_forward.default,
    aten.nll_loss2d_backward.default,
}
_SOFTMAX = {aten._log_softmax.default, aten.logsumexp.default, aten.amax.default}


@dataclass(frozen=True)
class TileLoss:
    """Compute logits, their loss and its gradient for some tokens at a time, so that full logits never exist.

    A *head* is a product with a weight whose output is wider than its input, and whose output goes through a softmax
    over its columns into sums over tokens. All that is as large as the logits is computed for a tile of tokens at a
    time. The gradient is made in the same place, in forward, while the tile's logits are there (as fused linear cross
    entropy does: Hsu et al., "Liger Kernel", 2024, section 3.2): it is linear in the gradient of the loss, a scalar
    that backward brings, and is multiplied by it there. Nothing is computed twice, and backward gathers no weight.

    Before::

        %l = aten.mm %x, %wt                                  f32[16,61]
        ...                                                   log-softmax, the sum over tokens, its gradient %g
        %dx = aten.mm %g, %w                                  f32[16,8]
        %dw = aten.mm %gt, %x                                 f32[61,8]

    After::

        %t  = zero.tiled [%x, %labels, %wt, ...]              per tile: logits, loss, gradient
        %s, %dx1, %dw1 = getitem %t
        %dx = aten.mul %dx1, %tangents_1
        %dw = aten.mul %dw1, %tangents_1

    A head's weight that is to be gathered in tiles itself is not needed whole: its logits are made for a tile of the
    vocabulary at a time, too. Then forward makes sums over the vocabulary alone, of which the loss is made: the
    log-sum-exp, and the logit of the target. Backward makes the logits again, tile by tile, and their gradient, so that
    each tile of the weight's is reduced as it is born (as "Cut Your Losses in Large-Vocabulary Language Models" does,
    Wijmans et al. 2024). One product more for a weight, and its gradient, that never exist::

        %t  = zero.tiled [%x, %wt, ...]                       per tile: logits, their log-sum-exp
        %z  = getitem %t, 0                                   f32[16,1]
        ...                                                   the loss of each token, their sum
        %u  = zero.tiled [%x, %wt, %z, %w, ...]               per tile: logits again, their gradient
        %dx, %dw = getitem %u

    Whatever the sizes, a head that is recognised is rewritten (with one tile if it is small): which weights backward
    gathers must not depend on sizes of activations, which ranks may disagree about.

    Refuses: nothing. What is left whole, with the reason in the report: logits that are returned; operators that mix
    tokens or of which nothing is known; a gradient that is not linear in one scalar; the last product of a forward
    that would take several tiles, where no softmax follows. What is in tiles of tokens alone, the weight gathered
    whole: a loss that needs a sum over the vocabulary of what another such sum is in.
    """

    tile_bytes: int | None = None
    tile_heads: bool = False
    name: str = "tile-loss"

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        heads = _heads(graph)
        if ctx.phase == "joint":
            for node in _other_heads(graph, heads):
                columns = row_propagation.shape(node)[-1]
                if rows_of_tiles(node, ctx.machine, self.tile_bytes, columns)[0] < _tokens(node):
                    _leave(node, "no log-softmax, log-sum-exp or maximum of them is found")
        for k, node in enumerate(heads):
            try:
                _split_reductions(graph, node)
                columns_last(graph, node)
                self._replace(Head(graph, node), ctx, f"loss{k}")
            except Left as why:
                _leave(node, str(why))
        if heads:
            graph.eliminate_dead_code()

    def _replace(self, head: Head, ctx: Context, key: str) -> None:
        plan = plan_of(head.head, ctx)
        # With ``tile_bytes`` it is decided already which weights are gathered in tiles.
        if plan is not None and (self.tile_heads if self.tile_bytes is None else plan.tile_rows):
            try:
                Vocabulary(head, plan, ctx.machine, self.tile_bytes, key).replace()
                return
            except Left as why:
                head.whole = str(why)
        head.replace(ctx.machine, self.tile_bytes, key)


def _leave(head: fx.Node, why: str) -> None:
    what = f"{dump.type_text(facts.value(head))}, logits of {factor_names(head)}"
    facts.set_note(head, f"left whole: {what}, because {why}")


def _heads(graph: fx.Graph) -> list[fx.Node]:
    return [
        n for n in graph.nodes if n.target in row_propagation._PRODUCTS and _widens(n) and _softmax_follows(n)
    ]


def _widens(product: fx.Node) -> bool:
    """Whether its second factor is made of weights alone, and it has more columns than its first one."""
    columns, inner = row_propagation.shape(product)[-1], row_propagation.shape(product.args[-2])[-1]
    sized = isinstance(columns, int) and isinstance(inner, int)
    return sized and columns > inner and factor_names(product) != ""


def _other_heads(graph: fx.Graph, heads: Sequence[fx.Node]) -> list[fx.Node]:
    """Products that no other one of forward follows, and no softmax: nothing is known of their loss. What is returned
    as it is may be no logits at all."""
    backward = facts.depends_on_tangents(graph)
    before: set[fx.Node] = set()  # what another product of forward depends on
    out = []
    for node in reversed(graph.nodes):
        if node in backward or node.op != "call_function":
            continue
        if (
            node not in before
            and node.target in (*row_propagation._PRODUCTS, aten.bmm.default)
            and _widens(node)
        ):
            out.append(node)
        if node in before or multiplies(node):
            before.update(node.all_input_nodes)
    return [n for n in reversed(out) if n not in heads and not _is_returned(n)]


def _tokens(product: fx.Node) -> int:
    return facts.hint(facts.value(product).numel()) // int(row_propagation.shape(product)[-1])


def _is_returned(head: fx.Node) -> bool:
    """Whether nothing but its shape and dtype changes on its way out."""
    todo = [head]
    while todo:
        for user in todo.pop().users:
            if user.op == "output":
                return True
            if user.target in (row_propagation._VIEWS | row_propagation._SAME | row_propagation._PERMUTES):
                todo.append(user)
    return False


def _near(head: fx.Node) -> list[fx.Node]:
    """What follows a head up to the next product."""
    seen, todo = {head: None}, [head]
    while todo:
        for user in todo.pop().users:
            if user not in seen and user.op == "call_function" and not multiplies(user):
                seen[user] = None
                todo.append(user)
    return list(seen)


def _softmax_follows(head: fx.Node) -> bool:
    todo, seen = [head], {head}
    while todo:
        node = todo.pop()
        for user in node.users:
            if user.target in _SOFTMAX:
                return True
            simple = row_propagation.is_pointwise(user) or user.target in (
                row_propagation._VIEWS | row_propagation._SAME | row_propagation._PERMUTES
            )
            if (simple or user.target is aten.slice.Tensor) and user not in seen:
                seen.add(user)
                todo.append(user)
    return False


def _split_reductions(graph: fx.Graph, head: fx.Node) -> None:
    """Give means over tokens and the operators of the negative log likelihood as sums and divisions."""
    if free_unbacked_symbols(facts.value(head)):
        raise Left("how many tokens there are depends on data")
    todo = [head]
    while todo:
        for user in todo.pop().users:
            if user.op == "output":
                raise Left("the logits are returned: return the loss alone from what is compiled")
            if user.target in (row_propagation._VIEWS | row_propagation._SAME):
                todo.append(user)
    for node in _near(head):
        if node.target in _SPLIT:
            _inline(graph, node)
    _split_new(graph)
    for node in _near(head):
        if node.target in (aten.sym_size.int, aten.sym_numel.default):
            with graph.inserting_before(node):
                node.replace_all_uses_with(Emitter(graph, node).number(facts.value(node)))
            graph.erase_node(node)
        elif node.target is aten.mean.default:
            given = node.args[0]
            emit = Emitter(graph, node)
            with graph.inserting_before(node):
                total = emit(aten.sum.default, given, **node.kwargs)
                new = emit(aten.div.Tensor, total, facts.value(given).numel())
            node.replace_all_uses_with(new)
            graph.erase_node(node)


def _split_new(graph: fx.Graph) -> None:
    """Give what is filled with one number without the tensor whose dtype it takes: it would depend on that. In the
    gradient of a lookup this is the gradient of what was found."""
    for target in (aten.new_full.default, aten.new_zeros.default):
        for node in graph.find_nodes(op="call_function", target=target):
            val, (_, sizes, *number) = facts.value(node), node.args
            with graph.inserting_before(node):
                new = Emitter(graph, node)(
                    aten.full.default, sizes, *(number or [0]), dtype=val.dtype, device=val.device
                )
            node.replace_all_uses_with(new)
            graph.erase_node(node)


def _inline(graph: fx.Graph, node: fx.Node) -> None:
    """Replace ``node`` by its decomposition."""
    from torch._decomp import decomposition_table

    tensors = list(node.all_input_nodes)
    rule = decomposition_table[node.target]

    def run(*values: object) -> object:
        given = dict(zip(tensors, values, strict=True))
        args, kwargs = tree_map(lambda a: given[a] if isinstance(a, fx.Node) else a, (node.args, node.kwargs))
        out = rule(*args, **kwargs)
        return (
            tuple(out) if isinstance(out, tuple) else out
        )  # without a named tuple, which the graph would call

    with Emitter(graph, node).fake():
        traced = make_fx(run)(*[facts.value(n) for n in tensors])
    env = dict(zip(traced.graph.find_nodes(op="placeholder"), tensors, strict=True))
    with graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "call_function":
                env[inner] = graph.node_copy(inner, lambda n: env[n])
            elif inner.op == "get_attr":
                raise Left(f"{node.target} needs a constant")
            elif inner.op == "output":
                results = tree_map(lambda n: env[n], inner.args[0], is_leaf=lambda n: isinstance(n, fx.Node))
    if isinstance(results, (list, tuple)):
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
    else:
        node.replace_all_uses_with(results)
    graph.erase_node(node)
