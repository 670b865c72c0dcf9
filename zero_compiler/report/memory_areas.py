"""The bytes of the compute device over a step, by what they are: the stacked areas of the picture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ..ir.program import Program
from ..memory.live import moments
from .lifetimes import FULL_GRADIENT, GRADIENT, SLOTS, TRANSIENT, WEIGHT, BufferLifetime
from .memory import Memory

# From the bottom up: what is always there, then what comes and goes.
AREAS = (
    "shards of parameters",
    "optimizer states",
    "gradients, this rank's rows",
    "full gradients",
    "gathered weights",
    "activations",
    "buffers of transfers",
)


def areas_of(program: Program, memory: Memory, buffers: Sequence[BufferLifetime]) -> list[tuple[int, ...]]:
    """Bytes of each of ``AREAS`` during every instruction of a Program. The largest sum of a step is its predicted
    peak.

    Arenas and pools are allocated once and are there throughout; what of them holds no gathered weight counts as
    buffers.

    Args:
        memory: the report's `Memory`, of the plan that the Program is of.
        buffers: of the Program, as `lifetimes` gives them.
    """
    count = len(program.instrs)
    ranks = max(1, program.slots_ranks)
    in_transient = _live(count, [b for b in buffers if b.what == WEIGHT and b.pool == TRANSIENT])
    in_slots = _live(count, [b for b in buffers if b.what == WEIGHT and b.pool == SLOTS])
    full = _live(count, [b for b in buffers if b.what == FULL_GRADIENT])
    made = _live(count, [b for b in buffers if b.what == GRADIENT])
    rows = moments(program)
    backward = program.phase == "backward"
    # Gradients that other Programs make count throughout the backward, as they do in the peak.
    rest = max(0, memory.gradients - rows[-1].gradients) if backward and rows else 0
    out: list[tuple[int, ...]] = []
    for at, moment in enumerate(rows):
        gradients = min(memory.gradients, moment.gradients + rest)
        whole = min(full[at], moment.others)
        # Rows of a mean that are on their way to another tier, or to the other tiles of theirs.
        passing = min(max(0, made[at] - moment.gradients), moment.others - whole)
        gathered = min(memory.arena, in_transient[at] + -(-in_slots[at] // ranks))
        out.append(
            (
                memory.parameters,
                memory.optimizer,
                gradients + passing,
                whole,
                memory.kept + gathered,
                moment.others - whole - passing,
                memory.arena + memory.recorded + memory.host - gathered,
            )
        )
    return out


def at_rest(memory: Memory) -> tuple[int, ...]:
    """The same behind a backward, while the optimizer updates."""
    return (
        memory.parameters,
        memory.optimizer,
        memory.gradients,
        0,
        memory.kept,
        0,
        memory.arena + memory.recorded + memory.host,
    )


def _live(count: int, buffers: Sequence[BufferLifetime]) -> list[int]:
    """Bytes of ``buffers`` during each of ``count`` instructions."""
    change = [0] * (count + 1)
    for b in buffers:
        change[max(0, b.begin)] += b.nbytes
        if b.end < count:
            change[b.end + 1] -= b.nbytes
    return list(accumulate(change[:count]))
