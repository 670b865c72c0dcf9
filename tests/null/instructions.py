"""Programs by hand, and a machine on which times are small numbers."""

from __future__ import annotations

import dataclasses

from machines import machine

from zero_compiler.cost.hardware import HardwareSpec, Link
from zero_compiler.ir.instructions import Compute, Gather, WaitGather
from zero_compiler.ir.program import Program
from zero_compiler.ir.transfers import GatherDesc, ReduceDesc

# Lanes that share the cores of a host.
CORES = [("compute", "device-device")]
# Computes for 10 us while 400 bytes travel: 2 + 4 us, if nothing else ran.
BEHIND = [Gather(0), Compute(0, (), (), ()), WaitGather(0, (-1,))]


def spec_of(shared=(), latency_us: float = 2.0, bytes_per_us: float = 100.0, **fields) -> HardwareSpec:
    """Links of 2 us and 100 bytes/us between ranks, 5 us and 50 bytes/us from files, 10 us and 20 bytes/us to them."""
    spec = HardwareSpec.from_dict(machine(latency_us, bytes_per_us))
    return dataclasses.replace(
        spec, shared=tuple(shared), nvme_read=Link(5.0, 50.0), nvme_write=Link(10.0, 20.0), **fields
    )


def gather_of(*numels: int, **fields) -> GatherDesc:
    names = tuple(f"w{i}" for i in range(len(numels)))
    shapes = tuple((2 * n,) for n in numels)
    return GatherDesc("m", names, shapes, numels, "float32", False, (0,) * len(numels), -1, "u", **fields)


def reduce_of(*numels: int, replicated: bool = False, **fields) -> ReduceDesc:
    names = tuple(f"w{i}" for i in range(len(numels)))
    shapes = tuple((n if replicated else 2 * n,) for n in numels)
    return ReduceDesc("m", names, shapes, numels, "float32", "float32", replicated, -1, "u", **fields)


def program_of(instrs, gathers=(), reduces=(), segment_us=()) -> Program:
    return Program(
        "forward", 0, 0, list(instrs), [], list(gathers), list(reduces), [], 0, segment_us=list(segment_us)
    )
