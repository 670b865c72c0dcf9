"""When each gather starts: at the latest point that still hides it, with queueing on the lane taken into account.

A pure function of times and bytes. The host passes *boundaries*: boundary 0 is the top of a phase, boundary ``j``
stands behind the wait of unit ``j - 1``. The gathers of unit ``i`` start at one of the boundaries 0 to ``i``, in the
order of the units; starting elsewhere would split a compute segment in two. Its *distance* is 1 where they start
behind the wait of the unit before (at the top for unit 0), and 1 more for every boundary further ahead. A lane
serves its transfers one at a time, in the order in which they were started.

What :func:`distances` promises, and tests/null/cost/test_prefetch.py checks by brute force:

- where only gathers use the lane, no choice within the room and :data:`MAX_DISTANCE` takes less time;
- where reductions use it too, none of the depths that are tried (the same distance for all, as far as the room
  goes) takes less time;
- no unit could start at a later boundary, the others as they are, without making the phase longer;
- bytes in flight stay within the room, except of a unit that does not fit at all: its distance is then 1.

The method is that of the critical path: latest finishing times by a sweep from the end (Kelley and Walker,
"Critical-path planning and scheduling", 1959), where a transfer must also end before the next one on its lane
must start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

# Further ahead than this no unit starts; bounds the time of the search.
MAX_DISTANCE = 32

# What the host does between two boundaries: computes for so many us; starts another transfer, or waits for it, by
# its index.
Event = tuple[Literal["compute", "start", "wait"], float]


@dataclass(frozen=True)
class PrefetchChoice:
    """Distances of a phase by unit, and why, as a sentence for the report."""

    why: str
    distances: Mapping[str, int] = field(default_factory=dict)

    @property
    def ahead(self) -> bool:
        """Whether any unit starts further ahead than behind the wait of the one before it."""
        return any(d > 1 for d in self.distances.values())

    def text(self) -> str:
        """One line for the report."""
        far = {u.split(":", 1)[-1]: d for u, d in self.distances.items() if d > 1}
        if not far:
            return f"gathers start one unit ahead: {self.why}"
        furthest = sorted(far.items(), key=lambda row: -row[1])
        rows = [f"{d} ahead for {unit or 'the model'}" for unit, d in furthest]
        more = f" and {len(rows) - 6} more" if len(rows) > 6 else ""
        return f"gathers start one unit ahead, but {', '.join(rows[:6])}{more}: {self.why}"


@dataclass(frozen=True)
class Phase:
    """What is known of a phase before its gathers are placed.

    Args:
        gather_us: time of each unit's gathers on the lane; 0 for a unit that moves nothing, which needs no lane.
        nbytes: that the gathers of each unit need from their start to their wait.
        between: what the host does behind boundary ``j``, up to the wait of unit ``j``; last, up to the end.
        other_us: time on the lane of each transfer that is not a gather.
    """

    gather_us: Sequence[float]
    nbytes: Sequence[int]
    between: Sequence[Sequence[Event]]
    other_us: Sequence[float] = ()

    @property
    def compute_us(self) -> float:
        return sum(v for events in self.between for kind, v in events if kind == "compute")


def distances(phase: Phase, room_bytes: int) -> list[int]:
    """Distance of every unit, such that at most ``room_bytes`` are in flight at any boundary."""
    first = _first_boundaries(phase, room_bytes)
    starts, us = _shallowest(phase, first)
    while True:
        # Where reductions share the lane a later gather can make them earlier, and so leave room for another.
        later = _latest(phase, starts, us)
        if later == starts:
            return [i - b + 1 for i, b in enumerate(starts)]
        starts, us = later, _run(phase, later).us


def phase_us(phase: Phase, distance: Sequence[int]) -> float:
    """Time from the top of the phase until the host and the lane are done."""
    return _run(phase, [i - d + 1 for i, d in enumerate(distance)]).us


def in_flight(phase: Phase, distance: Sequence[int]) -> int:
    """Most bytes of gathers started and not yet waited for, at any boundary."""
    most = now = ahead = 0
    for j, nbytes in enumerate(phase.nbytes):
        while ahead < len(distance) and ahead - distance[ahead] + 1 <= j:
            now += phase.nbytes[ahead]
            ahead += 1
        most = max(most, now)
        now -= nbytes
    return most


@dataclass
class _Times:
    us: float
    begun: list[
        tuple[float, float]
    ]  # before each unit's gathers start: time of the host, and when the lane is free
    gathered: list[float]  # when each unit's gathers end
    done: list[float]  # when each other transfer ends


def _run(phase: Phase, starts: Sequence[int]) -> _Times:
    """Simulate a phase whose units start at the boundaries ``starts``."""
    now = free = 0.0
    begun, gathered, done = [], [], [0.0] * len(phase.other_us)
    units, following = len(starts), 0
    for j, events in enumerate(phase.between):
        while following < units and starts[following] == j:
            begun.append((now, free))
            us = phase.gather_us[following]
            if us:
                free = max(now, free) + us
            gathered.append(free if us else now)
            following += 1
        now, free = _walk(phase, events, now, free, done)
        if j < units:
            now = max(now, gathered[j])
    return _Times(max(now, free), begun, gathered, done)


def _walk(
    phase: Phase, events: Sequence[Event], now: float, free: float, done: list[float] | dict[int, float]
) -> tuple[float, float]:
    for kind, what in events:
        if kind == "compute":
            now += what
        elif kind == "start":
            done[int(what)] = free = max(now, free) + phase.other_us[int(what)]
        else:
            now = max(now, done[int(what)])
    return now, free


def _first_boundaries(phase: Phase, room_bytes: int) -> list[int]:
    """The first boundary at which the room, and :data:`MAX_DISTANCE`, allow each unit to start.

    Units are in flight together in their order, so most bytes are in flight where the last of them starts.
    """
    out, low, held = [], 0, 0
    for i, nbytes in enumerate(phase.nbytes):
        held += nbytes
        while low < i and (held > room_bytes or i - low >= MAX_DISTANCE):
            held -= phase.nbytes[low]
            low += 1
        out.append(low)
    return out


def _shallowest(phase: Phase, first: Sequence[int]) -> tuple[list[int], float]:
    """The smallest of the depths 1, 2, 4, ... that no larger one beats, limited to what the room allows."""
    best: tuple[list[int], float] | None = None
    depth = 1
    while True:
        starts = [max(low, i - depth + 1) for i, low in enumerate(first)]
        us = _run(phase, starts).us
        if best is None or us < best[1] - _slack(best[1]):
            best = starts, us
        if starts == list(first):
            return best
        depth *= 2


def _latest(phase: Phase, starts: Sequence[int], us: float) -> list[int]:
    """Every unit's latest boundary with which the phase still takes ``us``, from the last unit to the first.

    The units before the one that is placed stand at ``starts``. Going back through the events, ``host`` is the
    latest time at which the host may be here, and ``lane`` the latest at which the lane must be free for what was
    started behind here.
    """
    times = _run(phase, starts)
    out = list(starts)
    host = lane = us
    due = [us] * len(phase.other_us)
    k = len(starts) - 1
    wait = [us] * len(starts)
    reached: list[tuple[float, float]] = []
    for j in range(len(starts), -1, -1):
        if j < len(starts):
            wait[j] = host
        for kind, what in reversed(phase.between[j]):
            if kind == "compute":
                host -= what
            elif kind == "wait":
                due[int(what)] = host
            else:
                lane = min(lane, due[int(what)]) - phase.other_us[int(what)]
                host = min(host, lane)
        while k >= j:
            needed = phase.gather_us[k]
            if needed:
                if not reached:
                    reached = _reached_without(phase, starts, times, k)
                ends = max(reached[j - starts[k]]) + needed
                last = min(lane, wait[k])
                if j > starts[k] and ends > last + _slack(us):
                    break
                lane = last - needed
                host = min(host, lane)
            out[k] = j
            reached = []
            k -= 1
    return out


def _reached_without(
    phase: Phase, starts: Sequence[int], times: _Times, unit: int
) -> list[tuple[float, float]]:
    """Host's time and when the lane is free, at each boundary from ``starts[unit]`` to ``unit``, if neither that
    unit nor any behind it is started before."""
    now, free = times.begun[unit]
    out = [(now, free)]
    done = _DistanceTrial(times.done)
    for j in range(starts[unit], unit):
        now, free = _walk(phase, phase.between[j], now, free, done)
        now = max(now, times.gathered[j])
        out.append((now, free))
    return out


class _DistanceTrial(dict[int, float]):
    """Ends of the transfers of a trial, and of those before it."""

    def __init__(self, before: Sequence[float]) -> None:
        super().__init__()
        self._before = before

    def __missing__(self, index: int) -> float:
        return self._before[index]


def _slack(us: float) -> float:
    """Sums of the same times in another order differ by rounding."""
    return 1e-9 * us
