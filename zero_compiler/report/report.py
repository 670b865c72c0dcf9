"""What ``zero.inspect`` shows: the programs of a model, with bytes at rest and peaks."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..config import OPTIMIZERS
from ..cost.timeline import Timeline, duration
from ..inductor_options import records_graphs
from ..ir.decisions import PlanDecisions
from ..ir.program import Program
from . import picture, trace
from .compare_traces import Comparison, compare_traces
from .frame import Frame, Update
from .host_traffic import packed_sum_lines, second_shard_lines
from .memory import Memory
from .step import MicroBatches, StepTime, step_of
from .verdict import Verdict

_NUMBER = re.compile(r"\.\d+\.")  # of a layer, in the name of a parameter
_MANY_NOTES = 4


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
    hosts: int | None = None  # on which the ranks lie; None: the hardware file says nothing of several hosts
    hosts_of_shards: int | None = None  # on which those lie that hold parts of the same parameters
    update: Update | None = None  # where a plan knows of one
    given: MicroBatches = field(default_factory=MicroBatches)  # to one rank in a step
    hardware: str = ""  # name of the machine that the plan is made for
    calibration: str = ""  # what calibration would bring, where that can be known
    helps: tuple[str, ...] = ()  # what would shorten the step, where that was planned
    verdict: Verdict | None = None  # whether it fits the hardware that it was made for
    model: str = ""  # what was planned, where the command line has made it
    decisions: PlanDecisions | None = None  # apart from what follows from them; None: nothing is planned

    @property
    def step(self) -> StepTime:
        """Predicted: forward and backward of all frames for every micro-batch, and the update."""
        update = None if self.update is None else self.update.timeline
        return step_of(self.frames, update, self.given, self.world * self.copies, self.hardware)

    @property
    def step_us(self) -> float:
        """Predicted time of a step."""
        return self.step.us

    @property
    def peak_bytes(self) -> int:
        """Predicted, of a step with all of its micro-batches."""
        return self.memory.peak_of(self.given)

    # Long: one line for each field of the JSON.
    def to_dict(self) -> dict[str, object]:
        """Plain JSON values."""
        return {
            "verdict": None if self.verdict is None else self.verdict.to_dict(),
            "model": self.model,
            "decisions": None if self.decisions is None else self.decisions.to_dict(),
            "rank": self.rank,
            "world": self.world,
            "copies": self.copies,
            "tensor_ranks": self.tensor_ranks,
            "hosts": self.hosts,
            "hosts_of_shards": self.hosts_of_shards,
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
                "optimizer_assumed": self.memory.assumed_optimizer,
                "kept_bytes": self.memory.kept,
                "arena_bytes": self.memory.arena,
                "recorded_bytes": self.memory.recorded,
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
                    **({"search_ended": f.search_ended} if f.search_ended else {}),
                    **({"stored": f.stored} if f.stored else {}),
                    "held_bytes": f.held_bytes,
                    "offloaded": [asdict(o) for o in f.offloaded],
                    "remade": [asdict(r) for r in f.remade],
                    "timelines": {title: t.to_dict() for title, t in f.every_timeline().items()},
                }
                for f in self.frames
            ],
            "update": None if self.update is None else self.update.to_dict(),
            "step": self.step.to_dict(),
            "what_helps": list(self.helps),
            **({"calibration": self.calibration} if self.calibration else {}),
            "step_us": self.step_us,
        }

    def save_json(self, path: str) -> None:
        with open(path, "w") as f:
            json.dump(self.to_dict(), f, indent=1, sort_keys=True)

    def save_trace(self, path: str) -> None:
        """The predicted timelines in Chrome's trace format: open it in Perfetto or ``chrome://tracing``."""
        with open(path, "w") as f:
            json.dump(self._trace(), f)

    def compare(self, trace: object) -> Comparison:
        """Predicted beside measured, for each instruction and lane, largest difference first: print what is returned.

        Args:
            trace: path of a Chrome trace that ``torch.profiler`` exported (.json or .json.gz) after compiled steps of
                this model in this process; or the profiler, once it has ended, where it has not exported it: it can do
                so once.

        Raises:
            ConfigError: it is no such trace, or no Program of this model ran while it was recorded.
        """
        return compare_traces(self._trace(), trace)

    def save_html(self, path: str) -> None:
        """The plan as one page: memory over the step by what it is, the buffers of every arena, the lanes, and the text
        of the plan.

        The page needs nothing from elsewhere.
        """
        with open(path, "w", encoding="utf-8") as f:
            f.write(picture.page(self))

    def _trace(self) -> dict[str, Any]:
        return trace.trace(self.frames, self._late())

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

    def _hosts(self) -> list[str]:
        """On how many hosts the ranks are whose transfers were timed."""
        if self.hosts is None:
            return []
        ranks = self.world * self.copies * self.tensor_ranks
        if self.hosts == 1:
            return [f"hosts: one, for all {ranks:,} ranks"]
        over = f"every parameter is partitioned over {self.hosts_of_shards:,} of them"
        return [f"hosts: {self.hosts:,} for {ranks:,} ranks; {over}"]

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
            *self._hosts(),
            *(f"at rest: {line}" for line in self.placement),
            "",
            "bytes of this rank on the compute device",
            f"  parameters at rest        {m.parameters:>16,}",
            f"  gradients                 {m.gradients:>16,}",
            f"  optimizer states          {m.optimizer:>16,}   {_known(m)}",
            f"  weights kept gathered     {m.kept:>16,}",
            f"  arena for transfers       {m.arena:>16,}",
            *([f"  graphs of the device      {m.recorded:>16,}"] if m.recorded else []),
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
            lines += _frame(frame, instructions)
        if self.update is not None:
            lines += ["", *self.update.lines()]
        if self.update is not None and self.frames:
            lines += self.step.lines()
        if self.calibration:
            lines += ["", self.calibration]
        if self.helps:
            lines += ["what would help, each of them planned:", *(f"  {line}" for line in self.helps)]
        return "\n".join(lines)


def _notes(notes: Sequence[str]) -> list[str]:
    """Notes of a Program; of many that differ in the number of the layer alone the first, and how many there are."""
    alike: dict[str, list[str]] = {}
    for note in notes:
        alike.setdefault(_NUMBER.sub(".", note.split(": ", 1)[-1]), []).append(note)
    lines = []
    for same in alike.values():
        shown = same if len(same) < _MANY_NOTES else same[:1]
        lines += [f"note: {note}" for note in shown]
        lines += [f"note: the same of {len(same) - 1:,} other layers"] if len(shown) < len(same) else []
    return lines


def _frame(frame: Frame, instructions: bool) -> list[str]:
    lines: list[str] = []
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
        lines += _notes(program.notes)
        if phase == "backward":
            lines += frame.accumulating_lines()
    if frame.planned_sizes:
        sizes = ", ".join(f"{name} = {n:,}" for name, n in frame.planned_sizes.items())
        lines.append(f"bytes are counted at {sizes}; these may change from call to call")
    lines.append(f"transfers of less than {frame.bucket_bytes:,} bytes share buckets: {frame.bucket_why}")
    lines += _quantised(frame)
    lines += second_shard_lines(frame)
    lines += packed_sum_lines(frame)
    lines += _recorded(frame)
    if frame.accumulation:
        lines.append(f"accumulation: {frame.accumulation}")
    if frame.stored:
        lines.append(f"what was decided is what an earlier start has found ({frame.stored})")
    if frame.plans_tried:
        ended = f"; no more were tried: {frame.search_ended}" if frame.search_ended else ""
        lines.append(f"phases were lowered {frame.plans_tried} times on trial for the memory budget{ended}")
    if "backward" in frame.programs:
        lines.append(f"most activations that backward holds: {frame.held_bytes:,} bytes")
    for tier, what in (("host", "waits on the host"), ("nvme", "waits in files")):
        lines += activation_lines(what, [o for o in frame.offloaded if o.tier == tier])
    lines += activation_lines("is made again in backward", frame.remade)
    lines.append(f"passes took {frame.trace.seconds:.3f} s")
    return lines


def _recorded(frame: Frame) -> list[str]:
    """What graphs of the device record, where it was asked for."""
    if not frame.recorded:
        asked = records_graphs(frame.config.mode)
        return [f"mode={frame.config.mode!r}: nothing is recorded, as the device has no graphs"] * asked
    nbytes = sum(program.recorded_bytes for program in frame.programs.values())
    return [
        f"segments are recorded into graphs of the device, whose memory is {nbytes:,} bytes, and replayed"
    ]


def _quantised(frame: Frame) -> list[str]:
    """How many weights travel in 8 bits, and what that saves, where it was asked for."""
    asked = frame.config.gather_dtype
    if asked is None:
        return []
    count = sum(plan.wire is not None for plan in frame.params.values())
    if not count:
        return [f"no weight travels in {asked}: nothing is sent, or no step would take less time for it"]
    moved = [
        g
        for phase, program in frame.programs.items()
        for g in program.gathers
        if g.wire and not (g.kept and phase == "backward")
    ]
    sent, whole = (sum(g.sent_bytes for g in some) for some in (moved, [replace(g, wire="") for g in moved]))
    return [
        f"{count} of {len(frame.params)} weights travel in {asked}: {sent:,} bytes of this rank's rows instead of "
        f"{whole:,}, in all gathers together; the others are vectors, or a step would "
        "take no less time for them"
    ]


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


def _known(m: Memory) -> str:
    if not m.assumed_optimizer:
        return "as its zero.optimizer keeps them"
    values = [
        f"{kind}, {OPTIMIZERS[kind]} fp32 values a parameter" for kind in m.assumed_optimizer.split(", ")
    ]
    return f"{m.assumed:,} assumed, here or in files: {'; '.join(values)}"


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
