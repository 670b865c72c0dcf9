"""Whether a weight is worth its way in 8 bits a number: what the link saves, beside what packing and unpacking take."""

from __future__ import annotations

import torch

from ..layout import Layout
from ..quantised_blocks import FROM, moved_bytes, packed_bytes
from .hardware import HardwareSpec


def pays(layout: Layout, dtype: torch.dtype, wire: torch.dtype, spec: HardwareSpec) -> bool:
    """Whether a gather of the weight is faster in ``wire`` than in ``dtype``, by more than a start of another transfer:
    weights of one layer that do not travel in the same dtype do not share a bucket.

    It never is for a vector, which is small, and whose numbers (norms, biases) all rows depend on; for dtypes that do
    not become 8 bits by way of float32; nor where nothing is sent.

    Raises:
        ConfigError: the spec lacks a gather between so many ranks.
    """
    if not layout.sharded or layout.world == 1 or len(layout.shape) < 2:
        return False
    if not {dtype, layout.dtype} <= FROM:
        return False
    link = spec.collective("all_gather", layout.world)
    whole = layout.world * layout.chunk_numel
    sent = layout.world * packed_bytes(layout.chunk_numel, layout.row_numel)
    saved_us = link.us(whole * dtype.itemsize) - link.us(sent)
    moved = moved_bytes(layout.chunk_numel, layout.dtype.itemsize) + moved_bytes(whole, dtype.itemsize)
    return saved_us - moved / spec.memory_bytes_per_us > link.latency_us
