"""The predicted timelines as a picture: a page of HTML, and Chrome's trace format."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jinja2

from ..cost.timeline import COMPUTE, HOST, LINK, PYTHON, READ, WRITE, Timeline, duration

_LANES = {
    COMPUTE: "compute",
    LINK: "transfers between ranks",
    READ: "reads of files",
    WRITE: "writes of files",
    HOST: "copies to and from the host",
    PYTHON: "Python around the Program",
}
_WORK = (COMPUTE, PYTHON)  # no transfers
# In the order of a step; a phase that is no part of one has a process of its own in a trace.
STEP = ("forward", "backward")


def trace(frames: Iterable[Any], update: Timeline | None = None) -> dict[str, Any]:
    """The timelines of frames as trace events; times in us.

    A frame is a process with a row for each lane, its backward behind its forward; what a call holds beside the
    bytes at rest is a counter. So is the ``update`` that follows. The format is Google's "Trace Event Format".
    """
    events: list[dict[str, object]] = []
    processes = 0
    for frame in frames:
        others = [p for p in frame.programs if p not in STEP]
        for phases in ([p for p in STEP if p in frame.programs], *([p] for p in others)):
            if not phases:
                continue
            processes += 1
            begin = 0.0
            events += _rows(f"frame {frame.index}: {', '.join(phases)} (predicted)", processes)
            for phase in phases:
                timeline = frame.timelines[phase]
                events += _events(timeline, frame.programs[phase].live, phase, processes, begin)
                begin += timeline.total_us
    if update is not None:
        events += _rows("update (predicted)", processes + 1)
        events += _events(update, [], "update", processes + 1, 0.0)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _rows(name: str, pid: int) -> Iterable[dict[str, Any]]:
    """A process and its lanes."""
    yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}
    for tid, lane in enumerate(_LANES.values()):
        yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": lane}}


def _events(
    timeline: Timeline, live: list[int], phase: str, pid: int, begin: float
) -> Iterable[dict[str, object]]:
    lanes = list(_LANES)
    for s in timeline.spans:
        args: dict[str, object] = {"phase": phase}
        if s.lane not in _WORK:
            args |= {"bytes": s.nbytes, "hidden": round(s.hidden, 3), "stalled_us": s.stalled_us}
        yield {
            "name": s.label,
            "cat": phase,
            "ph": "X",
            "pid": pid,
            "tid": lanes.index(s.lane),
            "ts": begin + s.start_us,
            "dur": s.end_us - s.start_us,
            "args": args,
        }
    for at, nbytes in zip(timeline.reached_us, live, strict=False):
        yield {"name": "live bytes", "ph": "C", "pid": pid, "ts": begin + at, "args": {"bytes": nbytes}}


def page(frames: Iterable[Any], text: str, update: Timeline | None = None) -> str:
    """A page with a picture of every phase, and ``text``."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("zero_compiler"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    pictures = [
        _drawn(f"frame {frame.index}, {phase}", frame.timelines[phase], program.live, frame.choices[phase])
        for frame in frames
        for phase, program in frame.programs.items()
    ]
    if update is not None:
        pictures.append(_drawn("update", update))
    return environment.get_template("plan.html").render(pictures=pictures, text=text)


def _drawn(
    title: str, timeline: Timeline, live: list[int] | None = None, choice: Any = None
) -> dict[str, object]:
    """What the template draws of one phase; lengths are in parts of 1000 of its time, and of its most live bytes."""
    total = timeline.total_us or 1.0
    lanes = []
    for lane, name in _LANES.items():
        bars = []
        for s in timeline.spans:
            if s.lane != lane:
                continue
            us = s.end_us - s.start_us
            told = f"{s.label}: {duration(us)}"
            if lane not in _WORK:
                told += f", {s.nbytes:,} bytes, {s.hidden:.0%} hidden"
            # What is waited for is the end of a transfer.
            shown = us - min(us, s.stalled_us)
            kind = "compute" if lane in _WORK else "reduce" if s.label.startswith("reduction") else "gather"
            bars.append(
                {
                    "x": 1000 * s.start_us / total,
                    "width": 1000 * us / total,
                    "stall_x": 1000 * (s.start_us + shown) / total,
                    "stall": 1000 * (us - shown) / total,
                    "kind": kind,
                    "told": told,
                }
            )
        if lane in (READ, WRITE, HOST, PYTHON) and not bars:
            continue
        lanes.append({"name": name, "bars": bars, "busy": f"{timeline.busy_us(lane) / total:.0%} busy"})
    peak = max(live or [], default=0)
    points = []
    height = 100.0
    for at, nbytes in zip(timeline.reached_us, live or [], strict=False):
        x = 1000 * at / total
        points.append(f"{x:.2f},{height:.2f}")
        height = 100 - 100 * nbytes / max(peak, 1)
        points.append(f"{x:.2f},{height:.2f}")
    points.append(f"1000,{height:.2f}")
    ticks = [{"x": 1000 * k / 10, "text": duration(total * k / 10)} for k in range(11)]
    return {
        "title": title,
        "lines": [*timeline.lines(), *([choice.text()] if choice is not None else [])],
        "lanes": lanes,
        "ticks": ticks,
        "memory": " ".join(points),
        "peak": "" if live is None else f"{peak:,} bytes live at most, beside what is at rest",
    }
