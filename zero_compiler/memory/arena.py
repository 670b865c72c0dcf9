"""Offsets in an arena: slots with lifetimes are packed so that no two that live at once overlap.

Best fit, greedy by size (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference",
2020, section 4.2) or in the order of starts, whichever takes less. Constant size, no fragmentation: the CB and MD of
ZeRO-R.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ..alignment import arena_aligned


@dataclass(frozen=True)
class Slot:
    """``nbytes`` needed from instruction ``start`` to instruction ``end``, both included."""

    nbytes: int
    start: int
    end: int


def pack(slots: Sequence[Slot]) -> tuple[list[int], int]:
    """Byte offset of each slot, and the size of the arena."""
    by_size = sorted(range(len(slots)), key=lambda i: (-slots[i].nbytes, slots[i].start))
    by_start = sorted(range(len(slots)), key=lambda i: (slots[i].start, -slots[i].nbytes))
    return min((_pack(slots, order) for order in (by_size, by_start)), key=lambda packed: packed[1])


def _pack(slots: Sequence[Slot], order: Sequence[int]) -> tuple[list[int], int]:
    offsets = [0] * len(slots)
    # Slots already placed, by the instants at which they live and at which they begin: a slot is compared with
    # those that live with it and not with all.
    alive: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    begins: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    total = 0
    for i in order:
        slot = slots[i]
        need = arena_aligned(slot.nbytes)
        others = list(alive.get(slot.start, ()))
        for t in range(slot.start + 1, slot.end + 1):
            others += begins.get(t, ())
        at, best, best_gap = 0, None, None
        for offset, end in sorted(others):
            gap = offset - at
            if gap >= need and (best_gap is None or gap < best_gap):
                best, best_gap = at, gap
            at = max(at, end)
        if total - at >= need and (best_gap is None or total - at < best_gap):
            best = at
        offsets[i] = at if best is None else best
        place = (offsets[i], offsets[i] + need)
        begins[slot.start].append(place)
        for t in range(slot.start, slot.end + 1):
            alive[t].append(place)
        total = max(total, place[1])
    return offsets, total


def check(slots: Sequence[Slot], offsets: Sequence[int], total: int) -> str | None:
    """Independent check by a sweep over time: a sentence for the first overlap, or None."""
    events = sorted(
        [(s.start, 1, i) for i, s in enumerate(slots)] + [(s.end + 1, 0, i) for i, s in enumerate(slots)]
    )
    live: set[int] = set()
    for _, born, i in events:
        if not born:
            live.discard(i)
            continue
        low, high = offsets[i], offsets[i] + slots[i].nbytes
        if high > total:
            return f"slot {i} ends at byte {high} of {total}"
        for j in live:
            if low < offsets[j] + slots[j].nbytes and offsets[j] < high:
                return f"slots {j} and {i} overlap at byte {max(low, offsets[j])}"
        live.add(i)
    return None
