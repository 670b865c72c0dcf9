"""Which weights a budget keeps, beside an exact solver; and the sentence for a plan that does not fit."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_compiler.budget import Candidate, check, choose
from zero_compiler.errors import MemoryBudgetError
from zero_compiler.report import Memory

candidates = st.lists(
    st.builds(lambda b, t: (b, t), st.integers(1, 5000), st.integers(0, 1000)), min_size=0, max_size=9
)


def _exact(items: list[Candidate], room: int) -> float:
    best = 0.0
    for n in range(len(items) + 1):
        for some in itertools.combinations(items, n):
            if sum(c.nbytes for c in some) <= room:
                best = max(best, sum(c.saved_us for c in some))
    return best


@given(candidates, st.integers(0, 4096))
@settings(max_examples=200, deadline=None)
def test_small_cases_are_solved_exactly(raw, room):
    # Up to 4096 bytes of room a step of the table is one byte.
    items = [Candidate(f"w{i}", b, float(t)) for i, (b, t) in enumerate(raw)]
    kept = choose(items, room)
    assert sum(c.nbytes for c in items if c.name in kept) <= room
    assert sum(c.saved_us for c in items if c.name in kept) == _exact(items, room)


@given(candidates, st.integers(4097, 20000))
@settings(max_examples=100, deadline=None)
def test_larger_cases_fit_and_lose_little(raw, room):
    items = [Candidate(f"w{i}", b * 7, float(t)) for i, (b, t) in enumerate(raw)]
    kept = choose(items, room)
    assert sum(c.nbytes for c in items if c.name in kept) <= room
    step = -(-room // 4096)
    got = sum(c.saved_us for c in items if c.name in kept)
    assert got >= _exact(items, room - step * (len(items) + 1))


def test_equal_input_gives_equal_choice():
    items = [Candidate(f"w{i}", 100 + i, 10.0) for i in range(50)]
    assert choose(items, 2000) == choose(list(items), 2000)


def test_what_does_not_fit_says_by_how_much_where_and_what_would_help():
    memory = Memory(parameters=100, gradients=100, optimizer=200, kept=0, arena=50, programs=1000)
    with pytest.raises(MemoryBudgetError, match=r"450 bytes too small.*segment 3 of h\.1.*checkpoint"):
        check(memory, 1000, "segment 3 of h.1", 2)
    check(memory, memory.peak, "anywhere", 2)
    small = Memory(parameters=100, gradients=100, optimizer=2000, kept=0, arena=50, programs=10)
    with pytest.raises(MemoryBudgetError, match="more ranks than 2"):
        check(small, 1000, "anywhere", 2)
