"""What each transfer of a Program costs: its lane, its time and its bytes."""

from __future__ import annotations

import torch

from ..ir.instructions import Transfer, Work
from ..ir.program import Program
from ..ir.transfers import ReduceDesc
from ..ranks.mesh import REPLICATE
from .hardware import HOST_RANKS, HardwareSpec
from .placed_hardware import PlacedHardware


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
        if world > 1 and r.wire:
            nbytes = world * r.packed_bytes
            us = packed_reduction_us(spec, world, r)
        if r.copies > 1:
            # As if one went right behind the other; between replicas there is no shared memory.
            us, nbytes = us + spec.collective("all_reduce", r.copies, over=REPLICATE).us(part), nbytes + part
        reduces.append((us, nbytes))
    return gathers, reduces


def within_host_us(program: Program, spec: HardwareSpec, world: int) -> tuple[float, float]:
    """Time on the link of all gathers of second shards, and of the same from all ranks."""
    now = instead = 0.0
    for g in program.gathers:
        if g.from_second:
            nbytes = g.host_ranks * g.sent_bytes
            now += spec.collective("all_gather", g.host_ranks, over=HOST_RANKS).us(nbytes)
            instead += spec.collective("all_gather", world).us(nbytes)
    return now, instead


def packed_reduction_us(spec: HardwareSpec, world: int, r: ReduceDesc) -> float:
    """Time of a reduce-scatter whose sums go packed from host to host: packing, unpacking and adding come on top of
    what the ranks of a host do in memory, since one thread does all of it in turn."""
    full = world * r.summed_bytes
    if not isinstance(spec, PlacedHardware):
        return spec.collective("reduce_scatter", world).us(full)
    # Each rank packs and unpacks its part for each other host, and adds it, in float32.
    passes = (r.hosts - 1) * (2 * (r.summed_bytes + r.packed_bytes) + 3 * 4 * sum(r.chunk_numels))
    return spec.reduce_scatter_us(world, full, world * r.packed_bytes) + passes / spec.memory_bytes_per_us


def transfer_us(transfer: Transfer, spec: HardwareSpec) -> float:
    """Time on its lane of a transfer to another tier, or from one."""
    return spec.links(transfer.tier)[transfer.out].us(transfer.nbytes)


def work_us(work: Work, spec: HardwareSpec) -> float:
    """Time of what the compute device does itself."""
    return work.us + work.memory_bytes / spec.memory_bytes_per_us + work.kernels * spec.kernel_us
