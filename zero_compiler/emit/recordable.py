"""Which segments graphs of a device cannot record: they run by themselves, and those around them are replayed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx

from ..ir import facts
from ..memory.segment_graph import SegmentGraph

_WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def unrecordable(segments: Sequence[SegmentGraph], device: str) -> frozenset[int]:
    """Numbers of the segments that a graph of ``device`` cannot record, or would record nothing of.

    These ask the device for a value, or read or make something that is not on it; they call a higher-order operator,
    of which it is not known; or they have nothing but views.
    """
    return frozenset(i for i, seg in enumerate(segments) if not _is_recordable(seg, device))


def _is_recordable(seg: SegmentGraph, device: str) -> bool:
    computes = [n for n in seg.body if facts.is_compute(n) and not facts.aliased_inputs(n)]
    return bool(computes) and _all_on(device, (*seg.ins, *seg.body)) and not any(map(_waits, seg.body))


def _all_on(device: str, nodes: Iterable[fx.Node]) -> bool:
    values = [leaf for n in nodes if "val" in n.meta for leaf in facts.leaves(facts.value(n))]
    return all(isinstance(v, torch.Tensor) and v.device.type == device for v in values)


def _waits(node: fx.Node) -> bool:
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    return bool(_WAITS.intersection(getattr(node.target, "tags", ())))
