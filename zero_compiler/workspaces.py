"""Bytes that operators hold while they run, beside what they read and what they return."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from .ir import facts, ops

_aten = torch.ops.aten
_PACKED = 256 << 10
_WHOLE = (torch.float32, torch.float64)  # oneDNN packs operands of half precision, by rules of its own


def workspaces(graph: fx.Graph, sizes: facts.Sizes | None = None) -> dict[str, int]:
    """By the name of an operator, most bytes that one of those of this name holds; without those of which it is not
    known."""
    found: dict[str, list[int | None]] = {name: [] for name in _PRODUCTS}
    for node in graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        count = _OWN.get(node.target)
        nbytes = None if count is None else count(node, sizes)
        name = str(node.target).split(".")[1]
        # A product may be called by another's name, for what it is fused with.
        for key in _PRODUCTS if name in _PRODUCTS else (name,):
            found.setdefault(key, []).append(nbytes)
    known = {name: [n for n in each if n is not None] for name, each in found.items()}
    return {name: max(each, default=0) for name, each in known.items() if len(each) == len(found[name])}


def onednn_bytes(node: fx.Node, sizes: facts.Sizes | None) -> int:
    """oneDNN copies an input whose rows do not lie in one piece, and packs blocks of both operands (measured: up to a
    quarter of a MiB)."""
    given = facts.value(node.args[0])
    return (facts.bytes_of(given, sizes) if given.stride(-1) != 1 else 0) + _PACKED


def _product_bytes(node: fx.Node, sizes: facts.Sizes | None) -> int | None:
    """A matrix whose rows and columns both lie apart is copied."""
    if facts.value(node).dtype not in _WHOLE:
        return None
    operands = [facts.value(n) for n in node.all_input_nodes]
    apart = (t for t in operands if t.dim() > 1 and 1 not in (t.stride(-1), t.stride(-2)))
    return sum(facts.bytes_of(t, sizes) for t in apart)


def _attention_bytes(node: fx.Node, sizes: facts.Sizes | None) -> int | None:
    """A block of scores, its sums and its result, for each thread."""
    rows, keys, width, threads = _blocks(node.args[0], node.args[1], sizes)
    if facts.value(node.args[0]).dtype != torch.float32:
        return None
    return threads * rows * (keys + 2 + width) * 4


def _attention_backward_bytes(node: fx.Node, sizes: facts.Sizes | None) -> int | None:
    """Two blocks of scores and a sum of each row, for each thread; and the gradient, where it is laid out anew."""
    grad, (rows, keys, _, threads) = facts.value(node.args[0]), _blocks(node.args[1], node.args[2], sizes)
    if grad.dtype != torch.float32:
        return None
    copied = 0 if grad.transpose(1, 2).is_contiguous() else facts.bytes_of(grad, sizes)
    return copied + threads * (2 * rows * keys + rows) * 4


def _blocks(query: fx.Node, key: fx.Node, sizes: facts.Sizes | None) -> tuple[int, int, int, int]:
    """Rows, keys and width of a block, and threads, as `FlashAttentionKernel.cpp` of torch has them."""
    length, width = (facts.hint(n, sizes) for n in facts.value(query).shape[2:])
    keys = facts.hint(facts.value(key).shape[2], sizes)
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(512, keys), width, torch.get_num_threads()


_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
_OWN: dict[torch._ops.OpOverload, Callable[[fx.Node, facts.Sizes | None], int | None]] = {
    ops.onednn_linear: onednn_bytes,
    ops.land_mm: _product_bytes,
    _aten.mm.default: _product_bytes,
    _aten.addmm.default: _product_bytes,
    _aten.bmm.default: _product_bytes,
    _aten.baddbmm.default: _product_bytes,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention_bytes,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward_bytes,
}
