"""One iteration, told step by step: what each rank holds at every instruction of its Programs, what moves, what is
freed, and a sentence for each.

All of it follows from the instructions (`lifetimes.py`) and from where a report says that things rest: so what is told
is what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..cost.timeline import COMPUTE, READ, WRITE, Span
from ..ir.instructions import (
    Bring,
    Compute,
    Discard,
    Fetch,
    Gather,
    Instruction,
    Keep,
    KeepPart,
    Offload,
    Reduce,
    Release,
    Restore,
    Store,
    WaitFetch,
    WaitGather,
    WaitOffload,
    WaitReduce,
    WaitRestore,
    Write,
)
from ..ir.program import Program
from ..ir.transfers import LINK, GatherDesc, Hop, KeepDesc, OffloadDesc, ReduceDesc
from ..layout import Layout
from ..passes.fsdp_units import unit_of
from .lifetimes import (
    ACTIVATION,
    AWAY,
    CHUNK,
    FULL_GRADIENT,
    GRADIENT,
    KEPT,
    STAGING,
    WEIGHT,
    BufferLifetime,
    lifetimes,
)
from .report import Report
from .verdict import amount

# What rests between steps, beside what a Program makes.
SHARD, OPTIMIZER, BATCH = "own weights", "optimizer states", "batch"
MEMORY, FILE = "memory", "file"
_WHOLE = "whole weights"  # of what is not sharded
_WHOLE_GRADIENT = "mean gradient, whole"
_PASSED_BACK = "gradients of activations"
_STREAMED = "rows that the optimizer has read"

# Every kind of bytes, in the order in which a page shows them: the name of its colour, and what it is.
KINDS = {
    _WHOLE: ("shards", "what the model has learned: all of it, on every rank"),
    SHARD: ("shards", "the rows of the weights that this rank keeps, and no other rank has"),
    CHUNK: ("shards", "own weights that have been read from a file, to be gathered"),
    WEIGHT: (
        "gathered",
        "all rows of a weight, put together from those of every rank, for as long as a layer needs them",
    ),
    STAGING: ("buffers", "where tensors that travel together lie one after the other"),
    BATCH: ("compute", "this rank's part of the examples"),
    ACTIVATION: (
        "activations",
        "what a layer gives; the backward needs much of it again, so it is saved until then",
    ),
    AWAY: ("activations", "activations that wait on another tier until the backward"),
    _PASSED_BACK: (
        "activations",
        "how the loss changes with what a layer was given: passed on to the layer before it",
    ),
    FULL_GRADIENT: (
        "full-gradients",
        "how the loss changes with every row of a weight, by this rank's part of the batch",
    ),
    GRADIENT: ("gradients", "the mean over all ranks, of this rank's own rows alone"),
    _WHOLE_GRADIENT: ("gradients", "the mean over all ranks, of all rows, on every rank"),
    OPTIMIZER: (
        "optimizer",
        "two values for each weight (Adam): its mean gradient so far, and the mean of its square",
    ),
    _STREAMED: ("optimizer", "own weights, gradients and states, in memory while they are updated"),
}


@dataclass
class Holding:
    """Bytes that every rank has from step ``begin`` to step ``end``, both included; before ``ready`` they are on their
    way. ``rows``: which rows of the parameter they are, on each rank; () where they are no rows of one."""

    kind: str
    place: str
    layer: str
    name: str
    nbytes: int
    begin: int
    ready: int
    end: int = -1
    rows: tuple[tuple[int, int], ...] = ()


@dataclass
class Move:
    """A transfer that is under way from step ``begin`` to step ``end``: ``way`` is "ranks", "read", "write", "copy"."""

    way: str
    text: str
    begin: int
    end: int = -1


@dataclass
class StoryStep:
    """One step of the story: its phase, the instruction as a Program prints it, and what it means."""

    phase: str
    line: str
    words: str


@dataclass
class Story:
    """One iteration of one plan."""

    title: str
    about: str
    steps: list[StoryStep] = field(default_factory=list)
    holdings: list[Holding] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)

    def bytes_at(self, step: int, place: str = MEMORY) -> int:
        """What one rank holds during a step."""
        return sum(h.nbytes for h in self.holdings if h.place == place and h.begin <= step <= h.end)


def story(report: Report, title: str, about: str, batch_bytes: int) -> Story:
    """The story of one training step of a report with one frame.

    Args:
        batch_bytes: of what each rank is given as its part of the batch.
    """
    return _Teller(report, Story(title, about), batch_bytes).told()


class _Teller:
    """Goes through the forward, the backward and the update, and notes who holds what."""

    def __init__(self, report: Report, made: Story, batch_bytes: int) -> None:
        self._report, self._story = report, made
        (frame,) = report.frames
        self._programs: dict[str, Program] = frame.programs
        self._origin = frame.origin
        self._params: dict[str, dict[str, Any]] = {str(row["name"]): row for row in report.params}
        descs: list[GatherDesc | ReduceDesc] = []
        for program in self._programs.values():
            descs += [*program.gathers, *program.reduces]
        # A layer is what is gathered or reduced together.
        self._layers = {name: d.unit for d in descs for name in d.names}
        self._units = {unit_of(name): unit for name, unit in self._layers.items()}
        self._kept: dict[str, Holding] = {}  # full weights that stay until the shards change
        self._saved: dict[int, Holding] = {}  # by storage of the forward
        self._gradients: list[Holding] = []
        self._at_rest: dict[tuple[str, str], Holding] = {}
        self._begin(batch_bytes)

    def told(self) -> Story:
        for phase in ("forward", "backward"):
            self._phase(phase, self._programs[phase])
        self._update()
        end = len(self._story.steps) - 1
        for h in self._story.holdings:
            h.end = end if h.end < 0 else h.end
        return self._story

    # Before and behind the Programs.

    def _begin(self, batch_bytes: int) -> None:
        world, stage = self._report.world, self._report.stage
        parts = (
            "every rank holds all of the weights" if stage == 0 else f"each of {world} ranks holds its part"
        )
        self._step(
            "before",
            "",
            f"Between two iterations {parts}, and the optimizer's states of that. Each rank has its own part of the "
            "batch.",
        )
        for name, row in self._params.items():
            sharded = row["placement"].startswith("Shard")
            tiers = row["tiers"]
            kind = SHARD if sharded else _WHOLE
            self._rest("params", kind, name, row["local_bytes"], tiers["params"])
            item = getattr(torch, row["dtype"]).itemsize
            states = row["local_bytes"] // item * self._report.frames[0].config.state_bytes
            self._rest("optimizer", OPTIMIZER, name, states, tiers["optimizer"])
        first = next(iter(self._layers.values()), "")
        self._story.holdings.append(Holding(BATCH, MEMORY, first, "", batch_bytes, 0, 0))

    def _rest(self, key: str, kind: str, name: str, nbytes: int, tier: str) -> None:
        place = FILE if tier == "nvme" else MEMORY
        held = Holding(kind, place, self._layer(name), name, nbytes, 0, 0, rows=self._rows(name))
        self._at_rest[key, name] = held
        self._story.holdings.append(held)

    def _update(self) -> None:
        """The optimizer's step, and the end of the iteration."""
        late = self._report.update if self._report.update is not None and self._report.update.late else None
        if self._report.stage == 0:
            self._step(
                "update",
                "",
                "The optimizer of every rank updates all of the weights. Both ranks hold the same states and do the "
                "same work twice: this is what ZeRO does away with.",
            )
        elif late is None or not any(s.lane in (READ, WRITE) for s in late.timeline.spans):
            self._step(
                "update",
                "",
                "The optimizer of each rank updates its own rows, from its own rows of the gradients and its own "
                "states. Nothing has to move: this is why the states can be divided.",
            )
        else:
            self._streamed(late.timeline.spans)
        at = len(self._story.steps) - 1
        stale = [h for h in self._kept.values() if h.end < 0]
        for h in (*stale, *self._gradients):
            h.end = at + 1
        more = (
            " The full weights that were kept are out of date, since the shards have changed: the next forward gathers "
            "them again."
            if stale
            else ""
        )
        self._step("update", "", f"The gradients are dropped (`optimizer.zero_grad()`).{more}")
        self._step(
            "before", "", "The iteration is over. All is as it was at its beginning, with better weights."
        )

    def _streamed(self, spans: Sequence[Span]) -> None:
        """An update whose states rest in files: transfers and work in the order in which they begin."""
        words = {
            READ: (
                "read",
                "Each rank reads what the optimizer needs for its rows from its files: {n} for the {of}.",
            ),
            COMPUTE: ("", "Each rank computes the {of}, for its own rows."),
            WRITE: ("write", "New weights and states go back to the files: {n} of the {of}."),
        }
        read: dict[str, Holding] = {}
        for s in sorted(spans, key=lambda s: s.start_us):
            if s.lane not in words:
                continue
            way, text = words[s.lane]
            of = s.label.removeprefix("file of the ")
            names = of.removeprefix("update of ").partition(" and ")[0].split(", ")
            self._step("update", "", text.format(n=amount(s.nbytes), of=of))
            at = len(self._story.steps) - 1
            if s.lane == READ:
                read[of] = Holding(
                    _STREAMED, MEMORY, self._layer(names[0]), ", ".join(names), s.nbytes, at, at + 1
                )
                self._story.holdings.append(read[of])
            elif of in read:
                read[of].end = at
            if way:
                self._story.moves.append(Move(way, f"{amount(s.nbytes)}: {of}", at, at))

    # The Programs.

    def _phase(self, phase: str, program: Program) -> None:
        first = len(self._story.steps)
        origin = self._origin if phase == "backward" else None
        buffers = lifetimes(program, origin)
        saved = origin.saved_storages(program) if origin is not None else {}
        again = self._buffers(phase, program, buffers, first, saved)
        for at, instr in enumerate(program.instrs):
            freed = sum(b.nbytes for b in buffers if b.end == at and b.pool != KEPT)
            if instr.op in ("gather", "wait_gather") and instr.table == "gathers" and instr.index in again:
                words = _KEPT_WORDS[instr.op].format(of=_of(program.gathers[instr.index]))
            else:
                words = sentence(program, instr, self._report.world, freed)
            self._step(phase, program.line(instr), words)
            self._moves(program, instr, first + at, again)

    def _buffers(
        self,
        phase: str,
        program: Program,
        buffers: Iterable[BufferLifetime],
        first: int,
        saved: Mapping[int, int],
    ) -> set[int]:
        """Note what the buffers of a Program hold; returns the gathers of which nothing moves, as it is there still.

        Args:
            first: step of its first instruction.
            saved: of storages with which it begins, those of the forward.
        """
        again: set[int] = set()
        for b in buffers:
            at, stays = first + max(0, b.begin), b.end >= len(program.instrs)
            end = first + min(b.end, len(program.instrs) - 1)
            before = (
                self._saved.get(saved.get(b.index, -1)) if b.table == "storages" and b.begin < 0 else None
            )
            if before is not None:
                before.end = end
                continue
            if b.pool == KEPT and b.names[0] in self._kept:
                again.add(b.index)
                continue
            end = -1 if b.pool == KEPT and stays else end
            held = Holding(
                self._kind(phase, b),
                MEMORY,
                self._layer(b.names[0])
                if b.table != "storages" and b.names
                else self._units.get(b.layer, b.layer),
                ", ".join(b.names),
                b.nbytes,
                at,
                at if b.what == STAGING else first + b.ready,
                end,
                self._rows(b.names[0], whole=b.what in (WEIGHT, FULL_GRADIENT)) if len(b.names) == 1 else (),
            )
            self._story.holdings.append(held)
            if b.pool == KEPT:
                self._kept[b.names[0]] = held
            elif b.what == GRADIENT:
                self._landed(program, b, held)
            elif b.table == "storages" and stays and phase == "forward":
                self._saved[b.index] = held
        return again

    def _landed(self, program: Program, b: BufferLifetime, held: Holding) -> None:
        """A reduced gradient, which may go on to a file."""
        r = program.reduces[b.index]
        if "nvme" not in r.tiers:
            held.end = -1
        else:
            held = Holding(
                GRADIENT, FILE, held.layer, held.name, held.nbytes, held.end, held.end, rows=held.rows
            )
            self._story.holdings.append(held)
        self._gradients.append(held)

    def _kind(self, phase: str, b: BufferLifetime) -> str:
        if b.what == GRADIENT and all(not self._sharded(n) for n in b.names):
            return _WHOLE_GRADIENT
        if b.what == ACTIVATION and phase == "backward" and b.table == "storages" and b.begin >= 0:
            return _PASSED_BACK
        return b.what

    def _moves(self, program: Program, instr: Instruction, step: int, again: set[int]) -> None:
        ended, transfer = instr.ends(program), instr.transfer(program)
        if ended is not None:
            for move in reversed(self._story.moves):
                if move.text == _label(program, ended.table, ended.which, ended.number) and move.end < 0:
                    move.end = step
                    break
        if transfer is None or (transfer.step.table == "gathers" and transfer.step.which in again):
            return
        if transfer.lane == LINK and self._report.world == 1:
            return
        way = {LINK: "ranks", READ: "read", WRITE: "write"}.get(transfer.lane, "copy")
        of = transfer.step
        self._story.moves.append(Move(way, _label(program, of.table, of.which, of.number), step))

    # Names.

    def _step(self, phase: str, line: str, words: str) -> None:
        self._story.steps.append(StoryStep(phase, line, words))

    def _layer(self, name: str) -> str:
        return self._layers.get(name, unit_of(name))

    def _sharded(self, name: str) -> bool:
        return name in self._params and str(self._params[name]["placement"]).startswith("Shard")

    def _rows(self, name: str, whole: bool = False) -> tuple[tuple[int, int], ...]:
        """First and last row of a parameter on each rank."""
        if name not in self._params:
            return ()
        row, world = self._params[name], self._report.world
        layout = Layout(tuple(row["shape"]), getattr(torch, row["dtype"]), world, self._sharded(name))
        if whole or not layout.sharded:
            return tuple((0, (layout.shape or (1,))[0] - 1) for _ in range(world))
        return tuple((layout.start(r), layout.start(r) + layout.rows(r) - 1) for r in range(world))


# Sentences -----------------------------------------------------------------------------------------------------------

_KEPT_WORDS = {
    "gather": "All rows of {of} are still here from the forward: nothing has to move.",
    "wait_gather": "So {of} may be read at once.",
}


def sentence(program: Program, instr: Instruction, world: int, freed: int) -> str:
    """What an instruction means, for someone who has never read of it.

    Args:
        freed: bytes that each rank has no more behind it.
    """
    words = _SENTENCES[instr.op](program, instr, world)
    words = words[:1].upper() + words[1:]
    if freed and isinstance(instr, Compute):
        return f"{words} Then {amount(freed)} that nothing reads any more are free again."
    return f"{words} {amount(freed)} are free again on each rank." if freed else words


def _of(desc: GatherDesc | ReduceDesc | KeepDesc) -> str:
    """The parameters of a transfer, for a sentence."""
    if len(desc.names) == 1:
        return f"`{desc.names[0]}`"
    layers = " and ".join(f"`{layer}`" for layer in dict.fromkeys(map(unit_of, desc.names)))
    return f"the {len(desc.names)} parameters of {layers}"


def _full_bytes(desc: GatherDesc | ReduceDesc | KeepDesc) -> str:
    numel = 0
    for shape in desc.shapes:
        numel += torch.Size(shape).numel()
    return amount(numel * getattr(torch, desc.dtype).itemsize)


def _gather(program: Program, instr: Gather, world: int) -> str:
    g = program.gathers[instr.index]
    if g.home or world == 1:
        return f"Of {_of(g)} every row is here already: nothing has to move."
    if g.from_second:
        return (
            f"The {g.host_ranks} ranks of each host begin to gather {_of(g)} from the parts that they kept in forward, "
            f"so that every rank has all of them, {_full_bytes(g)}. Nothing goes to another host."
        )
    return (
        f"The ranks begin to gather {_of(g)}: each sends its own rows to the other{'s' if world > 2 else ''}"
        f"{', in 8 bits a number' if g.wire else ''}, so that every rank has all of them, {_full_bytes(g)}. Computing "
        "goes on meanwhile."
    )


def _wait_gather(program: Program, instr: WaitGather, world: int) -> str:
    g = program.gathers[instr.index]
    whole = "the full weight" if len(g.names) == 1 else "the full weights"
    return f"All rows of {_of(g)} have arrived on every rank: from here on {whole} may be read."


def _compute(program: Program, instr: Compute, world: int) -> str:
    modules = program.modules[instr.segment] if instr.segment < len(program.modules) else ""
    if program.phase == "backward":
        what = f"the gradients of {_modules(modules)}" if modules else "the gradient of the loss"
        return f"Each rank computes {what}, for its own part of the batch."
    if not modules:
        return "Each rank computes what belongs to no layer, such as counters, while rows are on their way."
    return f"Each rank computes {_modules(modules)} on its own part of the batch."


def _modules(modules: str) -> str:
    return ", ".join(f"`{name}`" for name in modules.split(", "))


def _keep_part(program: Program, instr: KeepPart, world: int) -> str:
    g = program.gathers[instr.index]
    return (
        f"Each rank copies its part of {_of(g)}, {amount(g.part_bytes)}, to where it stays for backward: the "
        f"{g.host_ranks} ranks of a host have all parts."
    )


def _release(program: Program, instr: Release, world: int) -> str:
    g = program.gathers[instr.index]
    drops = "the full weight" if len(g.names) == 1 else "the full weights"
    return f"Nothing reads {_of(g)} for now: every rank drops {drops}, and keeps its own rows."


def _reduce(program: Program, instr: Reduce, world: int) -> str:
    r = program.reduces[instr.index]
    what = f"The gradient of {_of(r)} is" if len(r.names) == 1 else f"The gradients of {_of(r)} are"
    begun = f"{what} complete, {_full_bytes(r)}, but each rank has only what its own part of the batch says. "
    begun += f"The ranks begin to average {'it' if len(r.names) == 1 else 'them'}, "
    if r.replicated:
        return begun + "so that each gets all rows of the mean (all-reduce)."
    return begun + "and each gets only its own rows of the mean (reduce-scatter)."


def _wait_reduce(program: Program, instr: WaitReduce, world: int) -> str:
    r = program.reduces[instr.index]
    rows = "all rows" if r.replicated else "its own rows"
    gradient = "gradient" if len(r.names) == 1 else "gradients"
    kept = f"Each rank has {rows} of the mean {gradient} of {_of(r)}, {amount(r.result_bytes)}"
    return f"{kept}, and writes them to its file." if "nvme" in r.tiers else f"{kept}."


def _store(program: Program, instr: Store, world: int) -> str:
    r = program.reduces[instr.index]
    return f"Each rank has its rows of the mean gradient of {_of(r)}, and begins to copy them to the host."


def _keep(program: Program, instr: Keep, world: int) -> str:
    k = program.keeps[instr.index]
    return f"Each rank adds its full gradient of {_of(k)} to what waits for the next backward that averages."


def _fetch(program: Program, instr: Fetch, world: int) -> str:
    g = program.gathers[instr.index]
    hop = g.hops[instr.hop]
    begun = (
        f"Each rank begins to read its own rows of {_of(g)} from its file"
        if hop.tier == "nvme"
        else f"Each rank begins to copy its own rows of {_of(g)} to the device"
    )
    return f"{begun}, {amount(g.chunk_bytes)}."


def _wait_fetch(program: Program, instr: WaitFetch, world: int) -> str:
    g = program.gathers[instr.index]
    where = "in the pool on the host" if g.hops[instr.hop].pool == "host" else "on the device"
    return f"Its own rows of {_of(g)} are there, {where}, on each rank."


_OfActivation = Offload | Write | WaitOffload | Restore | Bring | WaitRestore | Discard


def _activation(words: str) -> Callable[..., str]:
    def say(program: Program, instr: _OfActivation, world: int) -> str:
        o: OffloadDesc = program.offloads[instr.index]
        where = "its file" if "nvme" in o.tiers else "the host"
        of = f"an activation of `{o.module}`" if o.module else "an activation"
        return words.format(of=of, n=amount(o.nbytes), where=where)

    return say


# Each takes the Program, an instruction of its own kind, and the number of ranks.
_SENTENCES: dict[str, Callable[..., str]] = {
    "compute": _compute,
    "fetch": _fetch,
    "wait_fetch": _wait_fetch,
    "gather": _gather,
    "keep_part": _keep_part,
    "wait_gather": _wait_gather,
    "release": _release,
    "reduce": _reduce,
    "store": _store,
    "wait_reduce": _wait_reduce,
    "keep": _keep,
    "offload": _activation(
        "{of}, {n}, is needed only in the backward: each rank begins to send it to {where}."
    ),
    "write": _activation("{of} is in the pool on the host, and goes on to {where}."),
    "wait_offload": _activation("{of} is in {where}."),
    "restore": _activation("Each rank begins to bring back {of}, {n}, from {where}."),
    "bring": _activation("{of} is in the pool on the host again, and goes on to the device."),
    "wait_restore": _activation("{of} is back, and may be read."),
    "discard": _activation("Nothing reads {of} any more."),
}


def _label(program: Program, table: str, which: int, number: int) -> str:
    """What a step of a transfer is called, at its start and at its end."""
    desc = getattr(program, table)[which]
    return f"{_ordinal(desc, number)}{desc.label}"


def _ordinal(desc: object, number: int) -> str:
    hops: Sequence[Hop] = getattr(desc, "hops", ())
    return (
        f"{hops[number].what} of the "
        if number < len(hops)
        else "copy of the "
        if number and not hops
        else ""
    )


def drawn(told: Mapping[str, Sequence[Story]]) -> dict[str, Any]:
    """Stories of several models for a page, in plain JSON values: texts that recur stand once, and what is in a list
    has its fields in the order of its class."""
    texts: dict[str, int] = {}

    def text(of: str) -> int:
        return texts.setdefault(of, len(texts))

    def run(made: Story) -> dict[str, object]:
        kinds = list(KINDS)
        return {
            "title": made.title,
            "about": made.about,
            "steps": [[text(s.phase), text(s.line), text(s.words)] for s in made.steps],
            "holdings": [
                [kinds.index(h.kind), text(h.place), text(h.layer), text(h.name)]
                + [h.nbytes, h.begin, h.ready, h.end, [list(r) for r in h.rows]]
                for h in made.holdings
            ],
            "moves": [[text(m.way), text(m.text), m.begin, m.end] for m in made.moves],
        }

    models = [
        {"name": name, "layers": [text(layer) for layer in _layers(runs)], "runs": [run(r) for r in runs]}
        for name, runs in told.items()
    ]
    return {"kinds": [[name, *of] for name, of in KINDS.items()], "models": models, "texts": list(texts)}


def _layers(stories: Iterable[Story]) -> list[str]:
    """In the order of their first use."""
    order: dict[str, None] = {}
    for made in stories:
        for h in sorted(made.holdings, key=lambda h: h.begin):
            order.setdefault(h.layer)
    return list(order)
