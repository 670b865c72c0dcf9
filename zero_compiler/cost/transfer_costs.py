"""What each transfer of a Program costs: its lane, its time and its bytes."""

from __future__ import annotations

import torch

from ..ir.program import Bring, Fetch, Offload, Program, Restore, Write
from .hardware import HardwareSpec
from .timeline import HOST, READ, WRITE


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
        nbytes = sum(g.chunk_numels) * world * getattr(torch, g.dtype).itemsize
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
            us, nbytes = us + spec.collective("all_reduce", r.copies).us(part), nbytes + part
        reduces.append((us, nbytes))
    return gathers, reduces


def fetch_us(program: Program, fetch: Fetch, spec: HardwareSpec) -> float:
    """Time on its lane of one hop of a gather's chunks."""
    g = program.gathers[fetch.index]
    return spec.links(g.hops[fetch.hop].tier)[0].us(g.chunk_bytes)


def lane_of(tier: str, out: bool) -> str:
    """The lane between a tier and the one above it: from there, or ``out`` to it."""
    return HOST if tier == "host" else WRITE if out else READ


def offload_us(
    program: Program, instr: Offload | Write | Restore | Bring, spec: HardwareSpec
) -> tuple[str, float]:
    """Lane and time of one step of an offloaded tensor, out or back."""
    o, out = program.offloads[instr.index], isinstance(instr, (Offload, Write))
    tier = o.tiers[0] if isinstance(instr, (Offload, Bring)) else o.tiers[-1]
    return lane_of(tier, out), spec.links(tier)[out].us(o.nbytes)
