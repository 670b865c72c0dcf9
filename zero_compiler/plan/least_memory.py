"""What no plan of a frame takes less than, known before any is searched for: to find none may take minutes.

Weights and their gradients may be gathered and reduced in tiles, logits and MLPs made for some tokens at a time, and
what forward saves be made again. What rests between steps stays; and so do the operands of an operator that nothing
takes apart: attention over a sequence, and the images of a convolution, lie in memory whole while it runs.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx

from ..ir import facts
from ..report.memory import Memory

_aten = torch.ops.aten
# Attention is known by its name: torch has one operator for each kernel of each device.
_ATTENTION = ("_scaled_dot_product_", "_flash_attention", "_efficient_attention")
_CONVOLUTIONS = (_aten.convolution, _aten.convolution_backward)


def least_bytes(memory: Memory, graph: fx.Graph) -> tuple[int, fx.Node | None]:
    """A lower bound of the peak of every plan for ``graph``, and the operator that it comes of.

    Args:
        memory: of the plan without Programs: what rests between steps.
        graph: forward and backward as they were captured, or a forward alone.

    Returns:
        Bytes; and the operator whose operands lie beside what rests, or None where what rests takes more by itself:
        gradients are a part of that, and are not there yet when a forward runs.
    """
    nbytes, node = largest_operator(graph)
    computing = memory.at_rest - memory.gradients + nbytes
    return (computing, node) if computing > memory.at_rest else (memory.at_rest, None)


def largest_operator(graph: fx.Graph) -> tuple[int, fx.Node | None]:
    """The operator that nothing takes apart with most bytes of operands and results, at the sizes of the capture.

    Tensors count once, by the storage that they are views of. Weights do not count, nor what is made of them alone or
    is handed in from outside.
    """
    candidates = [node for node in graph.nodes if _is_whole(node)]
    if not candidates:
        return 0, None
    roots, weights = facts.alias_roots(graph), facts.made_of_weights(graph)
    found: list[tuple[int, fx.Node | None]] = []
    for node in candidates:
        read: Counter[fx.Node] = Counter()  # of each storage
        for operand in node.all_input_nodes:
            for root in roots[operand]:
                if root.op != "placeholder" and root not in weights:
                    read[root] += _bytes(operand)
        operands = sum(min(nbytes, _bytes(root)) for root, nbytes in read.items())
        # Of a convolution's backward a part of the results is the gradient of its weight.
        results = 0 if _packet(node) is _aten.convolution_backward else _bytes(node)
        found.append((operands + results, node))
    return max(found, key=lambda pair: pair[0])


def _is_whole(node: fx.Node) -> bool:
    packet = _packet(node)
    return packet in _CONVOLUTIONS or str(packet).removeprefix("aten.").startswith(_ATTENTION)


def _packet(node: fx.Node) -> object:
    return getattr(node.target, "overloadpacket", None)


def _bytes(node: fx.Node) -> int:
    return facts.bytes_of(facts.value(node))
