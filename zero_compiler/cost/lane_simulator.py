"""Simulated lanes: one queue of transfers a lane, beside a host that computes and waits."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .hardware import HardwareSpec
from .timeline import AROUND, COMPUTE, LINK, PYTHON, Span


@dataclass
class Task:
    lane: str
    label: str
    alone_us: float
    left_us: float
    nbytes: int
    start_us: float = 0.0
    slowed_us: float = 0.0  # by so much compute takes longer for it
    wanted_us: float | None = None  # since when the host waits for it
    stalled_us: float = 0.0  # for so long it did, and computed nothing
    done: bool = False


def share_cores(spec: HardwareSpec) -> bool:
    """Whether compute and collectives slow each other down: what overlaps then takes as long as one after the other."""
    return any(COMPUTE in group and LINK in group for group in spec.shared)


class LaneSimulator:
    """The host, which computes and waits, and one queue a lane."""

    def __init__(self, spec: HardwareSpec) -> None:
        self.shared = spec.shared
        self.on_cpu = share_cores(spec)
        self.now = 0.0
        self.stalled: dict[str, float] = {}
        self.slowed: dict[str, float] = {}
        self.queues: dict[str, deque[Task]] = {}
        self.spans: list[Span] = []
        self.noted: list[Span] = []  # of the host, where it does more than one thing for an instruction

    def start(self, lane: str, label: str, us: float, nbytes: int) -> Task | None:
        if us == 0:
            return None  # nothing moves
        task = Task(lane, label, us, us, nbytes, self.now)
        self.queues.setdefault(lane, deque()).append(task)
        return task

    def python(self, us: float) -> None:
        """The host's time around a Program: an accelerator computes what is before and behind it meanwhile."""
        if us and self.on_cpu:
            self.compute(AROUND, us, PYTHON)
        elif us:
            self.spans.append(Span(PYTHON, 0.0, us, AROUND, alone_us=us))

    def compute(self, label: str, us: float, lane: str = COMPUTE) -> None:
        begin, left_us = self.now, us
        while left_us > 1e-9:
            rates = self._rates(computing=True)
            step = min([left_us / rates[COMPUTE], *(q[0].left_us / rates[lane] for lane, q in self._busy())])
            left_us -= step * rates[COMPUTE]
            self._add_slowed(step * (1 - rates[COMPUTE]))
            self._advance(step, rates)
        self.spans.append(Span(lane, begin, self.now, label, alone_us=us))

    def note(self, label: str, begin_us: float) -> None:
        """The host has done what is called ``label`` from ``begin_us`` until now."""
        self.noted.append(Span(COMPUTE, begin_us, self.now, label))

    def wait(self, task: Task | None) -> None:
        if task is None:
            return
        begin = task.wanted_us = self.now
        while not task.done:
            rates = self._rates(computing=False)
            self._advance(min(q[0].left_us / rates[lane] for lane, q in self._busy()), rates)
        self.stalled[task.lane] = self.stalled.get(task.lane, 0.0) + self.now - begin

    def drain(self) -> None:
        for queue in self.queues.values():
            while queue:
                self.wait(queue[-1])

    def _busy(self) -> list[tuple[str, deque[Task]]]:
        return [(lane, q) for lane, q in self.queues.items() if q]

    def _rates(self, computing: bool) -> dict[str, float]:
        """The speed of every busy lane: its part of the cores or the disk that it shares."""
        busy = [*([COMPUTE] if computing else []), *(lane for lane, _ in self._busy())]
        groups = [set(busy).intersection(group) for group in self.shared]
        return {lane: 1.0 / max((len(g) for g in groups if lane in g), default=1) for lane in busy}

    def _add_slowed(self, us: float) -> None:
        """Compute takes longer for the transfers that share its cores, as much for the one as for the other."""
        heads = [
            queue[0]
            for lane, queue in self._busy()
            if any(COMPUTE in group and lane in group for group in self.shared)
        ]
        for head in heads:
            head.slowed_us += us / len(heads)
            self.slowed[head.lane] = self.slowed.get(head.lane, 0.0) + us / len(heads)

    def _advance(self, us: float, rates: dict[str, float]) -> None:
        self.now += us
        for lane, queue in self._busy():
            head = queue[0]
            head.left_us -= us * rates[lane]
            if head.left_us <= 1e-9:
                queue.popleft()
                head.done = True
                head.stalled_us = 0.0 if head.wanted_us is None else self.now - head.wanted_us
                self.spans.append(
                    Span(
                        lane,
                        head.start_us,
                        self.now,
                        head.label,
                        head.nbytes,
                        head.stalled_us,
                        head.slowed_us,
                        head.alone_us,
                    )
                )
                if queue:
                    queue[0].start_us = max(queue[0].start_us, self.now)
