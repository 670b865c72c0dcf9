"""Joint graph: no full weight crosses from forward to backward."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from zero_compiler.ir import facts, ops

from .base import Context

# Above every id that torch.utils.checkpoint gives a region: partitioners compare ids, and save what a
# higher region reads from a lower one.
REGION = 1 << 40

_aten = torch.ops.aten
# Partitioners do not recompute these; said here so that it does not depend on their settings.
_COSTLY = frozenset(
    {
        ops.tiled,
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.addbmm.default,
        _aten._grouped_mm.default if hasattr(_aten, "_grouped_mm") else _aten.mm.default,
        _aten.convolution.default,
        _aten.embedding.default,
        _aten._embedding_bag.default,
        _aten.mkldnn_rnn_layer.default,
    }
)
_PRODUCTS = (_aten.mm.default, _aten.bmm.default)


@dataclass(frozen=True)
class TagRecompute:
    """Mark gathers, and all that derives from weights alone, to be made again in backward.

    Before::

        %w = zero.unshard %p [w]
        %t = aten.t %w
        %c = aten._to_copy %w, dtype=bfloat16

    After: the same nodes, each tagged ``MUST_RECOMPUTE``. With only the markers tagged, a partitioner may
    save views and casts of all full weights (under autocast it does).

    Weights that backward needs for autograd's own formulas may be used there by recomputed values too, and so
    may small ones. The readers of the others (large; or whose reader is an operator that is too costly to run
    twice) are saved and not recomputed: so which weights backward gathers does not depend on the sizes of
    activations, which ranks may legally disagree about. Under a budget for activations (``recompute``) backward
    gathers every small weight that forward reads, and the costly readers of what it gathers may be run twice.

    What one region of ``torch.utils.checkpoint`` hands to the next one is saved. Partitioners do so themselves, but for
    views and for one of several results of an operator: there it is what they are of that is tagged ``MUST_SAVE``.

    Refuses: nothing.
    """

    bucket_bytes: int = 0
    recompute: bool = False
    name: str = "tag-recompute"

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        for node in _handed_on(graph):
            facts.tag_recompute(node, CheckpointPolicy.MUST_SAVE, 0)
        backward = facts.depends_on_tangents(graph)
        derived = facts.made_of_weights(graph)
        allowed = regathered(graph, self.bucket_bytes, self.recompute)
        for node in derived:
            facts.tag_recompute(node, CheckpointPolicy.MUST_RECOMPUTE, REGION)
        for node in graph.find_nodes(op="call_function", target=ops.tiled):
            if facts.user_region(node):
                continue
            # What it makes for backward is made where the loss is.
            for kept in (node, *node.users):
                facts.tag_recompute(kept, CheckpointPolicy.MUST_SAVE, 0)
        for node, marks in derived.items():
            for user in _forward_readers(node, derived, backward):
                costly = _is_costly(user, node) and not self.recompute
                if (costly or not marks <= allowed) and not facts.user_region(user):
                    facts.tag_recompute(user, CheckpointPolicy.MUST_SAVE, 0)


def _handed_on(graph: fx.Graph) -> set[fx.Node]:
    """What makes the values that are views, or one of several results, and that a later region reads."""

    def region(node: fx.Node) -> int | None:
        again = node.meta.get("recompute") in (
            CheckpointPolicy.MUST_RECOMPUTE,
            CheckpointPolicy.PREFER_RECOMPUTE,
        )
        return node.meta.get("ac_graph_id") if again else None

    out: set[fx.Node] = set()
    for node in graph.nodes:
        here = region(node)
        if here is None or not any((region(u) or here) > here for u in node.users):
            continue
        source = node
        while region(source) == here and (bases := facts.aliased_inputs(source)):
            source = bases[0]
        if source is node or region(source) != here:
            continue
        out.add(source)
        if not isinstance(facts.value(source), torch.Tensor):
            out.update(result for result in source.users if result.users)
    return out


def regathered(graph: fx.Graph, small_bytes: int, recompute: bool = False) -> set[fx.Node]:
    """Markers of the weights that backward gathers: see :class:`TagRecompute`."""
    backward = facts.depends_on_tangents(graph)
    out: set[fx.Node] = set()
    derived = facts.made_of_weights(graph)
    for node, marks in derived.items():
        if any(u in backward for u in node.users):
            out |= marks
        elif any(recompute or not _is_costly(u, node) for u in _forward_readers(node, derived, backward)):
            out |= {m for m in marks if facts.bytes_of(facts.value(m)) < small_bytes}
    return out


def _is_costly(reader: fx.Node, weight: fx.Node) -> bool:
    """Whether an operator that reads something made of weights is too costly to run twice. One that adds it to a
    product is a part of that: whether torch writes them as one operator depends on how many rows there are."""
    if reader.target in _COSTLY:
        return True
    if reader.target is not _aten.add.Tensor or weight not in reader.args:
        return False
    (other,) = [a for a in reader.args[:2] if a is not weight] or [weight]
    while isinstance(other, fx.Node) and (
        other.target is _aten._unsafe_view.default or facts.aliased_inputs(other)
    ):
        other = other.all_input_nodes[0]
    return isinstance(other, fx.Node) and other.target in _PRODUCTS


def _forward_readers(
    node: fx.Node, derived: Container[fx.Node], backward: Container[fx.Node]
) -> list[fx.Node]:
    return [u for u in node.users if u not in derived and u not in backward and u.op == "call_function"]
