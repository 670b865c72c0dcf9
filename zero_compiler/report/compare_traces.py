"""A plan's timeline beside what ``torch.profiler`` measured: the same names, for each instruction and lane.

Both are traces, and both have the lane in the name of every range (`zero_compiler.ranges`): nothing depends on how a
profiler calls its rows. What a thread does, it measures. A transfer is measured where something shows its end: a range
of its own for files and for transfers between hosts, and the device's own rows for what runs on an accelerator. Of any
other collective only its wait does: where nobody had to wait, it has taken at most the time until then.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..cost.timeline import COMPUTE, LINK, PYTHON, duration
from ..errors import ConfigError
from ..ir.transfers import start_of, wait_for
from ..ranges import lane_and_what, name_on
from .trace import UPDATE

_WAITED_US = 20.0  # a wait that takes longer than this has waited for something
_SHOWN = 40  # rows of the text; `rows` has all
_DEVICE = "gpu_user_annotation"  # the category of what ran on an accelerator while a range was entered
_HOST = "user_annotation"
_A_PROFILES = (
    "a Chrome trace that torch.profiler has exported (export_chrome_trace or tensorboard_trace_handler; .json or "
    ".json.gz)"
)
_A_PLANS = "the trace of a plan, as zero.inspect(model).save_trace and `zero-compiler plan --trace` write it"


@dataclass(frozen=True)
class ComparedRange:
    """What has one name in one run of a Program, or in the optimizer's step; times of all of it together in us.

    Args:
        run: "frame 0, forward", say, or "update".
        lane: "compute" for the thread that runs the Program, or that of a transfer.
        predicted_us: by the plan.
        measured_us: mean of the runs; None where the trace has no such range.
        at_most: the transfer has not taken longer than ``measured_us``, and may have taken less.
    """

    run: str
    lane: str
    name: str
    predicted_us: float
    measured_us: float | None
    at_most: bool = False

    @property
    def difference_us(self) -> float:
        """Measured less predicted, as far as it is known: 0 where it is not."""
        if self.measured_us is None:
            return 0.0
        difference = self.measured_us - self.predicted_us
        return min(0.0, difference) if self.at_most else difference


@dataclass(frozen=True)
class ComparedRun:
    """A Program that ran ``count`` times under the profiler; times of one run in us."""

    name: str
    count: int
    predicted_us: float
    measured_us: float


@dataclass(frozen=True)
class Comparison:
    """Predicted beside measured: ``print`` it, or read ``runs`` and ``rows``, largest difference first."""

    runs: Sequence[ComparedRun]
    rows: Sequence[ComparedRange]

    def __str__(self) -> str:
        return self.text()

    def text(self, most_rows: int = _SHOWN) -> str:
        """A line for each Program, and for each of the first ``most_rows`` rows."""
        lines = [
            f"{r.name}: predicted {duration(r.predicted_us)}, measured {duration(r.measured_us)} (mean of {r.count})"
            if r.count
            else f"{r.name}: predicted {duration(r.predicted_us)}, not in the trace"
            for r in self.runs
        ]
        shown = self.rows[:most_rows]
        head = ("predicted", "measured", "difference", "lane", "run", "what")
        table = [head, *map(_cells, shown)]
        widths = [max(len(row[i]) for row in table) for i in range(len(head) - 1)]
        for row in table:
            numbers = [cell.rjust(w) for cell, w in zip(row[:3], widths[:3], strict=True)]
            words = [cell.ljust(w) for cell, w in zip(row[3:-1], widths[3:], strict=True)]
            lines.append("  ".join([*numbers, *words, row[-1]]))
        if len(self.rows) > len(shown):
            lines.append(f"and {len(self.rows) - len(shown)} more with smaller differences")
        return "\n".join(lines)


def _cells(row: ComparedRange) -> tuple[str, ...]:
    if row.measured_us is None:
        measured, difference = "none", ""
    else:
        measured = f"{'at most ' if row.at_most else ''}{duration(row.measured_us)}"
        known = not row.at_most or row.difference_us
        difference = (
            f"{'-' if row.difference_us < 0 else '+'}{duration(abs(row.difference_us))}" if known else ""
        )
    return duration(row.predicted_us), measured, difference, row.lane, row.run, row.name


def compare_traces(predicted: object, measured: object) -> Comparison:
    """What a trace that ``zero.inspect(model).save_trace`` writes predicts, beside one of ``torch.profiler``.

    Args:
        predicted: the path of the one, or what is in it.
        measured: the path of the other, or the profiler: see :meth:`zero_compiler.report.report.Report.compare`.

    Raises:
        ConfigError: they are no such traces, or no Program of the plan ran while the other one was recorded.
    """
    if isinstance(predicted, dict):
        planned = _PlannedTimes(predicted["traceEvents"])
    else:
        planned = _PlannedTimes(_events_of(predicted, _A_PLANS))
        if not planned.lengths:
            raise ConfigError(f"compare: '{predicted}' has no predicted range; give {_A_PLANS}")
    found = _MeasuredRanges(_events_of(measured, _A_PROFILES), planned)
    if not any(r.count for r in found.runs):
        names = ", ".join(f'"{name}"' for name in planned.lengths)
        raise ConfigError(
            f"compare: the trace has no range of a Program of this model "
            f"({names or 'none: it is not compiled yet'}); give the Chrome trace that torch.profiler has exported "
            "after compiled steps of this model. A process numbers its frames in the order in which they are compiled"
        )
    rows = found.rows()
    rows.sort(key=lambda r: (-abs(r.difference_us), r.run, r.lane, r.name))
    return Comparison(tuple(found.runs), tuple(rows))


class _PlannedTimes:
    """What a plan's trace has: of each run the times of each name together, and how many ranges of it there are."""

    def __init__(self, events: Iterable[dict[str, Any]]) -> None:
        self.lengths: dict[str, float] = {}  # of each Program
        self.times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for e in events:
            run = e.get("args", {}).get("run") if e.get("ph") == "X" else None
            if run is None:
                continue
            if e["name"] == name_on(COMPUTE, run):
                self.lengths[run] = float(e["dur"])
            elif lane_and_what(e["name"])[0] != PYTHON:
                self.times[run][e["name"]].append(float(e["dur"]))


@dataclass(frozen=True)
class _Event:
    begin: float
    us: float
    thread: tuple[object, object]

    @property
    def end(self) -> float:
        return self.begin + self.us


class _MeasuredRanges:
    """The ranges of a profile, by name, beside those of a plan."""

    def __init__(self, events: Iterable[dict[str, Any]], planned: _PlannedTimes) -> None:
        self._planned = planned.times
        # Where a range is: on the thread that entered it, or on a device.
        self._found: dict[tuple[str, str], list[_Event]] = defaultdict(list)
        for e in events:
            if e.get("ph") == "X" and e.get("cat") in (_HOST, _DEVICE):
                event = _Event(float(e["ts"]), float(e["dur"]), (e.get("pid"), e.get("tid")))
                self._found[e["cat"], e["name"]].append(event)
        for found in self._found.values():
            found.sort(key=lambda e: e.begin)
        self._calls = sorted(
            ((call.begin, run, call) for run in planned.lengths for call in self._of_run(run)),
            key=lambda c: c[0],
        )
        self.runs = [
            ComparedRun(run, len(calls), us, _mean(calls))
            for run, us in planned.lengths.items()
            for calls in [self._of_run(run)]
        ]
        self._counts = {r.name: float(r.count) for r in self.runs} | {UPDATE: self._count_updates()}

    def rows(self) -> list[ComparedRange]:
        """What is planned of the runs that there were, and how long it took."""
        rows = []
        for run, times in self._planned.items():
            for name, us in times.items() if self._counts[run] or run == UPDATE else ():
                lane, what = lane_and_what(name)
                measured = self._took(run, lane, what, len(us))
                rows.append(ComparedRange(run, lane, what, math.fsum(us), *measured))
        return rows

    def _of_run(self, run: str) -> list[_Event]:
        return self._found.get((_HOST, name_on(COMPUTE, run)), [])

    def _count_updates(self) -> float:
        """How many updates there were: the optimizer's step has no range of its own, but each of its parts has one.

        A part may move several files, each with a range, of which the plan has the time together.
        """
        for name, us in self._planned.get(UPDATE, {}).items():
            lane, what = lane_and_what(name)
            if lane == COMPUTE and what.startswith("update of ") and (_HOST, name) in self._found:
                return len(self._found[_HOST, name]) / len(us)
        return 0.0

    def _took(self, run: str, lane: str, what: str, count: int) -> tuple[float | None, bool]:
        """Time of one run for ``what``, of which it has ``count`` ranges; and whether that is only a bound."""
        start, wait = name_on(COMPUTE, start_of(what)), name_on(COMPUTE, wait_for(what))
        # What runs on a device has the name of the range in which the thread has sent it there.
        sent = name_on(lane, what) if lane == COMPUTE else start
        for where, name in ((_DEVICE, sent), (_HOST, name_on(lane, what))):
            if (us := self._mean(run, where, name, count)) is not None:
                return us, False
        begun, waits = self._within(run, _HOST, start), self._within(run, _HOST, wait)
        if lane == LINK and begun and len(begun) == len(waits):
            each = [w.end - b.begin for b, w in zip(begun, waits, strict=True)]
            return math.fsum(each) / len(each) * count, any(w.us < _WAITED_US for w in waits)
        return self._mean(run, _HOST, start, count), False

    def _mean(self, run: str, where: str, name: str, count: int) -> float | None:
        found = self._within(run, where, name)
        if not found:
            return None
        return math.fsum(e.us for e in found) / (self._counts[run] or len(found) / count)

    def _within(self, run: str, where: str, name: str) -> list[_Event]:
        """The ranges of a name that are of a run: of the last one that began before it and has such a name."""
        found = self._found.get((where, name), [])
        if run == UPDATE:
            return found
        mine = [c for c in self._calls if name in self._planned[c[1]]]
        begins = [begin for begin, _, _ in mine]
        by_caller = where == _HOST and lane_and_what(name)[0] == COMPUTE
        out = []
        for e in found:
            at = bisect_right(begins, e.begin) - 1
            if at >= 0 and mine[at][1] == run and (not by_caller or e.thread == mine[at][2].thread):
                out.append(e)
        return out


def is_trace(path: os.PathLike[str]) -> bool:
    """Whether a file is a Chrome trace, as its beginning says; False where it cannot be read."""
    try:
        with open(path, "rb") as file:
            begin = file.read(1 << 16)
    except OSError:
        return False
    return begin[:2] == b"\x1f\x8b" or b'"traceEvents"' in begin


def _mean(events: Sequence[_Event]) -> float:
    return math.fsum(e.us for e in events) / len(events) if events else 0.0


def _events_of(trace: object, wanted: str) -> list[dict[str, Any]]:
    """The events of a Chrome trace, by its path, or of a profiler that has ended; ``wanted``: what it is to be.

    Raises:
        ConfigError: it is neither.
    """
    if hasattr(trace, "export_chrome_trace"):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "trace.json")
            try:
                trace.export_chrome_trace(path)
            except (AssertionError, AttributeError, RuntimeError) as error:
                raise ConfigError(
                    f"compare: the profiler could not export its trace ({error}); give one that has ended and has not "
                    "exported it before, or the path of what it has exported"
                ) from error
            return _events_of(path, wanted)
    if not isinstance(trace, (str, os.PathLike)):
        raise ConfigError(f"compare takes the path of {wanted}, or the profiler, not {type(trace).__name__}")
    path = os.fspath(trace)
    try:
        with open(path, "rb") as file:
            raw = file.read()
        found = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        events = found["traceEvents"] if isinstance(found, dict) else found
        return [e for e in events if isinstance(e, dict)]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "it holds no such trace"
        raise ConfigError(
            f"compare: {path!r} could not be read as a Chrome trace ({why}); give {wanted}"
        ) from error
