"""Distances of prefetch beside a checker that shares no code with them: longest paths, and every choice there is."""

from __future__ import annotations

import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_compiler.cost.prefetch import MAX_DISTANCE, Phase, distances, in_flight, phase_us


def _ends(phase: Phase, distance: list[int]) -> float:
    """When everything is done, by longest paths: each thing ends its own time after the last thing that it needs."""
    n = len(distance)
    host: list[tuple[str, int | float]] = []  # what the host does, in order
    for j in range(n + 1):
        host += [("gather", i) for i in range(n) if i - distance[i] + 1 == j]
        host += phase.between[j]
        host += [("await", j)] if j < n else []
    lane = [
        k for k, (kind, i) in enumerate(host) if kind == "start" or (kind == "gather" and phase.gather_us[i])
    ]
    before = dict(zip(lane[1:], lane, strict=False))
    at = {entry: k for k, entry in enumerate(host)}

    @functools.cache
    def host_at(k: int) -> float:
        """When the host is done with entry k."""
        if k < 0:
            return 0.0
        kind, what = host[k]
        now = host_at(k - 1)
        if kind == "compute":
            return now + what
        if kind == "await":
            return max(now, moved(at["gather", what])) if phase.gather_us[what] else now
        return max(now, moved(at["start", what])) if kind == "wait" else now

    @functools.cache
    def moved(k: int) -> float:
        """When the transfer that entry k starts is done."""
        kind, what = host[k]
        us = phase.gather_us[what] if kind == "gather" else phase.other_us[what]
        return us + max(host_at(k - 1), moved(before[k]) if k in before else 0.0)

    return max([host_at(len(host) - 1), *(moved(k) for k in lane)])


def _most_bytes(phase: Phase, distance: list[int]) -> int:
    """Most bytes in flight at a boundary, of the units that are not in flight alone."""
    most = 0
    for j in range(len(distance)):
        units = [i for i in range(j, len(distance)) if i - distance[i] + 1 <= j]
        if len(units) > 1:
            most = max(most, sum(phase.nbytes[i] for i in units))
    return most


def _choices(n: int, depth: int):
    """All distances that keep the order of the units."""
    for some in itertools.product(*[range(1, min(i + 1, depth) + 1) for i in range(n)]):
        if all(a <= b for a, b in itertools.pairwise(i - d for i, d in enumerate(some))):
            yield list(some)


times = st.integers(0, 12).map(float)


@st.composite
def phases(draw, reductions: bool, most: int = 5) -> Phase:
    n = draw(st.integers(1, most))
    between: list = []
    others: list[float] = []
    pending: list[int] = []
    for _ in range(n + 1):
        events: list = [("compute", draw(times))]
        if reductions:
            for _ in range(draw(st.integers(0, 2))):
                events.append(("start", len(others)))
                pending.append(len(others))
                others.append(draw(times))
            if draw(st.booleans()) and pending:
                events.append(("wait", pending.pop(0)))
            if draw(st.booleans()):
                events.append(("compute", draw(times)))
        between.append(events)
    between[-1] += [("wait", k) for k in pending]
    return Phase(
        draw(st.lists(times, min_size=n, max_size=n)),
        draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)),
        between,
        others,
    )


@given(phases(reductions=True), st.data())
@settings(max_examples=300, deadline=None)
def test_the_simulation_agrees_with_longest_paths(phase, data):
    distance = data.draw(st.sampled_from(list(_choices(len(phase.nbytes), 4))))
    assert phase_us(phase, distance) == pytest.approx(_ends(phase, distance))


@given(st.one_of(phases(reductions=False), phases(reductions=True)), st.integers(0, 30))
@settings(max_examples=300, deadline=None)
def test_order_and_room_hold(phase, room):
    chosen = distances(phase, room)
    assert chosen in list(_choices(len(chosen), MAX_DISTANCE))
    assert _most_bytes(phase, chosen) <= room
    assert in_flight(phase, chosen) <= max(room, *phase.nbytes)


@given(phases(reductions=False), st.integers(0, 30))
@settings(max_examples=300, deadline=None)
def test_with_gathers_alone_no_choice_takes_less_time(phase, room):
    chosen = distances(phase, room)
    fits = [c for c in _choices(len(chosen), 5) if _most_bytes(phase, c) <= room]
    assert _ends(phase, chosen) == pytest.approx(min(_ends(phase, c) for c in fits))


@given(phases(reductions=True), st.integers(0, 30))
@settings(max_examples=300, deadline=None)
def test_with_reductions_no_uniform_depth_takes_less_time(phase, room):
    chosen = distances(phase, room)
    for depth in (1, 2, 4, 8):
        # As deep as this, or as the room goes: no further than from where units up to this one fit together.
        tried = [
            next(
                d
                for d in range(min(depth, i + 1), 0, -1)
                if d == 1 or sum(phase.nbytes[i - d + 1 : i + 1]) <= room
            )
            for i in range(len(chosen))
        ]
        assert _ends(phase, chosen) <= _ends(phase, tried) + 1e-6


@given(st.one_of(phases(reductions=False), phases(reductions=True)), st.integers(0, 30))
@settings(max_examples=400, deadline=None)
def test_no_unit_could_start_later(phase, room):
    chosen = distances(phase, room)
    us = _ends(phase, chosen)
    for i, d in enumerate(chosen):
        for smaller in range(1, d):
            later = [*chosen[:i], smaller, *chosen[i + 1 :]]
            if later in list(_choices(len(chosen), MAX_DISTANCE)):
                assert _ends(phase, later) > us + 1e-6
