"""What is planned of one captured frame, and of the optimizer's update: what reports are made of."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..config import Config
from ..cost.prefetch import PrefetchChoice
from ..cost.timeline import Timeline
from ..ir.decisions import FrameDecisions
from ..ir.facts import ParamRef
from ..ir.program import Program
from ..ir.recorded_phase import RecordedPhase
from ..ir.transfers import GatherDesc, ReduceDesc
from ..passes.base import ParamPlan
from .lifetimes import Origin


class PendingForward:
    """A forward of a frame whose backward is still due."""


@dataclass
class Frame:
    """One captured frame: its programs by phase, and the time of the passes."""

    index: int
    config: Config
    params: Mapping[ParamRef, ParamPlan]
    trace: Any
    programs: dict[str, Program] = field(default_factory=dict)
    timelines: dict[str, Timeline] = field(default_factory=dict)
    choices: dict[str, PrefetchChoice] = field(default_factory=dict)
    kept_bytes: int = 0
    # Of gathers of second shards, and of the same from all ranks.
    within_host_us: tuple[float, float] = (0.0, 0.0)
    remade: list[Any] = field(default_factory=list)  # passes.Remade: what backward makes again
    offloaded: list[Any] = field(default_factory=list)  # facts.Away: what waits on another tier
    held_bytes: int = 0  # most that backward holds at once of what forward made, or what it makes again
    bucket_bytes: int = 0  # of full tensors; smaller transfers share a collective
    bucket_why: str = ""
    plans_tried: int = 0  # for a memory budget: how often a phase was lowered on trial
    search_ended: str = ""  # why no more was tried; "" where nothing was left to try
    stored: str = ""  # the file from which the plan comes that an earlier start has found
    accumulating: tuple[Program, Timeline] | None = None  # of the backward under zero.no_sync
    accumulation: str = ""  # of a library's micro-batches: how often gradients are sent, and why
    code: str = ""  # what Dynamo compiled, as in Captured
    # Of the matrix products of a forward and its backward, and what they take at full rate.
    flops: float = 0.0
    products_us: float = 0.0
    blas_us: float = 0.0  # of these, those that oneDNN could do, at the rate of torch's BLAS
    decisions: FrameDecisions | None = None  # what was decided of it, once its phases are compiled
    saved_bytes: int = 0  # what forward hands to backward
    # Of what forward returns, the first so many are the caller's, and backward takes the rest.
    num_outputs: int = 0
    recorded: dict[str, RecordedPhase] = field(default_factory=dict)  # into graphs of the device, by phase
    sized: Any = None  # under a budget: its Programs at sizes of later calls, as `Sized`
    planned_sizes: dict[str, int] = field(default_factory=dict)  # those that may change, as they were planned
    behind: set[str] = field(
        default_factory=set
    )  # code that has run after its forward and before its backward
    calls: weakref.WeakSet[PendingForward] = field(
        default_factory=weakref.WeakSet
    )  # whose backward is still due

    @property
    def in_backward(self) -> frozenset[ParamRef]:
        """The parameters that its backward gathers, to compute with them, or gives gradients."""
        backward = self.programs.get("backward")
        if backward is None:
            return frozenset()
        descs: list[GatherDesc | ReduceDesc] = [*backward.gathers, *backward.reduces]
        return frozenset(ParamRef(desc.owner, name) for desc in descs for name in desc.names)

    @property
    def saved_now(self) -> int:
        """What its last forward has handed to backward, at the sizes that it had."""
        now = None if self.sized is None else self.sized.saved_now
        return self.saved_bytes if now is None else int(now)

    @property
    def origin(self) -> Origin | None:
        """Of what its backward begins with; None where there is no forward, or sizes are among what it takes."""
        forward = self.programs.get("forward")
        return None if forward is None or self.planned_sizes else Origin(forward, self.num_outputs)

    def opened(self) -> PendingForward:
        """Note a forward; what is returned lives until its backward has run."""
        call = PendingForward()
        self.calls.add(call)
        return call

    def add(self, program: Program, kept_bytes: int, timeline: Timeline, choice: PrefetchChoice) -> None:
        self.programs[program.phase] = program
        self.timelines[program.phase] = timeline
        self.choices[program.phase] = choice
        self.kept_bytes = max(self.kept_bytes, kept_bytes)
        if {o.name for o in self.offloaded} & timeline.away_us.keys():
            # What the planner reckoned with stands on the times of operators alone: here is what the Programs say.
            paid = [t.away_us for t in self.timelines.values()]
            self.offloaded = [
                replace(o, us=math.fsum(us.get(o.name, 0.0) for us in paid)) for o in self.offloaded
            ]

    def every_program(self) -> list[Program]:
        """Those of its phases, and that of the backward under ``zero.no_sync``."""
        return [*self.programs.values(), *([self.accumulating[0]] if self.accumulating else [])]

    def every_timeline(self) -> dict[str, Timeline]:
        """Theirs, by title."""
        more = {self.accumulating[0].title: self.accumulating[1]} if self.accumulating else {}
        return {**self.timelines, **more}

    def accumulating_lines(self) -> list[str]:
        """That one in short: it differs from the backward in its reductions alone."""
        if self.accumulating is None:
            return []
        program, timeline = self.accumulating
        count = len({(k.owner, name) for k in program.keeps for name in k.names})
        return [
            "",
            f"frame {self.index}, {program.title}: {len(program.instrs)} instructions on the same segments, "
            f"{count} gradients kept in {program.waiting_bytes:,} bytes instead of reduced, "
            f"arena {program.buffer_bytes:,} bytes, peak {max(program.live, default=0):,} bytes",
            timeline.lines()[0],
        ]


@dataclass(frozen=True)
class Update:
    """The optimizer's step: ``early`` turns of it run while backward does and are in its timeline; ``late`` ones follow
    in ``timeline``. ``what`` says which optimizer, and whether it was assumed."""

    what: str
    early: int
    late: int
    timeline: Timeline

    def lines(self) -> list[str]:
        """For the report."""
        when = [
            f"{n} {where}"
            for n, where in ((self.early, "while backward runs"), (self.late, "behind it"))
            if n
        ]
        lines = self.timeline.lines() if self.late else []
        return [f"update: {self.early + self.late} turns, {', '.join(when)} ({self.what})", *lines]

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values."""
        return {
            "what": self.what,
            "early": self.early,
            "late": self.late,
            "timeline": self.timeline.to_dict(),
        }
