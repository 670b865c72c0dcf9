"""Forward or backward graph: large matrix products go to the faster of the CPU's libraries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from zero_compiler.cost.cost import CostModel, at_hints, hints
from zero_compiler.cost.hardware import HardwareSpec
from zero_compiler.ir import facts, ops

from .base import Context
from .emitter import Emitter

_aten = torch.ops.aten


@dataclass(frozen=True)
class PickKernels:
    """Replace float32 matrix products on CPU where oneDNN is faster by more than its launch.

    torch gives float32 products to its BLAS, which on processors that the BLAS was not written for may leave half of
    their arithmetic unused. Which library is faster is a measured property of the machine (``zero-compiler
    calibrate``), so nothing changes where none was measured. Both compute in float32; sums may differ in their order.

    Before::

        %y = aten.addmm %b, %x, %wt

    After::

        %w = aten.permute %wt, [1, 0]
        %y = zero.onednn_linear %x, %w, %b

    Refuses: nothing. Left alone are products of other dtypes and devices, with factors, or that add a matrix.
    """

    kernels: bool = False
    name: str = "pick-kernels"

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        cost, known = chooser(ctx.machine) if self.kernels else None, hints(graph)
        if cost is None:
            return
        found = [node for node in graph.nodes if _product(node) is not None]
        chosen = [node for node in found if cost.onednn_pays(node, known)]
        if not chosen:
            return
        blas, onednn = (
            rates["float32"] / 1e3 for rates in (cost.spec.matmul_flops_per_us, cost.spec.onednn_flops_per_us)
        )
        emit = Emitter(graph, chosen[0])
        for node in chosen:
            emit.origin, parts = node, _product(node)  # operands may have been replaced by now
            assert parts is not None
            _replace(emit, node, *parts)
        (first, *_) = graph.find_nodes(op="call_function", target=ops.onednn_linear)
        facts.set_note(
            first,
            f"{len(chosen)} of {len(found)} float32 matrix products go to oneDNN: by calibration it does "
            f"{onednn:.0f} GFLOP/s, torch's BLAS {blas:.0f}",
        )


def chooser(machine: HardwareSpec | None) -> CostModel | None:
    """What knows which library does a product faster; None where there is nothing to choose."""
    if machine is None or "float32" not in machine.onednn_flops_per_us:
        return None
    return CostModel(machine)


def blas_us(graph: fx.Graph, machine: HardwareSpec) -> float:
    """What the products of a graph that another library could do take at full rate with torch's BLAS."""
    cost, known = CostModel(machine), hints(graph)
    flops = sum(at_hints(cost.flops(node), known) for node in graph.nodes if _product(node) is not None)
    return flops / machine.matmul_flops_per_us["float32"]


def _product(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """``(a, b, bias)`` of ``a @ b + bias``; None for anything else."""
    if node.op != "call_function" or node.kwargs:
        return None
    if node.target == _aten.mm.default:
        (a, b), bias = node.args, None
    elif node.target == _aten.addmm.default and len(node.args) == 3:
        bias, a, b = node.args
    else:
        return None
    given: list[fx.Node] = [n for n in (node, a, b, bias) if n is not None]
    if not all(_float32_on_cpu(facts.value(n)) for n in given):
        return None
    if bias is not None and not _is_row(facts.value(bias), facts.value(node).shape[1]):
        return None
    return a, b, bias


def _is_row(bias: torch.Tensor, columns: object) -> bool:
    # Of symbolic sizes a comparison would be a new condition on the batch.
    return bias.dim() == 1 and type(bias.shape[0]) is type(columns) is int and bias.shape[0] == columns


def _float32_on_cpu(val: object) -> bool:
    return isinstance(val, torch.Tensor) and val.dtype == torch.float32 and val.device.type == "cpu"


def _replace(emit: Emitter, node: fx.Node, a: fx.Node, b: fx.Node, bias: fx.Node | None) -> None:
    with emit.graph.inserting_before(node):
        weight = b.args[0] if _is_transpose(b) else emit(_aten.permute.default, b, [1, 0])
        product = emit.node(ops.onednn_linear, (a, weight, bias), {}, facts.value(node))
    node.replace_all_uses_with(product)
    emit.graph.erase_node(node)
    if _is_transpose(b) and not b.users:
        emit.graph.erase_node(b)


def _is_transpose(node: fx.Node) -> bool:
    return node.target == _aten.t.default or (
        node.target == _aten.permute.default and list(node.args[1]) == [1, 0]
    )
