"""Predicted timelines: which transfer or computation is on which lane, from when to when."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from ..ir.transfers import COMPUTE, HOST, LINK, READ, WRITE

PYTHON = "python"  # no transfers: the host's time around a Program
AROUND = "Python around the Program"
_SHOWN = 4  # transfers that the step waits for, in the report


def duration(us: float) -> str:
    """A time for the report."""
    return f"{us:.1f} us" if us < 1000 else f"{us / 1e3:.2f} ms"


@dataclass(frozen=True)
class Span:
    """``label`` occupies ``lane`` from ``start_us`` to ``end_us``; ``nbytes`` of full tensors move.

    ``stalled_us`` is the time for which the host waited for this transfer while nothing was computed; what it waits
    for behind other transfers in the queue is counted here too. ``slowed_us`` is by how much it made compute take
    longer, where both share cores. Alone on the machine it would take ``alone_us``.
    """

    lane: str
    start_us: float
    end_us: float
    label: str
    nbytes: int = 0
    stalled_us: float = 0.0
    slowed_us: float = 0.0
    alone_us: float = 0.0

    @property
    def hidden(self) -> float:
        """The part of a transfer's own time that the step does not take longer for, from 0 to 1."""
        return _hidden(self.stalled_us + self.slowed_us, self.alone_us)


@dataclass
class Timeline:
    """Result of a simulation.

    ``stalls`` is how long the host waited for each lane, and computed nothing; ``slowed`` is by how much each lane made
    compute take longer, where both share cores. Without transfers the step would be shorter by the sum of both.
    ``reached_us`` is when the host was done with each instruction of the Program. ``python_us`` is by how much the step
    takes longer for what Python does around it. ``away_us`` is, of each tensor that waits on another tier, by name, how
    much longer the step takes for its transfers, and for what the host sums up of them. ``begin_us`` is when the host
    begins with the first instruction, and ``noted`` are parts of what it does: updates that run meanwhile, and
    gradients that go to files.
    """

    total_us: float
    stalls: dict[str, float]
    spans: list[Span] = field(default_factory=list)
    reached_us: list[float] = field(default_factory=list)
    slowed: dict[str, float] = field(default_factory=dict)
    python_us: float = 0.0
    away_us: dict[str, float] = field(default_factory=dict)
    begin_us: float = 0.0
    noted: list[Span] = field(default_factory=list)

    @property
    def stalled_us(self) -> float:
        return sum(self.stalls.values())

    def exposed_us(self, lane: str) -> float:
        """How much longer the step takes for a lane's transfers."""
        return self.stalls.get(lane, 0.0) + self.slowed.get(lane, 0.0)

    def alone_us(self, lane: str) -> float:
        """What a lane has to do, in the time that it takes with its cores to itself."""
        return sum(s.alone_us for s in self.spans if s.lane == lane)

    def busy_us(self, *lanes: str) -> float:
        """For how long one of ``lanes`` at least has something under way."""
        busy, until = 0.0, 0.0
        for s in sorted((s for s in self.spans if s.lane in lanes), key=lambda s: s.start_us):
            busy += max(0.0, s.end_us - max(s.start_us, until))
            until = max(until, s.end_us)
        return busy

    def nbytes(self, lane: str) -> int:
        return sum(s.nbytes for s in self.spans if s.lane == lane)

    @property
    def bound(self) -> str:
        """What bounds the step: compute, a lane or Python, whichever has most to do. No schedule makes it shorter than
        that (a roofline: Williams et al. 2009)."""
        return max((COMPUTE, LINK, READ, WRITE, HOST, PYTHON), key=self.alone_us)

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values."""
        return {
            "total_us": self.total_us,
            "stalled_us": self.stalled_us,
            "python_us": self.python_us,
            "bound": self.bound,
            "spans": [asdict(s) for s in self.spans],
        }

    def waited_for(self) -> list[Span]:
        """Transfers that the host waited for, longest wait first."""
        return sorted((s for s in self.spans if s.stalled_us > 0), key=lambda s: -s.stalled_us)

    def lines(self) -> list[str]:
        """For the report: what the time is spent on, and which transfers are not hidden. Times of lanes are those that
        they take alone; where they share cores, less of them is hidden."""
        parts = [f"compute {self.alone_us(COMPUTE) / 1e3:.2f} ms"]
        if us := self.alone_us(PYTHON):
            parts.append(f"Python {us / 1e3:.2f} ms")
        for lane, what in (
            (LINK, "transfers"),
            (READ, "reads of files"),
            (WRITE, "writes of files"),
            (HOST, "copies"),
        ):
            us = self.alone_us(lane)
            hidden = _hidden(self.exposed_us(lane), us) if us else 0.0
            if us or lane == LINK:
                parts.append(
                    f"{what} {us / 1e3:.2f} ms for {self.nbytes(lane):,} bytes, {hidden:.0%} of them hidden"
                )
                if lane != LINK and self.total_us:
                    parts[-1] += f", busy for {self.busy_us(lane) / self.total_us:.0%} of the time"
        rows = [f"predicted {self.total_us / 1e3:.2f} ms: {', '.join(parts)}; bound by {self.bound}"]
        waits = self.waited_for()
        for s in waits[:_SHOWN]:
            rows.append(
                f"waits {duration(s.stalled_us)} for the {s.label}: {s.hidden:.0%} of "
                f"{duration(s.alone_us)} hidden"
            )
        if len(waits) > _SHOWN:
            rest = sum(s.stalled_us for s in waits[_SHOWN:])
            rows.append(f"waits {duration(rest)} for {len(waits) - _SHOWN} more")
        return rows


def _hidden(exposed_us: float, alone_us: float) -> float:
    """The part of a time that the step does not take longer for."""
    return max(0.0, 1 - exposed_us / alone_us) if alone_us else 1.0
