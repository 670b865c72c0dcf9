"""The memory planner against an independent checker and an exact lower bound."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from zero_compiler.alignment import ARENA_BYTES, arena_aligned
from zero_compiler.memory.arena import Slot, check, pack

slots_ = st.lists(
    st.builds(
        lambda nbytes, start, length: Slot(nbytes, start, start + length),
        st.integers(0, 40 * ARENA_BYTES),
        st.integers(0, 60),
        st.integers(0, 20),
    ),
    max_size=40,
)


def most_live(slots: list[Slot]) -> int:
    """Bytes live at the worst instant: no plan can be smaller."""
    ends = {t for s in slots for t in (s.start, s.end)}
    return max(
        (sum(arena_aligned(s.nbytes) for s in slots if s.start <= t <= s.end) for t in ends), default=0
    )


def overlap(slots: list[Slot], offsets: list[int]) -> bool:
    """By the definition, pair by pair."""
    for i, a in enumerate(slots):
        for j, b in enumerate(slots[:i]):
            together = a.start <= b.end and b.start <= a.end
            if together and offsets[i] < offsets[j] + b.nbytes and offsets[j] < offsets[i] + a.nbytes:
                return True
    return False


@settings(deadline=None, max_examples=100)
@given(slots_)
def test_packed_slots_do_not_overlap(slots):
    offsets, total = pack(slots)
    assert check(slots, offsets, total) is None
    assert not overlap(slots, offsets)
    assert all(o % ARENA_BYTES == 0 and o + s.nbytes <= total for o, s in zip(offsets, slots, strict=True))
    assert most_live(slots) <= total <= sum(arena_aligned(s.nbytes) for s in slots)


@settings(deadline=None, max_examples=100)
@given(slots_, st.data())
def test_the_checker_sees_what_the_definition_sees(slots, data):
    offsets = [data.draw(st.integers(0, 30)) * ARENA_BYTES // 2 for _ in slots]
    room = max((o + s.nbytes for o, s in zip(offsets, slots, strict=True)), default=0)
    assert (check(slots, offsets, room) is not None) == overlap(slots, offsets)


def test_the_checker_sees_the_end_of_the_arena():
    assert check([Slot(100, 0, 1)], [0], 99) == "slot 0 ends at byte 100 of 99"


@settings(deadline=None, max_examples=100)
@given(slots_)
def test_equal_slots_give_equal_offsets(slots):
    assert pack(slots) == pack(list(slots))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 40 * ARENA_BYTES), min_size=1, max_size=30))
def test_slots_one_after_the_other_share_their_place(sizes):
    assert pack([Slot(n, 2 * i, 2 * i + 1) for i, n in enumerate(sizes)])[1] == arena_aligned(max(sizes))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 40 * ARENA_BYTES), min_size=1, max_size=30))
def test_slots_of_nested_lives_are_packed_without_a_gap(sizes):
    n = len(sizes)
    slots = [Slot(s, i, 2 * n - i) for i, s in enumerate(sizes)]
    assert pack(slots)[1] == sum(map(arena_aligned, sizes)) == most_live(slots)


def test_a_window_of_layers_needs_what_is_live_at_once():
    """The transformer's shape: each layer's weights live while it and the layer before compute."""
    slots = [Slot(n * ARENA_BYTES, 4 * i, 4 * i + 7) for i in range(50) for n in (16, 4, 1)]
    assert pack(slots)[1] == most_live(slots) == 2 * 21 * ARENA_BYTES


def test_packing_is_near_linear():
    def seconds(n: int) -> float:
        slots = [Slot((1 + i * 7919 % 97) * ARENA_BYTES, i, i + 6) for i in range(n)]
        best = float("inf")
        for _ in range(3):
            start = time.process_time()
            pack(slots)
            best = min(best, time.process_time() - start)
        return best

    # Sixteen times the slots: 16x where it is linear, 256x where it is quadratic.
    assert seconds(8000) < 64 * seconds(500)


def test_the_order_of_starts_where_it_takes_less():
    # Each layer in turn: two of 12 and 4 that live together, then one of 16, then another, which the first of the next
    # layer outlives by nothing. Two of 16 side by side are enough; by size, the 12 would come to stand beyond them.
    slots = []
    for t in range(0, 30, 5):
        for pages, start, end in ((12, t, t + 2), (4, t + 1, t + 2), (16, t + 2, t + 4), (16, t + 4, t + 5)):
            slots.append(Slot(pages * ARENA_BYTES, start, end))
    offsets, size = pack(slots)
    assert check(slots, offsets, size) is None
    assert size == 32 * ARENA_BYTES
