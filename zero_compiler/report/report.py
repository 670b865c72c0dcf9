"""What ``zero.inspect`` shows: the programs of a model, with bytes at rest and peaks."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..config import Config
from ..cost.prefetch import PrefetchChoice
from ..cost.tier_placement import ASSUMED_STATE_BYTES
from ..cost.timeline import Timeline, duration
from ..ir.facts import ParamRef
from ..ir.program import Program
from ..passes.base import ParamPlan
from ..storage.resident_memory import Footprint
from . import picture
from .verdict import Verdict

# What a process takes beyond its plan and what it had, of which nobody asks the system in advance. Measured by
# `benchmarks/resident.py`: threads, buffers of libraries and the objects of a running loop; in the heap holes, of what
# comes and goes there; tables of the system's own.
_RUNNING_BYTES = 24 << 20
_HOLES = 4  # one part in so many of what Programs add
_TABLES = 256
# What compiling leaves, where it was not measured: Dynamo's, AOTAutograd's and Inductor's objects.
_COMPILED_BYTES = 64 << 20


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
    remade: list[Any] = field(default_factory=list)  # passes.Remade: what backward makes again
    offloaded: list[Any] = field(default_factory=list)  # facts.Away: what waits on another tier
    held_bytes: int = 0  # most that backward holds at once of what forward made, or what it makes again
    bucket_bytes: int = 0  # of full tensors; smaller transfers share a collective
    bucket_why: str = ""
    plans_tried: int = 0  # for a memory budget: how often a phase was lowered on trial
    accumulating: tuple[Program, Timeline] | None = None  # of the backward under zero.no_sync
    accumulation: str = ""  # of a library's micro-batches: how often gradients are sent, and why
    code: str = ""  # what Dynamo compiled, as in Captured
    saved_bytes: int = 0  # what forward hands to backward
    sized: Any = None  # under a budget: its Programs at sizes of later calls, as `Sized`
    planned_sizes: dict[str, int] = field(default_factory=dict)  # those that may change, as they were planned
    behind: set[str] = field(
        default_factory=set
    )  # code that has run after its forward and before its backward
    calls: weakref.WeakSet[PendingForward] = field(
        default_factory=weakref.WeakSet
    )  # whose backward is still due

    @property
    def saved_now(self) -> int:
        """What its last forward has handed to backward, at the sizes that it had."""
        now = None if self.sized is None else self.sized.saved_now
        return self.saved_bytes if now is None else int(now)

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


@dataclass(frozen=True)
class Memory:
    """Predicted bytes of one rank on the compute device.

    ``parameters``, ``gradients``, ``optimizer``, ``kept`` (gathered weights that stay: stages 1 and 2, and of stage 3
    those for which a memory budget has room) and ``arena`` (gather buffers and staging) lie there between steps;
    ``programs`` is what a Program holds beyond all of that when it holds most. Gradients make room for activations:
    they count from when they are reduced until the next forward, which finds them dropped (``zero_grad()``). ``host``
    are the buffers on the host through which files are read and written; they count where the CPU is the compute
    device. ``files`` are bytes at rest in files, which do not count. ``assumed`` are the bytes of optimizer states,
    wherever they rest, that no ``zero.optimizer`` has told. ``waiting`` are the full gradients that a step under
    ``zero.no_sync`` keeps from one backward to the next, in ``reduce_dtype``; ``accumulating`` is what such a step
    holds when it holds most, in place of ``gradients`` and ``programs``. ``apart`` are bytes in the memory of an
    accelerator's host, which do not count: what rests there, and the buffers of files. ``elsewhere``: the memory of the
    compute device is not the process's. ``footprint``: what the process has beside all of this, where it was measured.
    """

    parameters: int
    gradients: int
    optimizer: int
    kept: int
    arena: int
    programs: int
    host: int = 0
    files: int = 0
    assumed: int = 0
    waiting: int = 0
    accumulating: int = 0
    apart: int = 0
    elsewhere: bool = False
    footprint: Footprint | None = field(default=None, compare=False)

    @property
    def at_rest(self) -> int:
        """After ``optimizer.step()``, before ``zero_grad()``."""
        return self.parameters + self.gradients + self.optimizer + self.kept + self.arena + self.host

    @property
    def peak(self) -> int:
        """Of a step that begins without gradients. One that adds to gradients holds ``gradients`` once more."""
        return self.at_rest + self.programs

    @property
    def accumulating_peak(self) -> int:
        """Of a step that begins without gradients, and whose backwards but the last run under ``zero.no_sync``."""
        return self.at_rest - self.gradients + self.accumulating

    @property
    def planned(self) -> int:
        """Of the plan, what is in the memory of the process."""
        return self.apart if self.elsewhere else self.peak

    @property
    def overhead(self) -> int:
        """What a process takes beside, derived: see `_RUNNING_BYTES`, `_HOLES` and `_TABLES`."""
        holes = 0 if self.elsewhere else self.programs // _HOLES
        return _RUNNING_BYTES + holes + self.planned // _TABLES

    @property
    def compiled(self) -> int:
        """What compiling leaves in the process: measured, or assumed where nothing was compiled."""
        return self.footprint.compiled if self.footprint and self.footprint.frames else _COMPILED_BYTES

    @property
    def resident(self) -> int:
        """Expected resident memory of the process, as a container counts it, without pages of files, which the system
        takes back. Where ``footprint`` is None, without what the process has beside the plan."""
        had, compiling = (self.footprint.had, self.footprint.compiling) if self.footprint else (0, 0)
        steps = self.planned + self.overhead
        # Nothing has been gathered or computed when a model is compiled.
        compiles = (0 if self.elsewhere else self.parameters) + compiling + _RUNNING_BYTES
        return had + self.compiled + max(steps, compiles)


@dataclass(frozen=True)
class Report:
    """The plan of one model, as text (``print``) and as JSON."""

    rank: int
    world: int
    stage: int
    memory: Memory
    params: list[dict[str, object]]
    frames: list[Frame]
    planned_only: bool
    transport: str = "local"
    transport_reason: str = ""
    placement: tuple[str, ...] = ()
    copies: int = 1  # ranks that hold the same rows as this one, itself included
    tensor_ranks: int = 1  # over which tensor parallelism has placed parameters
    update: Update | None = None  # where a plan knows of one
    verdict: Verdict | None = None  # whether it fits the hardware that it was made for
    model: str = ""  # what was planned, where the command line has made it

    @property
    def step_us(self) -> float:
        """Predicted time of a step: forward and backward of all frames, and the update."""
        phases = [t.total_us for f in self.frames for p, t in f.timelines.items() if p in picture.STEP]
        return math.fsum([*phases, *([self.update.timeline.total_us] if self.update is not None else [])])

    # Long: one line for each field of the JSON.
    def to_dict(self) -> dict[str, object]:
        """Plain JSON values."""
        return {
            "verdict": None if self.verdict is None else self.verdict.to_dict(),
            "model": self.model,
            "rank": self.rank,
            "world": self.world,
            "copies": self.copies,
            "tensor_ranks": self.tensor_ranks,
            "stage": self.stage,
            "planned_only": self.planned_only,
            "transport": self.transport,
            "transport_reason": self.transport_reason,
            "placement": list(self.placement),
            "memory": {
                "parameters_bytes": self.memory.parameters,
                "gradients_bytes": self.memory.gradients,
                "optimizer_bytes": self.memory.optimizer,
                "optimizer_assumed_bytes": self.memory.assumed,
                "optimizer_assumed_bytes_per_element": ASSUMED_STATE_BYTES,
                "kept_bytes": self.memory.kept,
                "arena_bytes": self.memory.arena,
                "host_bytes": self.memory.host,
                "apart_bytes": self.memory.apart,
                "files_bytes": self.memory.files,
                "programs_bytes": self.memory.programs,
                "at_rest_bytes": self.memory.at_rest,
                "peak_bytes": self.memory.peak,
                "waiting_bytes": self.memory.waiting,
                "accumulating_bytes": self.memory.accumulating,
                "accumulating_peak_bytes": self.memory.accumulating_peak,
                "resident_bytes": self.memory.resident,
                "resident_parts": {
                    "measured": None if self.memory.footprint is None else asdict(self.memory.footprint),
                    "compiled_bytes": self.memory.compiled,
                    "planned_bytes": self.memory.planned,
                    "overhead_bytes": self.memory.overhead,
                },
            },
            "parameters": self.params,
            "frames": [
                {
                    "index": f.index,
                    "config": f.config.to_dict(),
                    "passes": [{"name": n, "seconds": s, "nodes": k} for n, s, k in f.trace.rows],
                    "programs": {p.title: p.to_dict() for p in f.every_program()},
                    "prefetch": {
                        phase: {
                            "why": c.why,
                            "distances": {u.split(":", 1)[-1]: d for u, d in c.distances.items()},
                        }
                        for phase, c in f.choices.items()
                    },
                    "planned_sizes": f.planned_sizes,
                    "bucket_bytes": f.bucket_bytes,
                    "bucket_why": f.bucket_why,
                    **({"accumulation": f.accumulation} if f.accumulation else {}),
                    **({"plans_tried": f.plans_tried} if f.plans_tried else {}),
                    "held_bytes": f.held_bytes,
                    "offloaded": [asdict(o) for o in f.offloaded],
                    "remade": [asdict(r) for r in f.remade],
                    "timelines": {title: t.to_dict() for title, t in f.every_timeline().items()},
                }
                for f in self.frames
            ],
            "update": None if self.update is None else self.update.to_dict(),
            "step_us": self.step_us,
        }

    def save_json(self, path: str) -> None:
        with open(path, "w") as f:
            json.dump(self.to_dict(), f, indent=1, sort_keys=True)

    def save_trace(self, path: str) -> None:
        """The predicted timelines in Chrome's trace format: open it in Perfetto or ``chrome://tracing``."""
        with open(path, "w") as f:
            json.dump(picture.trace(self.frames, self._late()), f)

    def save_html(self, path: str) -> None:
        """The plan as one page: the lanes of every phase as a picture, live bytes below, and the text of the plan.

        The page needs nothing from elsewhere.
        """
        with open(path, "w") as f:
            f.write(picture.page(self.frames, self.summary(), self._late()))

    def _late(self) -> Timeline | None:
        return self.update.timeline if self.update is not None and self.update.late else None

    def __str__(self) -> str:
        return self._text(instructions=True)

    def _budget(self) -> list[str]:
        """Within how many bytes a plan was made that nobody runs yet."""
        budgets = {b for f in self.frames if (b := f.config.memory_budget_bytes) is not None}
        return [
            f"planned within {b:,} bytes of the device; to run so, give zero.shard memory_budget_bytes={b}"
            for b in sorted(budgets)
        ]

    def summary(self) -> str:
        """The text without the instructions of the Programs."""
        return self._text(instructions=False)

    # Long: the lines of the report, in their order.
    def _text(self, instructions: bool) -> str:
        m = self.memory
        lines = [
            *([] if self.verdict is None else [self.verdict.line()]),
            *([f"model: {self.model}", *self._budget()] if self.model else []),
            f"zero_compiler: stage {self.stage}, rank {self.rank} of {self.world}, {len(self.params)} parameters"
            + (f", {self.copies} replicas" if self.copies > 1 else "")
            + (f", {self.tensor_ranks} tensor-parallel ranks" if self.tensor_ranks > 1 else ""),
            f"transport between ranks: {self.transport} ({self.transport_reason})",
            *(f"at rest: {line}" for line in self.placement),
            "",
            "bytes of this rank on the compute device",
            f"  parameters at rest        {m.parameters:>16,}",
            f"  gradients                 {m.gradients:>16,}",
            f"  optimizer states          {m.optimizer:>16,}   {_known(m.assumed)}",
            f"  weights kept gathered     {m.kept:>16,}",
            f"  arena for transfers       {m.arena:>16,}",
            *([f"  buffers to read and write files {m.host:>10,}"] if m.host else []),
            f"  at rest, sum of these     {m.at_rest:>16,}",
            f"  most that a Program adds  {m.programs:>16,}   activations, and full gradients as they arise",
            f"  predicted peak            {m.peak:>16,}   a step that adds to gradients: {m.gradients:,} more",
            f"  of steps under zero.no_sync {m.accumulating_peak:>14,}   {m.waiting:,} of it full gradients that wait",
        ]
        if m.apart:
            lines.append(f"bytes of this rank on the host{m.apart:>12,}")
        if m.files:
            lines.append(f"bytes of this rank in files   {m.files:>12,}")
        lines += _resident(m)
        if self.planned_only:
            lines.append(
                "planned from example inputs: nothing was run; frames behind a graph break are not in it"
            )
        if not self.frames:
            lines += [
                "",
                "not compiled yet: call the model, or pass example_inputs=(...) to plan without running",
            ]
        for frame in self.frames:
            for phase, program in frame.programs.items():
                peak = max(program.live, default=0)
                lines += [
                    "",
                    f"frame {frame.index}, {phase}: {len(program.instrs)} instructions, "
                    f"{len(program.structures)} segments of {len(program.segments)} structures, "
                    f"arena {program.buffer_bytes:,} bytes, peak {peak:,} bytes",
                    *_beside(program),
                    *frame.timelines[phase].lines(),
                    frame.choices[phase].text(),
                    *([program.text()] if instructions else []),
                ]
                lines += [f"note: {n}" for n in program.notes]
                if phase == "backward":
                    lines += frame.accumulating_lines()
            if frame.planned_sizes:
                sizes = ", ".join(f"{name} = {n:,}" for name, n in frame.planned_sizes.items())
                lines.append(f"bytes are counted at {sizes}; these may change from call to call")
            lines.append(
                f"transfers of less than {frame.bucket_bytes:,} bytes share buckets: {frame.bucket_why}"
            )
            if frame.accumulation:
                lines.append(f"accumulation: {frame.accumulation}")
            if frame.plans_tried:
                lines.append(f"phases were lowered {frame.plans_tried} times on trial for the memory budget")
            if "backward" in frame.programs:
                lines.append(f"most activations that backward holds: {frame.held_bytes:,} bytes")
            for tier, what in (("host", "waits on the host"), ("nvme", "waits in files")):
                lines += activation_lines(what, [o for o in frame.offloaded if o.tier == tier])
            lines += activation_lines("is made again in backward", frame.remade)
            lines.append(f"passes took {frame.trace.seconds:.3f} s")
        if self.update is not None:
            lines += ["", *self.update.lines()]
            if self.frames:
                lines.append(f"predicted step: {self.step_us / 1e3:.2f} ms with its update")
        return "\n".join(lines)


def _beside(program: Program) -> list[str]:
    before, again = program.before_bytes, program.again_bytes
    saved = [f"{before:,} bytes that frames before it have saved for backward"] if before else []
    stored = (
        [f"{again:,} bytes of gradients of its weights that frames behind it have stored"] if again else []
    )
    return [f"meanwhile other frames hold {' and '.join([*saved, *stored])}"] if saved or stored else []


def _resident(m: Memory) -> list[str]:
    """What a container counts of the process, and of what that is made."""
    found = m.footprint
    lines = [
        f"expected resident memory of the process {m.resident:,} bytes"
        + ("" if found else ", and what Python and its libraries take where it runs, which is not in it")
    ]
    if found is not None:
        lines.append(
            f"  had when sharded          {found.had:>16,}   measured, without shards: Python, libraries, data; not in "
            f"it: {found.pages:,} in pages of files"
        )
    known = "assumed: nothing is compiled yet"
    if found is not None and found.frames:
        known = "measured, with what came before it: Dynamo, a batch"
    lines += [
        f"  left by compiling         {m.compiled:>16,}   {known}",
        f"  of the plan               {m.planned:>16,}   " + ("on the host" if m.elsewhere else "its peak"),
        f"  overhead                  {m.overhead:>16,}   derived: a running loop, holes in the heap, tables",
    ]
    if found is not None and found.frames:
        lines.append(
            f"  while compiling           {found.compiling:>16,}   measured, in place of a step: compilers too"
        )
    return lines


def _known(assumed: int) -> str:
    if assumed:
        return f"{assumed:,} assumed, here or in files: two fp32 values a parameter"
    return "as its zero.optimizer keeps them"


_SHOWN = 12  # kinds of tensors that are not held, in the text; all of them are in the JSON


def activation_lines(what: str, rows: Sequence[Any]) -> list[str]:
    """What is not held, equal tensors of repeated blocks together; those with most bytes first."""
    groups: dict[tuple[str, ...], list[Any]] = {}
    for r in rows:
        module = ".".join("*" if part.isdigit() else part for part in r.module.split("."))
        groups.setdefault((r.why, module, r.op, str(r.nbytes)), []).append(r)
    if not groups:
        return []
    kinds = sorted(groups.items(), key=lambda kv: (-sum(r.nbytes for r in kv[1]), kv[0]))
    lines = [
        f"{len(rows)} tensors of which each {what}: {sum(r.nbytes for r in rows):,} bytes, "
        f"{duration(sum(r.us for r in rows))} paid"
    ]
    for (why, module, op, _), same in kinds[:_SHOWN]:
        nbytes, us = sum(r.nbytes for r in same), sum(r.us for r in same)
        where = f" of {module}" if module else ""
        lines.append(f"  {len(same)} x {op}{where}: {nbytes:,} bytes, {duration(us)}; {why}")
    if len(kinds) > _SHOWN:
        lines.append(f"  and {sum(len(same) for _, same in kinds[_SHOWN:])} more")
    return lines
