"""CostModel: bytes and FLOPs of operators and transfers, and the time they take on a given machine.

Works on the fake values of a graph. Where a size is symbolic the result is a sympy expression in the same
symbols; ``at_hints`` turns it into a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ..ir import facts, ops
from ..ranks.mesh import TENSOR
from .hardware import HardwareSpec, Link

_aten, _functional = torch.ops.aten, torch.ops._c10d_functional


# A number, or an expression of the sizes that may change.
Amount: TypeAlias = "float | sympy.Expr"


def _attention(query: object, key: object, value: object, *args: object, **kwargs: object) -> object:
    return sdpa_flop_count(query, key, value)


def _attention_backward(
    grad: torch.Tensor, query: object, key: object, value: object, *args: object, **kwargs: object
) -> object:
    return sdpa_backward_flop_count(grad, query, key, value)


def _add_product(
    out: torch.Tensor, a: Sequence[int], b: Sequence[int], *args: object, **kwargs: object
) -> object:
    return 2 * a[0] * a[1] * b[1]


def _linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_val: torch.Tensor
) -> object:
    return 2 * input[0] * input[1] * weight[0]


# torch's registry lacks the attention of CPUs and products that add to their output, and knows nothing of ours.
_FLOPS: dict[fx.node.Target, Callable[..., Any]] = {
    **flop_registry,
    ops.onednn_linear.overloadpacket: _linear,
    ops.land_mm.overloadpacket: flop_registry[_aten.mm],
    _aten.addmm_: _add_product,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
# Element-wise functions that take many vector instructions, and operators that are full of them.
_SPECIAL = frozenset(
    getattr(_aten, name)
    for name in (
        "exp exp2 expm1 log log1p log2 tanh erf erfc gelu gelu_backward silu silu_backward sigmoid mish softplus "
        "pow sqrt rsqrt sin cos _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data"
    ).split()
)

# Their first operand is a table. What makes another table, as `index_put` does, copies the whole.
_LOOKUPS = frozenset(
    getattr(_aten, name)
    for name in "embedding index _unsafe_index index_select gather index_put_ index_add_".split()
)

# Collectives of the user's own, as tensor parallelism has them, by the kind that a spec knows.
_COLLECTIVES: dict[object, str] = {
    _functional.all_reduce: "all_reduce",
    _functional.all_gather_into_tensor: "all_gather",
    _functional.reduce_scatter_tensor: "reduce_scatter",
}

# Launches of one kernel that a call of `zero.onednn_linear` takes more: 12 us beside 2, for a product of 8 rows.
_ONEDNN_LAUNCHES = 5
# How much faster it must be in calibration, which two runs of may tell apart by as much.
ONEDNN_GAIN = 1.1

# Transfers shorter than this many latencies share a bucket: latency is then at most an eighth of the time.
_LATENCIES = 8


def bucket_bytes(spec: HardwareSpec, world: int, shared: bool = False) -> int:
    """Bytes of full tensors below which a transfer shares a bucket: latency times bandwidth, times eight.

    Over memory that ranks share, those of reductions: most gathers read shards where they lie, so that their bandwidth
    says how fast nothing is moved, and a bucket of that size would only hold memory.
    """
    if world == 1:
        return 1 << 20
    link = spec.collective("reduce_scatter" if shared else "all_gather", world, shared)
    return int(_LATENCIES * link.latency_us * link.bytes_per_us)


def launch_bytes(spec: HardwareSpec) -> int:
    """Bytes that memory reads in the time of eight launches of kernels.

    Weights of fewer bytes are used up faster than the host can start what uses the next ones.
    """
    return int(_LATENCIES * spec.kernel_us * spec.memory_bytes_per_us)


def smaller_buckets(spec: HardwareSpec, world: int, shared: bool = False) -> list[int]:
    """What a memory budget may make of that: halves of it, down to transfers of which half the time is latency."""
    sizes = []
    latencies, size = _LATENCIES, bucket_bytes(spec, world, shared)
    while world > 1 and latencies > 1:
        latencies, size = latencies // 2, size // 2
        sizes.append(size)
    return sizes


# Share of the time of a tile's products that reading their weight again, and its gradient, may take.
REREAD = 0.1


def tile_rows(spec: HardwareSpec, dtype: str) -> int:
    """Rows of a tile of logits with which reading the weight for every tile takes ``REREAD`` of its products' time.

    A tile of ``r`` rows does three products of ``2 r n`` operations with a weight of ``n`` elements.
    """
    rate = spec.matmul_flops_per_us.get(dtype, spec.matmul_flops_per_us["float32"])
    us = reread_us(spec, reread_bytes(1, getattr(torch, dtype)))
    return max(1, math.ceil(us * rate / (6 * REREAD)))


def reread_us(spec: HardwareSpec, nbytes: int) -> float:
    """What tiles take longer whose products move so many bytes more.

    It counts as their traffic does, and once at least: with weights of 16 and 65 MB a tile more took 1.6 to 3.1 times
    the bytes over the bandwidth, on a host where ``matmul_traffic`` was 2.6.
    """
    return max(1.0, spec.matmul_traffic) * nbytes / spec.memory_bytes_per_us


def reread_bytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes that every tile of logits moves beside its own: it reads the weight twice, for logits and for the gradient
    of their input, and adds to the gradient of the weight, in float32."""
    return numel * (2 * dtype.itemsize + 8)


def expr(size: float | torch.SymInt) -> Amount:
    """A size as a number, or as a sympy expression where it is symbolic."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def hints(graph: fx.Graph) -> dict[object, int]:
    """The values that the capture saw for the symbols in the sizes of a graph."""
    known: dict[object, int] = {}
    for node in graph.nodes:
        for leaf in facts.leaves(facts.value(node)):
            sizes: Iterable[object] = (leaf,)
            if isinstance(leaf, torch.Tensor):
                sizes = leaf.shape if leaf._has_symbolic_sizes_strides else ()
            for size in sizes:
                if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                    known[size.node.expr] = facts.hint(size)
    return known


def at_hints(cost: Amount, known: Mapping[sympy.Symbol, int]) -> float:
    """A number for a cost that may be symbolic."""
    return float(cost.subs(known)) if isinstance(cost, sympy.Expr) else float(cost)


@dataclass(frozen=True)
class CostModel:
    """Costs on one machine; equal specs and graphs give equal costs.

    A kernel takes the longer of its arithmetic and its memory traffic (roofline: Williams, Waterman and
    Patterson, 2009), plus the time to launch it. Where libraries copy operands before they multiply, a matrix product
    takes as many times its traffic as the machine's ``matmul_traffic`` says, beside its arithmetic.
    """

    spec: HardwareSpec

    def flops(self, node: fx.Node) -> Amount:
        """Floating-point operations of a matrix-like operator; 0 for the others, which memory bounds."""
        packet = getattr(node.target, "overloadpacket", None)
        if packet not in _FLOPS:
            return 0
        args, kwargs = facts.mapped(
            lambda a: _shaped(facts.value(a)) if isinstance(a, fx.Node) else a, (node.args, node.kwargs)
        )
        return expr(_FLOPS[packet](*args, **kwargs, out_val=_shaped(facts.value(node))))

    def products(self, graph: fx.Graph) -> tuple[float, float]:
        """Floating-point operations of the matrix-like operators of a graph, and what they take at full rate."""
        known = hints(graph)
        return (
            math.fsum(at_hints(self.flops(n), known) for n in graph.nodes),
            math.fsum(at_hints(self._arithmetic_us(n), known) for n in graph.nodes),
        )

    def moved_bytes(self, node: fx.Node) -> Amount:
        """Bytes that the operator reads and writes when it runs by itself; 0 for a view."""
        if facts.aliased_inputs(node) and not _mutates(node):
            return 0
        return _written_bytes(node) + sum(_read_bytes(node, n) for n in node.all_input_nodes)

    def node_us(self, node: fx.Node) -> Amount:
        """Time of one operator that runs by itself."""
        moved = self.moved_bytes(node)
        if moved == 0:
            return 0.0
        link = self._collective(node)
        if link is not None:
            full = _longer(*(tensor_bytes(facts.value(n)) for n in (node, node.all_input_nodes[0])))
            return link.latency_us + full / link.bytes_per_us
        arithmetic = self._arithmetic_us(node) + self._copies_us(node) + self.vector_us(node)
        return _longer(arithmetic, moved / self.spec.memory_bytes_per_us) + self.spec.kernel_us

    def heavy(self, node: fx.Node) -> bool:
        """Whether it is matrix-like or a collective: it runs by itself; what it reads and writes lies in memory."""
        packet = getattr(node.target, "overloadpacket", None)
        return packet in _FLOPS or packet in _COLLECTIVES

    def region_us(self, body: Sequence[fx.Node], outs: Sequence[fx.Node], fused: bool) -> Amount:
        """Time of a compute segment.

        With ``fused`` its element-wise parts cost one pass over what enters and leaves them, or their vector
        instructions where those take longer: matrix products and their operands count by themselves, and of
        the rest only what crosses between the two, or the border of the segment.

        Args:
            body: the nodes of the segment, in order. ``outs``: those whose values it gives.
        """
        nodes = [n for n in body if facts.is_compute(n)]
        if not fused:
            return sum(self.node_us(n) for n in nodes)
        # In the order of the graph, that sums are equal on all ranks.
        total = sum(self.node_us(n) for n in nodes if self.heavy(n))
        light = [n for n in nodes if not self.heavy(n) and self.moved_bytes(n) != 0]
        if not light:
            return total
        inside = set(light)
        beside = set(body) - inside
        leaves = {n for n in light if any(u in beside for u in n.users)} | inside.intersection(outs)
        moved: Amount = sum(_written_bytes(n) for n in light if n in leaves)
        entering: dict[fx.Node, Amount] = {}
        for n in light:
            for i in n.all_input_nodes:
                if i not in inside:
                    entering[i] = _longer(entering.get(i, 0), _read_bytes(n, i))
        moved += sum(entering.values())
        vector = sum(self.vector_us(n) for n in light)
        return total + _longer(vector, moved / self.spec.memory_bytes_per_us) + self.spec.kernel_us

    def vector_us(self, node: fx.Node) -> Amount:
        """Time of an element-wise operator or a reduction on data in cache; 0 for matrix-like ones."""
        packet = getattr(node.target, "overloadpacket", None)
        if packet in _FLOPS:
            return 0.0
        table = _table(node)
        both = (node, *node.all_input_nodes)
        sizes = [
            _numel(facts.value(n))
            for n in both
            if n is not table and not (n is node and table and _mutates(n))
        ]
        most: Amount = 0
        for size in sizes:
            most = _longer(most, size)
        spec = self.spec
        rate, share = spec.vector_per_us, spec.vector_share
        if packet in _SPECIAL:
            rate, share = spec.special_per_us, spec.special_share
        return most / (rate * share.get(_dtype_name(node), 1.0))

    def _arithmetic_us(self, node: fx.Node) -> Amount:
        flops = self.flops(node)
        if flops == 0:
            return 0.0
        onednn = node.target is ops.onednn_linear
        rates = self.spec.onednn_flops_per_us if onednn else self.spec.matmul_flops_per_us
        return flops / rates.get(_dtype_name(node), rates["float32"])

    def _copies_us(self, node: fx.Node) -> Amount:
        """What of a matrix product's memory traffic comes on top of its arithmetic; 0 for other operators."""
        share = self.spec.matmul_traffic
        if share == 0 or self.flops(node) == 0:
            return 0.0
        return share * self.moved_bytes(node) / self.spec.memory_bytes_per_us

    def _collective(self, node: fx.Node) -> Link | None:
        """Of a collective of the user's over more than one rank, where the spec has any; they run over c10d."""
        kind = _COLLECTIVES.get(getattr(node.target, "overloadpacket", None))
        if kind is None or not self.spec.covers("c10d"):
            return None
        name: fx.node.Argument = node.args[-1]
        world = _resolve_process_group(name).size()
        return self.spec.collective(kind, world, over=TENSOR) if world > 1 else None

    def onednn_pays(self, node: fx.Node, known: Mapping[object, int]) -> bool:
        """Whether oneDNN is clearly faster than torch's BLAS at a product in float32, launches included.

        Both copy operands, about as much. Where the result goes does not count: the libraries add in other orders, and
        a placement must not change a bit.
        """
        blas = self.spec.matmul_flops_per_us["float32"]
        onednn = self.spec.onednn_flops_per_us.get("float32", blas)
        count, copies = at_hints(self.flops(node), known), at_hints(self._copies_us(node), known)
        launches = _ONEDNN_LAUNCHES * self.spec.kernel_us
        return ONEDNN_GAIN * (count / onednn + copies + launches) < count / blas + copies


def tensor_bytes(val: object) -> Amount:
    """Bytes of the tensors in a fake value; symbolic where their sizes are."""
    total: Amount = 0
    for t in facts.leaves(val):
        if isinstance(t, torch.Tensor):
            total = total + expr(t.numel()) * t.element_size()
    return total


def _dtype_name(node: fx.Node) -> str:
    """Of the first tensor among its results."""
    found = (t.dtype for t in facts.leaves(facts.value(node)) if isinstance(t, torch.Tensor))
    return str(next(found, None)).removeprefix("torch.")


def _numel(val: object) -> object:
    most: Amount = 0
    for t in facts.leaves(val):
        if isinstance(t, torch.Tensor):
            most = _longer(most, expr(t.numel()))
    return most


def _shaped(val: object) -> object:
    return facts.mapped(lambda t: t.shape if isinstance(t, torch.Tensor) else t, val)


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _table(node: fx.Node) -> fx.Node | None:
    """The operand of which a lookup reads, or writes in place, only what its indices name; None of other operators."""
    found = node.args[0] if getattr(node.target, "overloadpacket", None) in _LOOKUPS else None
    return found if isinstance(found, fx.Node) else None


def _read_bytes(reader: fx.Node, operand: fx.Node) -> Amount:
    """What ``reader`` reads of an operand: of a table as much as it finds there, or adds to it."""
    if operand is not _table(reader):
        return tensor_bytes(facts.value(operand))
    if _mutates(reader):
        return sum(tensor_bytes(facts.value(n)) for n in reader.all_input_nodes if n is not operand)
    return tensor_bytes(facts.value(reader))


def _written_bytes(node: fx.Node) -> Amount:
    table = _table(node) if _mutates(node) else None
    return tensor_bytes(facts.value(node)) if table is None else _read_bytes(node, table)


def _longer(a: Amount, b: Amount) -> Amount:
    if isinstance(a, sympy.Expr) or isinstance(b, sympy.Expr):
        # Left as it is until sizes are known: to compare two expressions of symbols takes sympy milliseconds.
        return sympy.Max(a, b, evaluate=False)
    return max(a, b)
