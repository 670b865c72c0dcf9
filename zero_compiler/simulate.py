"""Discrete-event simulation of a Program: when each instruction would run, and what bounds the step.

The host walks the instructions in order. A start puts a transfer on its lane, which serves one at a time in
order; a wait blocks the host until the transfer is done. Lanes that share a core (``HardwareSpec.shared``)
slow each other down: each of ``k`` that are busy runs at ``1/k`` of its speed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from .hardware import HardwareSpec
from .program import Compute, Gather, Program, Reduce, WaitGather, WaitReduce

COMPUTE, LINK = "compute", "device-device"


@dataclass(frozen=True)
class Span:
    """``label`` occupies ``lane`` from ``start_us`` to ``end_us``; ``nbytes`` of full tensors move."""

    lane: str
    start_us: float
    end_us: float
    label: str
    nbytes: int = 0


@dataclass
class Timeline:
    """Result of a simulation. ``stalled_us`` is the time in which the host waited and nothing was computed."""

    total_us: float
    stalled_us: float
    spans: list[Span] = field(default_factory=list)

    def busy_us(self, lane: str) -> float:
        return sum(s.end_us - s.start_us for s in self.spans if s.lane == lane)

    def nbytes(self, lane: str) -> int:
        return sum(s.nbytes for s in self.spans if s.lane == lane)

    @property
    def bound(self) -> str:
        """The lane that bounds the step: the one that would gain most from being faster."""
        return LINK if self.stalled_us > self.total_us / 2 else COMPUTE

    def text(self) -> str:
        """Two lines for the report."""
        link = self.busy_us(LINK)
        hidden = 0.0 if link == 0 else max(0.0, 1 - self.stalled_us / link)
        return (
            f"predicted {self.total_us / 1e3:.2f} ms: compute {self.busy_us(COMPUTE) / 1e3:.2f} ms, "
            f"transfers {link / 1e3:.2f} ms for {self.nbytes(LINK):,} bytes, {hidden:.0%} of them hidden; "
            f"bound by {self.bound}"
        )


@dataclass
class _Task:
    lane: str
    label: str
    left_us: float
    nbytes: int
    start_us: float = 0.0


def simulate(program: Program, spec: HardwareSpec, world: int) -> Timeline:
    """Timeline of one run of ``program`` on ``world`` ranks of a machine.

    Raises:
        ConfigError: the spec lacks a collective that the Program uses.
    """
    sim = _Simulator(spec)
    gathers: dict[int, _Task] = {}
    reduces: dict[int, _Task] = {}
    for instr in program.instrs:
        if isinstance(instr, Compute):
            label = f"segment {instr.segment}"
            sim.compute(label, program.segment_us[instr.segment] if program.segment_us else 0.0)
        elif isinstance(instr, Gather):
            g = program.gathers[instr.index]
            nbytes = 0 if g.home else sum(g.chunk_numels) * world * getattr(torch, g.dtype).itemsize
            us = spec.collective("all_gather", world, g.shared).us(nbytes) if nbytes and world > 1 else 0.0
            gathers[instr.index] = sim.start(g.label, us, nbytes if world > 1 else 0)
        elif isinstance(instr, Reduce):
            r = program.reduces[instr.index]
            kind = "all_reduce" if r.replicated else "reduce_scatter"
            nbytes = sum(r.chunk_numels) * (1 if r.replicated else world) * getattr(torch, r.dtype).itemsize
            us = 0.0 if world == 1 else spec.collective(kind, world, r.shared).us(nbytes)
            reduces[instr.index] = sim.start(r.label, us, nbytes if world > 1 else 0)
        elif isinstance(instr, WaitGather):
            sim.wait(gathers[instr.index])
        elif isinstance(instr, WaitReduce):
            sim.wait(reduces[instr.index])
    sim.drain()
    return Timeline(sim.now, sim.stalled, sim.spans)


class _Simulator:
    def __init__(self, spec: HardwareSpec) -> None:
        self.sharing = any(COMPUTE in group and LINK in group for group in spec.shared)
        self.now = 0.0
        self.stalled = 0.0
        self.queue: deque[_Task] = deque()
        self.spans: list[Span] = []

    def start(self, label: str, us: float, nbytes: int) -> _Task:
        task = _Task(LINK, label, us, nbytes, self.now)
        self.queue.append(task)
        return task

    def compute(self, label: str, us: float) -> None:
        begin = self.now
        while us > 1e-9:
            rate = 0.5 if self.sharing and self.queue else 1.0
            step = us / rate
            if self.queue:
                step = min(step, self.queue[0].left_us / rate)
            us -= step * rate
            self._advance(step, rate)
        self.spans.append(Span(COMPUTE, begin, self.now, label))

    def wait(self, task: _Task) -> None:
        begin = self.now
        while any(t is task for t in self.queue):
            self._advance(self.queue[0].left_us, 1.0)
        self.stalled += self.now - begin

    def drain(self) -> None:
        while self.queue:
            self.wait(self.queue[-1])

    def _advance(self, us: float, rate: float) -> None:
        self.now += us
        if not self.queue:
            return
        head = self.queue[0]
        head.left_us -= us * rate
        if head.left_us <= 1e-9:
            self.queue.popleft()
            self.spans.append(Span(LINK, head.start_us, self.now, head.label, head.nbytes))
            if self.queue:
                self.queue[0].start_us = max(self.queue[0].start_us, self.now)
