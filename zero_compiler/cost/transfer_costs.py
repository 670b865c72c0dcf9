"""What each transfer of a Program costs: its lane, its time and its bytes."""

from __future__ import annotations

import torch

from ..ir.instructions import Transfer, Work
from ..ir.program import Program
from ..ranks.mesh import REPLICATE
from .hardware import HOST_RANKS, HardwareSpec


def transfers(
    program: Program, spec: HardwareSpec, world: int
) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
    """Time on the lane and bytes of full tensors of each gather, and of each reduction.

    Nothing is moved by a gather in place, nor by one of the backward of a weight that is kept: the forward has
    fetched it.

    Raises:
        ConfigError: the spec lacks a collective that the Program uses.
    """
    gathers, reduces = [], []
    for g in program.gathers:
        if world == 1 or g.home or (g.kept and program.phase == "backward"):
            gathers.append((0.0, 0))
            continue
        if g.from_second:
            nbytes = g.host_ranks * g.sent_bytes
            gathers.append((spec.collective("all_gather", g.host_ranks, over=HOST_RANKS).us(nbytes), nbytes))
            continue
        nbytes = world * g.sent_bytes
        gathers.append((spec.collective("all_gather", world, g.shared).us(nbytes), nbytes))
    for r in program.reduces:
        kind = "all_reduce" if r.replicated else "reduce_scatter"
        part = sum(r.chunk_numels) * getattr(torch, r.dtype).itemsize
        us, nbytes = 0.0, 0
        if world > 1:
            nbytes = part * (1 if r.replicated else world)
            us = spec.collective(kind, world, r.shared).us(nbytes)
        if r.copies > 1:
            # As if one went right behind the other; between replicas there is no shared memory.
            us, nbytes = us + spec.collective("all_reduce", r.copies, over=REPLICATE).us(part), nbytes + part
        reduces.append((us, nbytes))
    return gathers, reduces


def transfer_us(transfer: Transfer, spec: HardwareSpec) -> float:
    """Time on its lane of a transfer to another tier, or from one."""
    return spec.links(transfer.tier)[transfer.out].us(transfer.nbytes)


def work_us(work: Work, spec: HardwareSpec) -> float:
    """Time of what the compute device does itself."""
    return work.us + work.memory_bytes / spec.memory_bytes_per_us + work.kernels * spec.kernel_us
