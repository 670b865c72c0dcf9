"""Backward graph: gradients that rest in files are made in memory from which they can be written."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from zero_compiler.cost.cost import hints
from zero_compiler.ir import facts, ops

from .base import Context, ParamPlan
from .emitter import Emitter
from .pick_kernels import chooser

_aten = torch.ops.aten
_VIEWS = (_aten.t.default, _aten.permute.default, _aten.view.default)
_LEAST_BYTES = 1 << 20  # of a gradient: to copy less costs less than a block of its own


@dataclass(frozen=True)
class LandProducts:
    """Make a gradient that is a matrix product in a block of its owner's landing memory (`writeback_buffers.py`).

    On one rank nothing is summed, so that a reduction hands on what it was given; a product in fresh memory would take
    a fault of every page, and then be copied to memory that direct transfers accept.

    Before::

        %g = aten.mm %a, %b
        %s = zero.reduce %g

    After::

        %g = zero.land_mm %a, %b, "owner"
        %s = zero.reduce %g

    Refuses: nothing. Left alone are gradients below 1 MiB, of several ranks, that rest elsewhere, that are made or
    reduced in another dtype, that something else reads too, that are no products, or that `pick_kernels.py` gives to
    another library: it does so wherever the gradient rests, and so the same bits are made.
    """

    kernels: bool = False
    name: str = "land-products"

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        if not any(map(_lands, ctx.params.values())):
            return
        emit: Emitter | None = None
        cost, known = chooser(ctx.machine) if self.kernels else None, hints(graph)
        for start in list(graph.find_nodes(op="call_function", target=ops.reduce)):
            grads = start.args[0]
            direct = []
            for ref, grad in zip(facts.params(start), grads, strict=True):
                product = _product(grad) if _lands(ctx.params[ref]) else None
                if product is None or (cost is not None and cost.onednn_pays(product, known)):
                    continue
                emit = emit or Emitter(graph, product)
                emit.origin = product
                with graph.inserting_before(product):
                    new = emit.node(ops.land_mm, (*product.args, ref.owner), {}, facts.value(product))
                product.replace_all_uses_with(new)
                graph.erase_node(product)
                direct.append(ref.name)
            facts.set_direct(start, direct)


def _lands(plan: ParamPlan) -> bool:
    one_rank = plan.world == 1 and plan.copies == 1
    return one_rank and plan.grad_path == ("nvme",) and plan.gather_dtype == plan.reduce_dtype == plan.dtype


def _product(grad: fx.Node) -> fx.Node | None:
    """The product that ``grad`` is, in the same layout, maybe by way of a transposition and back.

    Nothing else reads it: what is under way to a file must not be written over.
    """
    node: fx.node.Argument = grad
    while node.target in _VIEWS and len(node.users) == 1:
        node = node.args[0]
    if node.op != "call_function" or node.target != _aten.mm.default or len(node.users) != 1:
        return None
    given, made = facts.value(grad), facts.value(node)
    if facts.symbols_of(made) or made.device.type != "cpu" or facts.bytes_of(made) < _LEAST_BYTES:
        return None
    same = given.shape == made.shape and given.is_contiguous() and made.is_contiguous()
    return node if same else None
