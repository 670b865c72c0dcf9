"""A whole step of a plan: its micro-batches, what it takes, how much is done in it, and what bounds it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..cost.timeline import COMPUTE, HOST, LINK, PYTHON, READ, WRITE, Timeline
from .frame import Frame

LANES = (COMPUTE, LINK, READ, WRITE, HOST, PYTHON)


@dataclass(frozen=True)
class MicroBatches:
    """What one rank is given in a step.

    Args:
        count: calls of the model, whose gradients are added up.
        rows, tokens: of one call; 0 where that is not known.
        waits: whole gradients wait for one reduction, under ``zero.no_sync``; else each call reduces its own.
    """

    count: int = 1
    rows: int = 0
    tokens: int = 0
    waits: bool = True

    def text(self) -> str:
        """In words, for one rank."""
        of = f"{self.tokens:,} tokens a rank" if self.tokens else f"{self.rows:,} rows a rank"
        if self.count == 1:
            return of
        how = (
            "whole gradients wait for one reduction (zero.no_sync)"
            if self.waits
            else "each reduces its gradients"
        )
        return f"{self.count} micro-batches of {of}; {how}"


@dataclass(frozen=True)
class StepTime:
    """Predicted time of a step, by part, and what it does.

    Args:
        forward_us, backward_us, update_us: of all frames and micro-batches.
        ranks: that are given different data.
        flops: of the matrix products of a call on one rank, without what backward makes again.
        products_us: what these take at the rates that the hardware gives for them.
        alone_us: of each lane, what it has to do in a step, alone on the machine.
        given: to one rank.
    """

    forward_us: float
    backward_us: float
    update_us: float
    ranks: int
    flops: float
    products_us: float
    alone_us: dict[str, float]
    given: MicroBatches
    hardware: str

    @property
    def us(self) -> float:
        return self.forward_us + self.backward_us + self.update_us

    @property
    def bound(self) -> str:
        """What has most to do. No schedule makes the step shorter than that."""
        return max(self.alone_us, key=self.alone_us.__getitem__)

    @property
    def done(self) -> tuple[int, str]:
        """What all ranks get done in a step, in tokens where these are known, and else in rows."""
        count, unit = (self.given.tokens, "tokens") if self.given.tokens else (self.given.rows, "rows")
        return self.given.count * count * self.ranks, unit

    @property
    def us_each(self) -> float:
        """Time of a step by what all ranks get done in it; that of the step where nobody has said how much it is."""
        return self.us / max(1, self.done[0])

    @property
    def flops_per_us(self) -> float:
        """Of one device."""
        return self.given.count * self.flops / self.us if self.us else 0.0

    @property
    def share_of_peak(self) -> float:
        """The part of the step in which a device would be done with its matrix products at full rate."""
        return self.given.count * self.products_us / self.us if self.us else 0.0

    def lines(self) -> list[str]:
        """For the report."""
        parts = {"forward": self.forward_us, "backward": self.backward_us, "update": self.update_us}
        times = ", ".join(f"{name} {us / 1e3:,.2f}" for name, us in parts.items() if us)
        known = bool(self.given.rows or self.given.tokens)
        lines = [
            f"predicted step: {self.us / 1e3:,.2f} ms ({times})"
            + (f" for {self.given.text()}" if known else "")
        ]
        count, unit = self.done
        rates = [f"{count / self.us * 1e6:,.0f} {unit}/s on all ranks"] if known and self.us else []
        if self.flops:
            rates.append(
                f"{self.flops_per_us / 1e6:,.3g} TFLOP/s a device, {self.share_of_peak:.0%} of what {self.hardware} "
                "does in matrix products alone"
            )
        if rates:
            lines.append("; ".join(rates))
        others = ", ".join(
            f"{lane} {us / 1e3:,.2f}" for lane, us in self.alone_us.items() if us and lane != self.bound
        )
        lines.append(
            f"bound by {self.bound}, which has {self.alone_us[self.bound] / 1e3:,.2f} ms to do"
            + (f" (others: {others} ms)" if others else "")
        )
        return lines

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values."""
        count, unit = self.done
        return {
            "us": self.us,
            "forward_us": self.forward_us,
            "backward_us": self.backward_us,
            "update_us": self.update_us,
            "micro_batches": self.given.count,
            "gradients_wait": self.given.waits,
            "rows_per_rank": self.given.rows,
            "tokens_per_rank": self.given.tokens,
            f"{unit}_per_second": count / self.us * 1e6 if self.us else 0.0,
            "tflops_per_device": self.flops_per_us / 1e6,
            "share_of_peak": self.share_of_peak,
            "bound": self.bound,
            "lanes_us": self.alone_us,
        }


def step_of(
    frames: Sequence[Frame], update: Timeline | None, given: MicroBatches, ranks: int, hardware: str
) -> StepTime:
    """The step of frames, each called once in a micro-batch, and the update behind the last.

    Args:
        frames: `report.Frame`.
        ranks: that are given different data.
    """
    forwards = [f.timelines["forward"] for f in frames if "forward" in f.timelines]
    backwards = [f.timelines["backward"] for f in frames if "backward" in f.timelines]
    # Of every micro-batch but the last.
    earlier = [
        f.accumulating[1] if given.waits and f.accumulating is not None else f.timelines["backward"]
        for f in frames
        if "backward" in f.timelines
    ]
    more = given.count - 1
    runs = [
        *((t, given.count) for t in forwards),
        *((t, 1) for t in backwards),
        *((t, more) for t in earlier),
    ]
    runs += [(update, 1)] if update is not None else []
    return StepTime(
        given.count * _total(forwards),
        _total(backwards) + more * _total(earlier),
        update.total_us if update is not None else 0.0,
        ranks,
        math.fsum(f.flops for f in frames),
        math.fsum(f.products_us for f in frames),
        {lane: math.fsum(n * t.alone_us(lane) for t, n in runs) for lane in LANES},
        given,
        hardware,
    )


def _total(timelines: Iterable[Timeline]) -> float:
    return math.fsum(t.total_us for t in timelines)
