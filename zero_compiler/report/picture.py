"""A plan as a page: memory over the step, the buffers of every arena, and the lanes.

What the page draws is made here, as columns of whole numbers; `templates/plan/` draws it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..cost.timeline import COMPUTE, PYTHON, Span, Timeline, duration
from ..ir.program import Program
from ..ir.transfers import GatherDesc, ReduceDesc
from ..passes.fsdp_units import unit_of
from .frame import Frame
from .html_page import rendered
from .lifetimes import (
    ACTIVATION,
    ALLOCATED,
    FULL_GRADIENT,
    WEIGHT,
    BufferLifetime,
    Origin,
    layer_of,
    lifetimes,
)
from .memory_areas import AREAS, areas_of, at_rest
from .trace import LANE_NAMES, STEP, WORK
from .verdict import amount

_TICKS = 10_000_000  # of a view's time, at least: what is drawn begins and ends at whole ones

# What a bar of a lane does, in the order of the page's colours.
_BAR_KINDS = (
    "compute",
    "gather",
    "reduction",
    "parameters",
    "activations",
    "optimizer",
    "python",
    "gradients",
)
_BAR_FIELDS = ("at", "length", "waited", "bytes", "kind", "text", "layer", "hidden")
_BLOCK_FIELDS = ("at", "length", "offset", "bytes", "what", "text", "layer")
_POOL_TITLES = {
    "transient": "Arena for gathered weights and staging",
    "kept": "Arena of weights that stay gathered",
    "slots": "Arena of gathered weights that all ranks share",
    "own": "Staging that other ranks read",
    "host": "Pool on the host, through which files are read and written",
    "device": "Pool on the device for chunks that come from other tiers",
    ALLOCATED: "Allocated as the step runs: activations and gradients (the allocator chooses the places)",
}
_WHAT = (
    WEIGHT,
    "chunk on its way",
    "staging",
    FULL_GRADIENT,
    "gradient",
    ACTIVATION,
    "activation on its way",
)


def page(report: Any) -> str:
    """The page of a report. It needs nothing from elsewhere."""
    views = [_View(title, parts, report) for title, parts in _views(report)]
    drawn = [view.drawn() for view in views]
    return rendered(
        "plan/page.html",
        {"areas": AREAS, "what": _WHAT, "kinds": _BAR_KINDS, "limit": _limit(report), "views": drawn},
        areas=AREAS,
        tables=[view.table() for view in views],
        headline=report.verdict.line() if report.verdict is not None else "",
        title=report.model,
        text=report.summary(),
        amount=amount,
    )


class _Section(NamedTuple):
    """What stands behind what came before in a view: one phase of a frame, or the update (no Program)."""

    name: str
    timeline: Timeline
    program: Program | None = None
    lines: tuple[str, ...] = ()
    frame: int = 0
    origin: Origin | None = None  # of what a backward begins with


def _views(report: Any) -> Iterable[tuple[str, list[_Section]]]:
    """The step as a whole, the forward of all frames before the backward of the last; then phases of no step."""
    several = len(report.frames) > 1

    def part(number: int, frame: Frame, phase: str) -> _Section:
        name = f"frame {frame.index}, {phase}" if several else phase
        timeline, choice = frame.timelines[phase], frame.choices.get(phase)
        lines = (*timeline.lines(), *([choice.text()] if choice is not None else []))
        origin = frame.origin if phase == "backward" else None
        return _Section(name, timeline, frame.programs[phase], lines, number, origin)

    frames = list(enumerate(report.frames))
    step = [part(k, f, "forward") for k, f in frames if "forward" in f.programs]
    step += [part(k, f, "backward") for k, f in reversed(frames) if "backward" in f.programs]
    if step and report.update is not None and report.update.late:
        step.append(_Section("update", report.update.timeline, None, tuple(report.update.lines())))
    if step:
        yield "one step", step
    for k, frame in frames:
        for phase in frame.programs:
            if phase not in STEP:
                yield f"frame {frame.index}, {phase}" if several else phase, [part(k, frame, phase)]


def _limit(report: Any) -> dict[str, int | None]:
    """Bytes of the device that a plan may take, and where the rest begins."""
    tier = next((t for t in report.verdict.tiers if t.tier == "device"), None) if report.verdict else None
    budgets = [f.config.memory_budget_bytes for f in report.frames]
    return {
        "device": tier.available_bytes if tier else None,
        "reserve": tier.reserve_bytes if tier else 0,
        "budget": min((b for b in budgets if b is not None), default=None),
        "peak": report.memory.peak,
    }


class _Texts:
    """Texts that occur more than once, each by its number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


@dataclass
class _Block:
    """A buffer as a rectangle: from when to when, and from which byte on."""

    begin: int
    end: int
    buffer: BufferLifetime
    part: int
    offset: int = 0


@dataclass
class _Pool:
    """An arena over a view."""

    nbytes: int = 0
    blocks: list[_Block] = field(default_factory=list)


class _View:
    """What a page draws of some phases that follow each other on one axis of time."""

    def __init__(self, title: str, parts: Sequence[_Section], report: Any) -> None:
        self._title, self._parts, self._report = title, parts, report
        total_us = math.fsum(p.timeline.total_us for p in parts) or 1.0
        # A whole power of ten, so that the numbers can be read in the page's source.
        self._tick_us = 10.0 ** math.floor(math.log10(total_us / _TICKS))
        self._texts, self._layers = _Texts(), _Texts()
        self._layers("")
        self._units = _units(p.program for p in parts if p.program is not None)
        self._buffers = [lifetimes(p.program, p.origin) if p.program is not None else [] for p in parts]

    def drawn(self) -> dict[str, object]:
        """For the page, in plain JSON values."""
        begins, begin = [], 0.0
        for part in self._parts:
            begins.append(begin)
            begin += part.timeline.total_us
        lanes = self._lanes(begins)
        memory = self._memory(begins)
        pools = self._pools(begins)
        names = {unit: ", ".join(dict.fromkeys(of)) for unit, of in self._members().items()}
        return {
            "title": self._title,
            "tick": self._tick_us,
            "total": self._at(begin),
            "parts": [
                {"name": p.name, "begin": self._at(b), "lines": list(p.lines)}
                for p, b in zip(self._parts, begins, strict=True)
            ],
            "memory": memory,
            "lanes": lanes,
            "pools": pools,
            "texts": list(self._texts.numbers),
            "layers": [names.get(unit, unit) for unit in self._layers.numbers],
        }

    def _at(self, us: float) -> int:
        return round(us / self._tick_us)

    def _layer(self, unit: str) -> int:
        return self._layers(self._units.get(unit, unit))

    def _members(self) -> dict[str, list[str]]:
        """What lies in each unit: small layers share one."""
        found: dict[str, list[str]] = {}
        for module, unit in self._units.items():
            found.setdefault(unit, []).append(module)
        return found

    def _times(self, part: _Section, begin: float) -> list[int]:
        """When each instruction of a phase begins; last, when the phase ends."""
        reached = part.timeline.reached_us
        return [self._at(begin + us) for us in (0.0, *reached[:-1], part.timeline.total_us)]

    def _memory(self, begins: Sequence[float]) -> dict[str, object]:
        """When the bytes change, and what they are from then on."""
        times: list[int] = []
        rows: list[tuple[int, ...]] = []
        for part, begin, buffers in zip(self._parts, begins, self._buffers, strict=True):
            if part.program is None:
                found, at = [at_rest(self._report.memory)], [self._at(begin)]
            else:
                found = areas_of(part.program, self._report.memory, buffers)
                at = self._times(part, begin)[: len(found)]
            for time, row in zip(at, found, strict=True):
                if not rows or rows[-1] != row:
                    times.append(time)
                    rows.append(row)
        columns = list(zip(*rows, strict=True)) if rows else [() for _ in AREAS]
        return {"at": _steps(times), "bytes": [_steps(c) for c in columns]}

    def table(self) -> dict[str, object]:
        """What the picture of memory shows, in numbers: of each phase, the bytes of each kind when all are most."""
        rows = []
        for part, buffers in zip(self._parts, self._buffers, strict=True):
            memory = self._report.memory
            found = [at_rest(memory)] if part.program is None else areas_of(part.program, memory, buffers)
            if found:
                most = max(found, key=sum)
                time = duration(part.timeline.total_us)
                row = {"name": part.name, "time": time, "bytes": dict(zip(AREAS, most, strict=True))}
                rows.append(row | {"sum": sum(most)})
        return {"title": self._title, "rows": rows}

    def _lanes(self, begins: Sequence[float]) -> list[dict[str, object]]:
        total = math.fsum(p.timeline.total_us for p in self._parts) or 1.0
        labels = [_labels(p.program) if p.program is not None else {} for p in self._parts]
        lanes: list[dict[str, object]] = []
        for lane, name in LANE_NAMES.items():
            bars = [
                self._bar(s, begin, known)
                for part, begin, known in zip(self._parts, begins, labels, strict=True)
                for s in part.timeline.spans
                if s.lane == lane
            ]
            if bars or lane == COMPUTE:
                busy = math.fsum(p.timeline.busy_us(lane) for p in self._parts) / total
                lanes.append({"name": name, "busy": f"{busy:.0%} busy", **_columns(_BAR_FIELDS, bars)})
        return lanes

    def _bar(self, s: Span, begin: float, known: Mapping[str, str]) -> tuple[Any, ...]:
        """A span of a timeline that begins at ``begin``, as ``_BAR_FIELDS`` says."""
        at, end = self._at(begin + s.start_us), self._at(begin + s.end_us)
        # What is waited for is the end of a transfer.
        waited = 0 if s.lane in WORK else min(end - at, self._at(s.stalled_us))
        units = [known[s.label]] if s.label in known else _units_of_label(s.label)
        layers = sorted({self._layer(unit) for unit in units})
        kind, hidden = _BAR_KINDS.index(_bar_kind(s.lane, s.label)), round(100 * s.hidden)
        layer = layers[0] if len(layers) == 1 else layers
        return at, end - at, waited, s.nbytes, kind, self._texts(s.label), layer, hidden

    def _pools(self, begins: Sequence[float]) -> list[dict[str, object]]:
        pools: dict[str, _Pool] = {}
        saved: dict[tuple[int, int], _Block] = {}  # by frame and storage of its forward
        for k, (part, begin) in enumerate(zip(self._parts, begins, strict=True)):
            if part.program is None:
                continue
            times = self._times(part, begin)
            pairs = part.origin.saved_storages(part.program) if part.origin is not None else {}
            for b in self._buffers[k]:
                start, end = times[max(0, b.begin)], times[min(b.end + 1, len(times) - 1)]
                before = saved.get((part.frame, pairs.get(b.index, -1))) if b.table == "storages" else None
                if before is not None and b.begin < 0:
                    before.end = end  # the same bytes, which forward has saved
                    continue
                block = _Block(start, end, b, k)
                pools.setdefault(b.pool, _Pool()).blocks.append(block)
                if b.table == "storages" and part.program.phase == "forward" and b.end == len(times) - 1:
                    saved[part.frame, b.index] = block
        for name, pool in pools.items():
            if name == ALLOCATED:
                _place(pool.blocks)
            for block in pool.blocks:
                if name != ALLOCATED:
                    block.offset = block.buffer.offset
                pool.nbytes = max(pool.nbytes, block.offset + block.buffer.nbytes)
        return [self._pool(name, pools[name]) for name in _POOL_TITLES if name in pools]

    def _pool(self, name: str, pool: _Pool) -> dict[str, object]:
        rows = [
            (
                block.begin,
                block.end - block.begin,
                block.offset,
                block.buffer.nbytes,
                _WHAT.index(block.buffer.what),
                self._texts(", ".join(block.buffer.names)),
                self._layer(block.buffer.layer),
            )
            for block in pool.blocks
        ]
        return {"name": _POOL_TITLES[name], "size": pool.nbytes} | _columns(_BLOCK_FIELDS, rows)


def _columns(fields: Sequence[str], rows: Iterable[tuple[int, ...]]) -> dict[str, list[int]]:
    """Rows in the order of time, as one list for each field; of the first one, "at", the distances."""
    ordered = sorted(rows, key=lambda row: row[0])
    columns = {name: [row[k] for row in ordered] for k, name in enumerate(fields)}
    return columns | {"at": _steps(columns["at"])}


def _steps(values: Sequence[int]) -> list[int]:
    """Each value as its distance from the one before: shorter in JSON."""
    return [b - a for a, b in zip((0, *values), values)]


def _place(blocks: Sequence[_Block]) -> None:
    """Offsets for what no arena has a place for: the lowest gap that is wide enough, in the order of begins."""
    live: list[_Block] = []  # by offset
    for block in sorted(blocks, key=lambda b: (b.begin, -b.end)):
        live = [b for b in live if b.end > block.begin]
        at, place = 0, len(live)
        for k, other in enumerate(live):
            if other.offset - at >= block.buffer.nbytes:
                place = k
                break
            at = max(at, other.offset + other.buffer.nbytes)
        block.offset = at
        live.insert(place, block)


def _units(programs: Iterable[Program]) -> dict[str, str]:
    """The unit in which the parameters of each module are gathered or reduced."""
    found: dict[str, str] = {}
    for program in programs:
        descs: list[GatherDesc | ReduceDesc] = [*program.gathers, *program.reduces]
        for desc in descs:
            for name in desc.names:
                found.setdefault(unit_of(name), desc.unit)
    return found


def _labels(program: Program) -> dict[str, str]:
    """The layer that each bar of a timeline is of, by what is written on the bar."""
    found: dict[str, str] = {}
    for instr in program.instrs:
        work, transfer = instr.work(program), instr.transfer(program)
        if transfer is not None:
            desc: Any = getattr(program, transfer.step.table)[transfer.step.which]
            found[transfer.label] = desc.unit if hasattr(desc, "unit") else layer_of(desc.module)
        if work is not None and instr.op == "compute":
            found[work.label] = layer_of(work.label.partition(": ")[2])
    return found


def _units_of_label(label: str) -> list[str]:
    """Of what a simulation adds to a Program: names of parameters, which may be of several layers, stand last."""
    names = label.rpartition(" of ")[2].partition(" and ")[0].split(", ")
    return [unit_of(name) for name in names if "." in name] or [""]


def _bar_kind(lane: str, label: str) -> str:
    if lane == PYTHON:
        return "python"
    for words, kind in (
        ("update of", "optimizer"),
        ("activation ", "activations"),
        ("the gather of", "parameters"),
        ("the reduction of", "gradients"),
        ("gather of", "gather"),
        ("reduction of", "reduction"),
    ):
        if words in label:
            return kind
    return "compute"
