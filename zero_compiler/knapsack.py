"""Which of several things to keep in a room of bytes: a 0/1 knapsack, by dynamic programming.

Bytes count in steps of a 4096th of the room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

STEPS = 4096


@dataclass(frozen=True)
class Candidate:
    """Something that could be kept: ``nbytes`` of memory save ``saved_us`` a step."""

    name: str
    nbytes: int
    saved_us: float


def choose(candidates: Sequence[Candidate], room_bytes: int) -> frozenset[str]:
    """Names of the candidates to keep within ``room_bytes``; the time saved is largest, up to the step of bytes.

    Sizes are rounded up to steps, so what is chosen always fits. The loss against the exact solution is at
    most what ``len(candidates)`` steps of bytes would have saved. Ties go to the earlier candidate.
    """
    useful = [c for c in candidates if c.saved_us > 0 and c.nbytes <= room_bytes]
    if sum(c.nbytes for c in useful) <= room_bytes:
        return frozenset(c.name for c in useful)
    # With fewer bytes than steps a step is one byte, and the solution is exact.
    step = max(1, -(-room_bytes // STEPS))
    width = room_bytes // step
    best = np.zeros(width + 1)
    taken = np.zeros((len(useful), width + 1), dtype=bool)
    for i, c in enumerate(useful):
        need = -(-c.nbytes // step)
        if need > width:
            continue
        with_it = best[: width + 1 - need] + c.saved_us
        better = with_it > best[need:]
        taken[i, need:] = better
        best[need:] = np.where(better, with_it, best[need:])
    keep, left = [], width
    for i in range(len(useful) - 1, -1, -1):
        if taken[i, left]:
            keep.append(useful[i].name)
            left -= -(-useful[i].nbytes // step)
    return frozenset(keep)
