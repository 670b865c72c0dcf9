"""The instructions of a Program, and what each of them does to transfers, values and memory.

That is said here alone, and read by whatever goes through a Program: the simulator, the count of live bytes, the
schedule, the verifier, the session and the reference executor. To add an instruction, write its class here, let `emit`
make it, and say in `peak_check.py` how the verifier counts it. Where it moves something or gives values, the session
and the reference executor have to be told how that is done.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from .transfers import (
    HOST,
    LINK,
    READ,
    WRITE,
    GatherDesc,
    KeepDesc,
    OffloadDesc,
    ReduceDesc,
    copy_of,
    file_of,
    start_of,
    tile_text,
    wait_for,
)


class Tables(Protocol):
    """Where a Program describes what its instructions name by index."""

    @property
    def phase(self) -> str: ...

    @property
    def gathers(self) -> Sequence[GatherDesc]: ...

    @property
    def reduces(self) -> Sequence[ReduceDesc]: ...

    @property
    def offloads(self) -> Sequence[OffloadDesc]: ...

    @property
    def keeps(self) -> Sequence[KeepDesc]: ...

    @property
    def modules(self) -> Sequence[str]: ...

    @property
    def segment_us(self) -> Sequence[float]: ...


class Step(NamedTuple):
    """What is on its way on one lane: step ``number`` of what ``table`` of the Program describes under index
    ``which``.

    Chunks of a gather make one step for each hop, and the collective is the last one. The collective of a reduction is
    the first step, and the copy of its result, if any, the second. What is offloaded makes one step for each of its
    tiers, in each direction.
    """

    table: str
    which: int
    number: int


@dataclass(frozen=True)
class Transfer:
    """A step with what its time follows from. ``tier`` is the one below the compute device that it goes to (``out``)
    or comes from; "" for a collective between ranks, whose bytes depend on how many these are (0 here)."""

    step: Step
    out: bool
    tier: str
    nbytes: int
    label: str

    @property
    def lane(self) -> str:
        if not self.tier:
            return LINK
        return HOST if self.tier == "host" else WRITE if self.out else READ


@dataclass(frozen=True)
class Work:
    """What the compute device does itself: for ``us``, and for as long as ``memory_bytes`` and starts of ``kernels``
    take."""

    label: str
    us: float = 0.0
    memory_bytes: int = 0
    kernels: int = 0


_MOVED = "{i.op:<15} {d.name} {d.shaped}, {d.nbytes:,} bytes"


class Effects(NamedTuple):
    """What an instruction does to what it moves.

    Args:
        table: of the Program, in which what is moved is described.
        needs: the state in which that must be before the instruction, for the verifier; ``leaves``: that behind it.
        starts: number of the step that is started; None: none is; -1: the last one.
        ends: the same of the step that is waited for.
        out: whether steps go away from the compute device.
        words: the instruction as a line of a Program, in columns, of itself (``i``) and of what it moves (``d``).
        completes: whether the result of a reduction, or a tile of it, is in its place behind the instruction.
    """

    table: str = ""
    needs: str = "idle"
    leaves: str = "idle"
    starts: int | None = None
    ends: int | None = None
    out: bool = False
    completes: bool = False
    words: str = ""


class Instruction:
    """What every instruction says of itself, given the Program's tables; here: that it does nothing.

    An instruction first waits for the step that it ends, if any, then computes, and then starts another one.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    op: str  # names the kind in JSON, which keeps the fields of an instruction in order
    index: int  # in ``table``, of an instruction that has one
    effects: ClassVar[Effects] = Effects()

    @property
    def table(self) -> str:
        """Of the Program, in which what is moved is described."""
        return self.effects.table

    @property
    def reads(self) -> tuple[int, ...]:
        """Numbers of values."""
        return getattr(self, "ins", ())

    @property
    def writes(self) -> tuple[int, ...]:
        """Numbers of values; -1: one that nothing reads."""
        return getattr(self, "outs", ())

    @property
    def frees(self) -> tuple[int, ...]:
        """Numbers of values that nothing reads behind the instruction."""
        return getattr(self, "free", ()) or getattr(self, "values", ())

    def needs(self, of: Tables) -> str:
        """The state in which what is moved must be before the instruction."""
        return self.effects.needs

    def misplaced(self, of: Tables) -> str:
        """Why what is described in the table takes no such instruction; "" where it does."""
        return ""

    def ends(self, of: Tables) -> Step | None:
        """The step that is waited for."""
        return self._step(of, self.effects.ends)

    def starts(self, of: Tables) -> Step | None:
        """The step that is under way from here on."""
        return self._step(of, self.effects.starts)

    def _step(self, of: Tables, number: int | None) -> Step | None:
        if number == -1:
            number = getattr(of, self.table)[self.index].steps - 1
        return None if number is None else Step(self.table, self.index, number)

    def transfer(self, of: Tables) -> Transfer | None:
        """The step that is started, with its lane and bytes."""
        step = self.starts(of)
        return None if step is None else Transfer(step, self.effects.out, *self.moves(of, step.number))

    def moves(self, of: Tables, number: int) -> tuple[str, int, str]:
        """Of a step that is started or waited for: the tier, the bytes and the label that a :class:`Transfer` has."""
        raise NotImplementedError

    def idle(self, of: Tables) -> bool:
        """Whether the runtime has nothing to do here."""
        return False

    def name(self, of: Tables) -> str:
        """What the thread that runs the Program does here, as traces name it: that of a plan and those of torch's
        profiler."""
        if (transfer := self.transfer(of)) is not None:
            return start_of(transfer.label)
        if (step := self.ends(of)) is not None:
            return wait_for(self.moves(of, step.number)[2])
        if (work := self.work(of)) is not None:
            return work.label
        return f"release of {getattr(of, self.table)[self.index].what}"

    def work(self, of: Tables) -> Work | None:
        """What the compute device does meanwhile."""
        return None

    def lends(self, of: Tables) -> bool:
        """Whether the step that is started reads what is freed here until it has been waited for."""
        return False

    def device_bytes(self, of: Tables) -> tuple[int, int]:
        """Bytes on the compute device, beside arenas, segments and results of reductions: those that come to be, and
        those that are gone behind the instruction."""
        return 0, 0

    def collective(self, of: Tables) -> str:
        """What ranks must agree on, of a collective that is started; "" where none is."""
        return ""

    def text(self, of: Tables) -> str:
        """In words, in columns: what the instruction does, and to what."""
        moved = getattr(of, self.table)[self.index] if self.table else None
        return self.effects.words.format(i=self, d=moved) or self.op


@dataclass(frozen=True)
class Compute(Instruction):
    """Run ``segment`` on the values ``ins``; values in ``free`` are read here for the last time."""

    segment: int
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    free: tuple[int, ...]
    op: str = "compute"

    def work(self, of: Tables) -> Work:
        us = of.segment_us[self.segment] if of.segment_us else 0.0
        return Work(f"segment {self.segment}{self._module(of)}".removesuffix(": "), us)

    def text(self, of: Tables) -> str:
        return f"compute         segment {self.segment}{self._module(of)}"

    def _module(self, of: Tables) -> str:
        return f": {of.modules[self.segment]}" if self.segment < len(of.modules) else ""


class _OfGather(Instruction):
    def _packs(self, of: Tables) -> bool:
        """Whether chunks travel packed. A kept weight is there when backward asks for it."""
        g = of.gathers[self.index]
        return bool(g.wire) and not (g.kept and of.phase == "backward")

    def moves(self, of: Tables, number: int) -> tuple[str, int, str]:
        g = of.gathers[self.index]
        if number == len(g.hops):
            return "", 0, g.label
        return g.hops[number].tier, g.chunk_bytes, g.hops[number].of(g.label)


@dataclass(frozen=True)
class Fetch(_OfGather):
    """Start hop ``hop`` of this rank's chunks of gather ``index``: to read them from files, or to copy them to the
    device."""

    index: int
    hop: int = 0
    op: str = "fetch"

    effects: ClassVar[Effects] = Effects("gathers", "idle", "fetching")

    def needs(self, of: Tables) -> str:
        return "fetched" if self.hop else "idle"

    def starts(self, of: Tables) -> Step:
        return Step(self.table, self.index, self.hop)

    def text(self, of: Tables) -> str:
        g = of.gathers[self.index]
        to = ", to the device" if g.hops[self.hop].pool == "device" else ""
        return f"fetch           {g.what}, {g.chunk_bytes:,} bytes a rank{to}"


@dataclass(frozen=True)
class WaitFetch(_OfGather):
    """Wait until hop ``hop`` of the chunks of gather ``index`` is done."""

    index: int
    hop: int = 0
    op: str = "wait_fetch"

    effects: ClassVar[Effects] = Effects("gathers", "fetching", "fetched")

    def ends(self, of: Tables) -> Step:
        return Step(self.table, self.index, self.hop)

    def text(self, of: Tables) -> str:
        g = of.gathers[self.index]
        return f"wait            {g.hops[self.hop].what} of {g.what}"


@dataclass(frozen=True)
class Gather(_OfGather):
    """Start gather ``index``."""

    index: int
    op: str = "gather"

    effects: ClassVar[Effects] = Effects(
        "gathers", "idle", "started", starts=-1, words="{d.how:<15} {d.shaped}"
    )

    def needs(self, of: Tables) -> str:
        return "fetched" if of.gathers[self.index].hops else "idle"

    def idle(self, of: Tables) -> bool:
        return of.gathers[self.index].home  # it is read where it lies at rest

    def work(self, of: Tables) -> Work | None:
        """This rank's chunks are packed."""
        g = of.gathers[self.index]
        return Work(start_of(g.label), memory_bytes=g.packing_bytes) if self._packs(of) else None

    def collective(self, of: Tables) -> str:
        g = of.gathers[self.index]
        where = " kept" if g.kept else ""
        if g.home:
            where += " in place"
        elif g.shared:  # every rank writes into the same slots
            where += f" at bytes {', '.join(map(str, g.offsets))}"
        if g.from_second:
            where += f" within {g.host_ranks} ranks of a host"
        elif g.parts:
            where += f", of which {sum(g.parts)} stay for backward on {g.host_ranks} ranks of a host"
        what = f"{', '.join(g.names)}{tile_text(g.tile)} {g.dtype}{f' as {g.wire}' if g.wire else ''}"
        return f"gather {what} {sum(g.chunk_numels)} elements a rank{where}"


@dataclass(frozen=True)
class WaitGather(_OfGather):
    """Wait for gather ``index``; ``outs`` are its weights (-1: not read)."""

    index: int
    outs: tuple[int, ...]
    op: str = "wait_gather"

    effects: ClassVar[Effects] = Effects(
        "gathers", "started", "ready", ends=-1, words="wait            {d.what}"
    )

    def work(self, of: Tables) -> Work | None:
        """Chunks of all ranks are unpacked."""
        g = of.gathers[self.index]
        return Work(wait_for(g.label), memory_bytes=g.unpacking_bytes) if self._packs(of) else None


@dataclass(frozen=True)
class KeepPart(_OfGather):
    """Copy this rank's parts of the weights of gather ``index`` to where they stay for backward."""

    index: int
    op: str = "keep_part"

    effects: ClassVar[Effects] = Effects(
        "gathers", "ready", "ready", words="keep part       {d.what}, {d.part_bytes:,} bytes a rank"
    )

    def misplaced(self, of: Tables) -> str:
        return "" if any(of.gathers[self.index].parts) else f"of gather {self.index} no part is to stay"

    def work(self, of: Tables) -> Work:
        g = of.gathers[self.index]
        return Work(
            f"second shard of {g.what}", memory_bytes=2 * g.part_bytes, kernels=sum(p > 0 for p in g.parts)
        )


@dataclass(frozen=True)
class Release(_OfGather):
    """The weights of gather ``index`` are dead: their slots may be used again."""

    index: int
    values: tuple[int, ...]
    op: str = "release"

    effects: ClassVar[Effects] = Effects("gathers", "ready", "released", words="release         {d.what}")

    def idle(self, of: Tables) -> bool:
        return of.gathers[self.index].home


class _OfReduce(Instruction):
    def moves(self, of: Tables, number: int) -> tuple[str, int, str]:
        r = of.reduces[self.index]
        return ("host", r.result_bytes, copy_of(r.label)) if number else ("", 0, r.label)


@dataclass(frozen=True)
class Reduce(_OfReduce):
    """Start reduction ``index`` of the gradients ``ins``."""

    index: int
    ins: tuple[int, ...]
    free: tuple[int, ...]
    op: str = "reduce"

    effects: ClassVar[Effects] = Effects(
        "reduces", "idle", "started", starts=0, words="{d.how:<15} {d.shaped}"
    )

    def lends(self, of: Tables) -> bool:
        return of.reduces[self.index].read_in_place

    def collective(self, of: Tables) -> str:
        r = of.reduces[self.index]
        what = f"{', '.join(r.names)}{tile_text(r.tile)} {r.dtype}"
        return f"{r.how} {what} {sum(r.chunk_numels)} elements a rank"


@dataclass(frozen=True)
class Store(_OfReduce):
    """Wait for reduction ``index``, and start to copy its result to the host of the accelerator."""

    index: int
    op: str = "store"

    effects: ClassVar[Effects] = Effects(
        "reduces",
        "started",
        "stored",
        starts=1,
        ends=0,
        out=True,
        words="store           gradients of {d.what}, {d.result_bytes:,} bytes a rank",
    )

    def misplaced(self, of: Tables) -> str:
        copied = of.reduces[self.index].copied
        return "" if copied else f"reduction {self.index} rests where it is, and is not to be copied"


@dataclass(frozen=True)
class WaitReduce(_OfReduce):
    """Wait for reduction ``index``, or for the copy of its result; ``outs`` are this rank's rows of the mean gradients,
    where they rest."""

    index: int
    outs: tuple[int, ...]
    op: str = "wait_reduce"

    effects: ClassVar[Effects] = Effects(
        "reduces", "started", "done", ends=-1, completes=True, words="wait            gradients of {d.what}"
    )

    def needs(self, of: Tables) -> str:
        return "stored" if of.reduces[self.index].copied else "started"


@dataclass(frozen=True)
class Keep(Instruction):
    """Add the gradients ``ins`` to what waits for a reduction, as ``keeps`` at ``index`` says."""

    index: int
    ins: tuple[int, ...]
    free: tuple[int, ...]
    op: str = "keep"

    effects: ClassVar[Effects] = Effects("keeps", "idle", "done", words="keep            {d.shaped}")

    def work(self, of: Tables) -> Work:
        """The gradients are read, and the sums are read and written."""
        k = of.keeps[self.index]
        item = getattr(torch, k.grad_dtype).itemsize + 2 * getattr(torch, k.dtype).itemsize
        return Work(k.label, memory_bytes=sum(map(math.prod, k.shapes)) * item, kernels=len(k.names))


class _OfOffload(Instruction):
    def moves(self, of: Tables, number: int) -> tuple[str, int, str]:
        o = of.offloads[self.index]
        tier = o.tiers[number if self.effects.out else -1 - number]
        return tier, o.nbytes, copy_of(o.label) if tier == "host" else file_of(o.label)


class _SentOn(_OfOffload):
    """The second of two steps, which begins where the first one ends."""

    def misplaced(self, of: Tables) -> str:
        staged = of.offloads[self.index].staged
        return "" if staged else f"offload {self.index} has one step to go, and is not sent on"


class _Arrived(_OfOffload):
    """The wait for the last step."""

    def needs(self, of: Tables) -> str:
        return "sent on" if of.offloads[self.index].staged else "started"

    def text(self, of: Tables) -> str:
        o = of.offloads[self.index]
        return f"wait            {_what(o.tiers[-1 if self.effects.out else 0])} of {o.name}"


@dataclass(frozen=True)
class Offload(_OfOffload):
    """Start to take the value ``ins`` to the first tier on its way; ``outs`` is its ticket. To a file it is copied into
    the pool at once, and written from there."""

    index: int
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    free: tuple[int, ...]
    op: str = "offload"

    effects: ClassVar[Effects] = Effects("offloads", "idle", "started", starts=0, out=True, words=_MOVED)

    def lends(self, of: Tables) -> bool:
        return of.offloads[self.index].copied


@dataclass(frozen=True)
class Write(_SentOn):
    """Wait until offloaded tensor ``index`` has been copied into the pool, and start to write it to its file."""

    index: int
    op: str = "write"

    effects: ClassVar[Effects] = Effects(
        "offloads", "started", "sent on", out=True, starts=1, ends=0, words=_MOVED
    )


@dataclass(frozen=True)
class WaitOffload(_Arrived):
    """Wait until offloaded tensor ``index`` is where it waits: its place in the pool is free."""

    index: int
    op: str = "wait_offload"

    effects: ClassVar[Effects] = Effects("offloads", "started", "released", out=True, ends=-1)


@dataclass(frozen=True)
class Restore(_OfOffload):
    """Start to bring back offloaded tensor ``index``, for which the ticket ``ins`` stands: a file is read into the
    pool, memory of the host is copied to the device."""

    index: int
    ins: tuple[int, ...]
    op: str = "restore"

    effects: ClassVar[Effects] = Effects("offloads", "idle", "started", starts=0, words=_MOVED)

    def device_bytes(self, of: Tables) -> tuple[int, int]:
        o = of.offloads[self.index]
        return o.nbytes if o.copied and not o.staged else 0, 0


@dataclass(frozen=True)
class Bring(_SentOn):
    """Wait until offloaded tensor ``index`` has been read into the pool, and start to copy it to the device."""

    index: int
    op: str = "bring"

    effects: ClassVar[Effects] = Effects(
        "offloads", "started", "sent on", starts=1, ends=0, words=f"{_MOVED}, to the device"
    )

    def device_bytes(self, of: Tables) -> tuple[int, int]:
        return of.offloads[self.index].nbytes, 0


@dataclass(frozen=True)
class WaitRestore(_Arrived):
    """Wait until it is back: the value ``outs``."""

    index: int
    outs: tuple[int, ...]
    op: str = "wait_restore"

    effects: ClassVar[Effects] = Effects("offloads", "started", "ready", ends=-1)


@dataclass(frozen=True)
class Discard(_OfOffload):
    """Offloaded tensor ``index`` is dead: so is the memory that it came back to."""

    index: int
    values: tuple[int, ...]
    op: str = "discard"

    effects: ClassVar[Effects] = Effects("offloads", "ready", "released", words="discard         {d.name}")

    def device_bytes(self, of: Tables) -> tuple[int, int]:
        o = of.offloads[self.index]
        return 0, o.nbytes if o.copied else 0


def _what(tier: str) -> str:
    return "copy" if tier == "host" else "file"


def _kinds(of: type[Instruction]) -> list[type[Instruction]]:
    return [kind for sub in of.__subclasses__() for kind in [sub, *_kinds(sub)] if hasattr(kind, "op")]


KINDS = {kind.op: kind for kind in _kinds(Instruction)}


class Reducing(NamedTuple):
    """What an instruction is to a reduction: whether it ``starts`` the collective, or ``ends`` it, and whether the
    result is where it rests behind it (``completes``)."""

    desc: ReduceDesc
    starts: bool
    ends: bool
    completes: bool


def reducing(of: Tables, instr: Instruction) -> Reducing | None:
    """None where an instruction is of no reduction."""
    if instr.effects.table != "reduces":
        return None
    collective = Step("reduces", instr.index, 0)
    begun, waited = instr.starts(of), instr.ends(of)
    return Reducing(
        of.reduces[instr.index], begun == collective, waited == collective, instr.effects.completes
    )
