"""Bytes that operators hold while they run, beside what they read and what they return.

Counted for products and attention in float32 on CPU, as torch's sources have them. For convolutions, in half precision,
and on an accelerator, libraries lay operands out anew and sum in another precision by rules of their own: as many bytes
as the operator reads and returns are taken for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import fx

from ..ir import facts, ops

_aten = torch.ops.aten
_PACKED = 256 << 10
_WHOLE = (torch.float32, torch.float64)
_BY_ONEDNN = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK = 16  # channels, with AVX-512


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


def one_by_one(node: fx.Node, sizes: facts.Sizes | None) -> int:
    """The same of an operator by itself, where it may be as much as its operands."""
    return _OWN[node.target](node, sizes) if node.target in _LARGE else 0


def onednn_bytes(node: fx.Node, sizes: facts.Sizes | None) -> int:
    """oneDNN copies an input whose rows do not lie in one piece, and packs blocks of both operands (measured: up to a
    quarter of a MiB)."""
    given = facts.value(node.args[0])
    return (facts.bytes_of(given, sizes) if given.stride(-1) != 1 else 0) + _PACKED


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    """That an operator reads and returns."""
    values = facts.leaves([facts.value(n) for n in (node, *node.all_input_nodes)])
    return [t for t in values if isinstance(t, torch.Tensor)]


def _read_and_returned(node: fx.Node, sizes: facts.Sizes | None) -> int:
    return sum(facts.bytes_of(t, sizes) for t in _tensors(node))


def _convolution_bytes(node: fx.Node, sizes: facts.Sizes | None) -> int:
    """oneDNN lays out anew what it is given and what it makes, in whole blocks of channels, and sums the gradient of a
    weight in float32 (in bfloat16 with AMX: measured). For a dtype that it does not take torch's own kernels write the
    windows of all pictures beside each other."""
    backward = node.target is _aten.convolution_backward.default
    given = node.args[1:] if backward else node.args
    picture, weight = facts.value(given[0]), facts.value(given[1])
    nbytes = _PACKED
    for t in _tensors(node):
        channels = range(2) if t.shape == weight.shape else range(1, min(t.dim(), 2))
        numbers = [facts.hint(t.shape[dim], sizes) for dim in channels]
        in_blocks = math.prod(-(-n // _BLOCK) * _BLOCK for n in numbers) * (
            facts.bytes_of(t, sizes) // max(math.prod(numbers), 1)
        )
        nbytes += in_blocks
        if backward and t is weight and t.dtype not in _WHOLE:
            nbytes += in_blocks * torch.float32.itemsize // t.dtype.itemsize
    if picture.dtype not in _BY_ONEDNN:
        out = facts.value(node.args[0] if backward else node)
        places = (picture if given[6] else out).shape  # of a transposed one those that it reads
        count = math.prod(facts.hint(n, sizes) for n in (places[0], *places[2:], *weight.shape[1:], given[8]))
        nbytes += count * picture.dtype.itemsize
    return nbytes


def _product_bytes(node: fx.Node, sizes: facts.Sizes | None) -> int:
    """A matrix whose rows and columns both lie apart is copied."""
    if facts.value(node).dtype not in _WHOLE:
        return _read_and_returned(node, sizes)
    operands = [facts.value(n) for n in node.all_input_nodes]
    apart = (t for t in operands if t.dim() > 1 and 1 not in (t.stride(-1), t.stride(-2)))
    return sum(facts.bytes_of(t, sizes) for t in apart)


def _attention_bytes(node: fx.Node, sizes: facts.Sizes | None) -> int:
    """A block of scores, its sums and its result, for each thread."""
    rows, keys, width, threads = _blocks(node.args[0], node.args[1], sizes)
    laid_out = 0 if facts.value(node.args[0]).dtype == torch.float32 else _read_and_returned(node, sizes)
    return laid_out + threads * rows * (keys + 2 + width) * 4


def _attention_backward_bytes(node: fx.Node, sizes: facts.Sizes | None) -> int:
    """Two blocks of scores and a sum of each row, for each thread; and the gradient, where it is laid out anew."""
    grad, (rows, keys, _, threads) = facts.value(node.args[0]), _blocks(node.args[1], node.args[2], sizes)
    if grad.dtype != torch.float32:
        laid_out = _read_and_returned(node, sizes)
    else:
        laid_out = 0 if grad.transpose(1, 2).is_contiguous() else facts.bytes_of(grad, sizes)
    return laid_out + threads * (2 * rows * keys + rows) * 4


def _blocks(query: fx.Node, key: fx.Node, sizes: facts.Sizes | None) -> tuple[int, int, int, int]:
    """Rows, keys and width of a block, and threads, as `FlashAttentionKernel.cpp` of torch has them."""
    length, width = (facts.hint(n, sizes) for n in facts.value(query).shape[2:])
    keys = facts.hint(facts.value(key).shape[2], sizes)
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(512, keys), width, torch.get_num_threads()


# As Inductor calls them.
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "bias_addmm", "_mm_plus_mm"})
_OWN: dict[torch._ops.OpOverload, Callable[[fx.Node, facts.Sizes | None], int]] = {
    ops.onednn_linear: onednn_bytes,
    ops.land_mm: _product_bytes,
    _aten.mm.default: _product_bytes,
    _aten.addmm.default: _product_bytes,
    _aten.bmm.default: _product_bytes,
    _aten.baddbmm.default: _product_bytes,
    _aten.convolution.default: _convolution_bytes,
    _aten.convolution_backward.default: _convolution_bytes,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention_bytes,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward_bytes,
    **{
        getattr(_aten, f"_scaled_dot_product_{kind}_attention{end}").default: _read_and_returned
        for kind in ("flash", "efficient", "cudnn")
        for end in ("", "_backward")
    },
}
_LARGE = (ops.onednn_linear, _aten.convolution.default, _aten.convolution_backward.default)
