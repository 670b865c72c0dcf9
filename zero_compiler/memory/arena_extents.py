"""How much of each arena transfers need: to the end of the last buffer in it."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import torch

from ..alignment import arena_aligned
from ..ir.program import Program


@dataclass
class Ends:
    """Bytes of the arenas of a Program (see `program.py`)."""

    transient: int = 0
    slots: int = 0
    own: int = 0


def ends_by_owner(program: Program) -> dict[str, Ends]:
    """What the transfers of each owner's parameters need. Slots and own staging are each owner's memory, as peers read
    them in that; the transient arena is one for all."""
    ends: defaultdict[str, Ends] = defaultdict(Ends)
    world = program.slots_ranks
    for g in program.gathers:
        item, at = getattr(torch, g.dtype).itemsize, ends[g.owner]
        if not (g.home or g.kept):
            end = max(
                o + arena_aligned(n * world * item) for o, n in zip(g.offsets, g.chunk_numels, strict=True)
            )
            if g.shared:
                at.slots = max(at.slots, end)
            else:
                at.transient = max(at.transient, end)
        if g.staging >= 0:
            at.transient = max(at.transient, g.staging + arena_aligned(g.staging_bytes(world)))
    for r in program.reduces:
        item, at = getattr(torch, r.dtype).itemsize, ends[r.owner]
        if r.shared:
            at.own = max(at.own, r.staging + arena_aligned(sum(map(math.prod, r.shapes)) * item))
        elif r.staging >= 0:
            total = sum(r.chunk_numels) * item
            size = total if r.replicated else arena_aligned(total * world) + total
            at.transient = max(at.transient, r.staging + arena_aligned(size))
    # Of owners on fewer ranks than others this is too much.
    return {
        owner: Ends(
            min(program.transient_bytes, at.transient),
            min(program.slots_bytes, at.slots),
            min(program.own_bytes, at.own),
        )
        for owner, at in ends.items()
    }
