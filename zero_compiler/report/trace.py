"""The predicted timelines in Chrome's trace format, for Perfetto or ``chrome://tracing``."""

from __future__ import annotations

from collections.abc import Iterable

from ..cost.timeline import COMPUTE, HOST, LINK, PYTHON, READ, WRITE, Span, Timeline
from ..ir.program import Program
from ..ir.transfers import start_of, wait_for
from ..ranges import name_on
from .frame import Frame

LANE_NAMES = {
    COMPUTE: "compute",
    LINK: "transfers between ranks",
    READ: "reads of files",
    WRITE: "writes of files",
    HOST: "copies to and from the host",
    PYTHON: "Python around the Program",
}
WORK = (COMPUTE, PYTHON)  # no transfers
# In the order of a step; a phase that is no part of one has a process of its own in a trace.
STEP = ("forward", "backward")
UPDATE = "update"


def trace(frames: Iterable[Frame], update: Timeline | None = None) -> dict[str, object]:
    """The timelines of frames as trace events; times in us.

    A frame is a process with a row for each lane, its backward behind its forward; what a call holds beside the
    bytes at rest is a counter. So is the ``update`` that follows. Names are those of `zero_compiler.ranges`, as a
    profile has them: starts, waits and releases stand in the row of compute, as in a profile of the thread that does
    them. Of each event ``args`` has the ``run`` that it is of: a Program's, or "update". The format is Google's "Trace
    Event Format".
    """
    events: list[dict[str, object]] = []
    processes = 0
    for frame in frames:
        for programs in _processes(frame):
            processes += 1
            begin = 0.0
            titles = ", ".join(program.title for program, _ in programs)
            events += _rows(f"frame {frame.index}: {titles} (predicted)", processes)
            for program, timeline in programs:
                run = program.title_in(frame.index)
                spans = [_called(run, timeline), *_done_by_host(program, timeline)]
                spans += [s for s in timeline.spans if s.lane != COMPUTE]
                events += _events(spans, program.title, run, processes, begin)
                events += _live(timeline, program.live, processes, begin)
                begin += timeline.total_us
    if update is not None:
        events += _rows("update (predicted)", processes + 1)
        events += _events([*update.noted, *update.spans], UPDATE, UPDATE, processes + 1, 0.0)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _processes(frame: Frame) -> Iterable[list[tuple[Program, Timeline]]]:
    """The Programs of a frame: first those of a step, which follow each other."""
    timelines = frame.every_timeline()
    programs = [(program, timelines[program.title]) for program in frame.every_program()]
    step = [(p, t) for p, t in programs if p.title in STEP]
    return [*([step] if step else []), *([(p, t)] for p, t in programs if p.title not in STEP)]


def _called(run: str, timeline: Timeline) -> Span:
    """A run of a Program, which a profile shows as one range."""
    return Span(COMPUTE, timeline.begin_us, max([timeline.begin_us, *timeline.reached_us]), run)


def _done_by_host(program: Program, timeline: Timeline) -> list[Span]:
    """What the thread that runs a Program does."""
    spans = []
    begin = timeline.begin_us
    for instr, end in zip(program.instrs, timeline.reached_us, strict=True):
        # What takes time on the compute device is among the spans of the timeline; but packing is a part of a start,
        # and unpacking of a wait.
        if (instr.table == "gathers" or instr.work(program) is None) and not instr.idle(program):
            spans.append(Span(COMPUTE, begin, end, instr.name(program)))
        begin = end
    parts = {start_of(g.label) for g in program.gathers} | {wait_for(g.label) for g in program.gathers}
    computed = (s for s in timeline.spans if s.lane == COMPUTE and s.label not in parts)
    return [*spans, *timeline.noted, *computed]


def _rows(name: str, pid: int) -> Iterable[dict[str, object]]:
    """A process and its lanes."""
    yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}
    for tid, (lane, about) in enumerate(LANE_NAMES.items()):
        row = lane if lane in WORK else f"{lane}: {about}"
        yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": row}}


def _events(
    spans: Iterable[Span], phase: str, run: str, pid: int, begin: float
) -> Iterable[dict[str, object]]:
    lanes = list(LANE_NAMES)
    for s in spans:
        args: dict[str, object] = {"phase": phase, "run": run}
        if s.lane not in WORK:
            args |= {"bytes": s.nbytes, "hidden": round(s.hidden, 3), "stalled_us": s.stalled_us}
        yield {
            "name": name_on(s.lane, s.label),
            "cat": phase,
            "ph": "X",
            "pid": pid,
            "tid": lanes.index(s.lane),
            "ts": begin + s.start_us,
            "dur": s.end_us - s.start_us,
            "args": args,
        }


def _live(timeline: Timeline, live: list[int], pid: int, begin: float) -> Iterable[dict[str, object]]:
    for at, nbytes in zip(timeline.reached_us, live, strict=False):
        yield {"name": "live bytes", "ph": "C", "pid": pid, "ts": begin + at, "args": {"bytes": nbytes}}
