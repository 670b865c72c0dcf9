"""Memory that a transport keeps for itself, beside the arenas, to carry out a Program."""

from __future__ import annotations

import torch

from .group import Group
from .program import GatherDesc, Program, Reduce, ReduceDesc, WaitReduce
from .transport import Transport


def scratch_bytes(transport: Transport, program: Program, group: Group) -> int:
    """Bytes on one rank, at most; the same on every rank."""
    if transport.hosts is not None:
        return _between_hosts(program, group.world, transport.hosts.hosts)
    if transport.name == "c10d" and group.device.type == "cpu" and group.world > 2:
        return _exchanged(program, group.world)
    return 0


def _between_hosts(program: Program, world: int, hosts: int) -> int:
    """One transfer at a time, in room for the largest (csrc/src/hosts_transport.cc)."""
    laid = max((hosts * _chunk_bytes(g) for g in program.gathers), default=0)
    summed = 0
    for r in program.reduces:
        chunk = _chunk_bytes(r)
        laid = max(laid, chunk if r.replicated else world * chunk)
        summed = max(summed, chunk if r.replicated else hosts * chunk)
    return laid + summed


def _exchanged(program: Program, world: int) -> int:
    """Of each reduction under way, the rows that come from all ranks but two (csrc/src/c10d_transport.cc)."""
    under_way: dict[int, int] = {}
    most = 0
    for instr in program.instrs:
        if isinstance(instr, Reduce) and not program.reduces[instr.index].replicated:
            under_way[instr.index] = (world - 2) * _chunk_bytes(program.reduces[instr.index])
            most = max(most, sum(under_way.values()))
        elif isinstance(instr, WaitReduce):
            under_way.pop(instr.index, None)
    return most


def _chunk_bytes(moved: GatherDesc | ReduceDesc) -> int:
    return sum(moved.chunk_numels) * getattr(torch, moved.dtype).itemsize
