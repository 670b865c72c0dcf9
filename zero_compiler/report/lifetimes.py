"""What lies where while a Program runs: each buffer, from the instruction that makes it to the last one that has it.

The instructions are gone through once and do nothing but what they say of themselves (`instructions.py`): which
transfer they start and wait for, which values they read, write and free. So a picture of a Program cannot show
anything that its run does not do.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..alignment import arena_aligned
from ..ir.instructions import Compute, Instruction, Reducing, Step, reducing
from ..ir.program import Program
from ..ir.transfers import GatherDesc, KeepDesc, ReduceDesc
from ..memory.live import passing_of, results_of
from ..passes.fsdp_units import unit_of

# What a buffer has in it.
WEIGHT = "full weight"
CHUNK = "chunk on its way"  # this rank's rows, coming from another tier
STAGING = "staging"  # tensors of one transfer, one after the other
FULL_GRADIENT = "full gradient"
GRADIENT = "gradient"  # this rank's rows of the mean
ACTIVATION = "activation"
AWAY = "activation on its way"  # between the device and another tier

# Where a buffer lies: in an arena of the Program, at a planned offset; or where the allocator has put it.
KEPT, TRANSIENT, SLOTS, OWN, HOST_POOL, DEVICE_POOL = "kept", "transient", "slots", "own", "host", "device"
ALLOCATED = "allocated"

_CALLER = -1  # holds what forward has returned; no value has this number


@dataclass(frozen=True)
class BufferLifetime:
    """A buffer of ``nbytes`` that is there during the instructions ``begin`` to ``end``, both included.

    Args:
        what: it has in it; see above.
        pool: the arena that it lies in, at byte ``offset``; or ALLOCATED, and -1.
        names: parameters, or the tensor that is offloaded; of an activation, the modules that made it.
        layer: unit of these parameters, or modules.
        begin: -1: it was there before the Program began.
        end: the number of instructions, where it is still there behind the last of them.
        ready: instruction from which on it may be read; before that a transfer fills it.
        table, index: the transfer that it belongs to; or "storages", and which one.
    """

    what: str
    pool: str
    offset: int
    nbytes: int
    names: tuple[str, ...]
    layer: str
    begin: int
    end: int
    ready: int
    table: str
    index: int


@dataclass
class _Open:
    """A buffer that is there now: a :class:`BufferLifetime` whose end is not known yet."""

    what: str
    names: tuple[str, ...]
    layer: str
    nbytes: int
    begin: int
    pool: str = ALLOCATED
    offset: int = -1
    ready: int | None = None


def layer_of(modules: str) -> str:
    """The layer of what a segment computes, given the modules as a Program lists them: that of the first."""
    first = modules.split(" and ")[0].split(", ")[0]
    return unit_of(f"{first}.") if first else ""


@dataclass(frozen=True)
class Origin:
    """Where what a backward begins with comes from: ``forward`` returns it, behind the ``num_outputs`` that are the
    caller's, in the order in which the backward takes it."""

    forward: Program
    num_outputs: int

    def saved_values(self, backward: Program) -> dict[int, int]:
        """Which value of the forward each input of the backward is; those behind are gradients of outputs."""
        saved = self.forward.outputs[self.num_outputs :][: backward.num_inputs]
        return {at: value for at, value in enumerate(saved) if isinstance(value, int)}

    def saved_storages(self, backward: Program) -> dict[int, int]:
        """Of storages with which the backward begins, the one of the forward that each of them is, with the same
        bytes."""
        found = self._storages(backward)
        parts = Counter(
            found.values()
        )  # several results of one operator count as one storage where they are made
        return {
            mine: theirs
            for mine, theirs in found.items()
            if parts[theirs] == 1 and backward.storages[mine] == self.forward.storages[theirs]
        }

    def modules(self, backward: Program) -> dict[int, str]:
        """Of storages with which the backward begins, the modules that have made them."""
        made_by: dict[int, str] = {}
        for instr in self.forward.instrs:
            if isinstance(instr, Compute):
                for value in instr.outs:
                    for storage in _lies_in(self.forward, value):
                        made_by.setdefault(storage, self.forward.modules[instr.segment])
        return {mine: made_by.get(theirs, "") for mine, theirs in self._storages(backward).items()}

    def returned(self, backward: Program) -> set[int]:
        """Of storages with which the backward begins, those that the caller has as well, and may hold for longer."""
        given = self.forward.outputs[: self.num_outputs]
        theirs = {s for value in given if isinstance(value, int) for s in _lies_in(self.forward, value)}
        return {mine for mine, of in self._storages(backward).items() if of in theirs}

    def _storages(self, backward: Program) -> dict[int, int]:
        found: dict[int, int] = {}
        for mine, theirs in self.saved_values(backward).items():
            # Not where a value may lie in one of several.
            if len(_lies_in(backward, mine)) == len(_lies_in(self.forward, theirs)) == 1:
                found[backward.lies_in[mine][0]] = self.forward.lies_in[theirs][0]
        return found


def lifetimes(program: Program, origin: Origin | None = None) -> list[BufferLifetime]:
    """Every buffer of a run, in the order in which they begin.

    Args:
        origin: of what a backward begins with: from it names and layers of that, and what the caller holds of it.
    """
    walk = _Walk(program, origin)
    for at, instr in enumerate(program.instrs):
        walk.step(at, instr)
    return walk.finish()


class _Walk:
    """One run of a Program, in which nothing is computed and nothing moves."""

    def __init__(self, program: Program, origin: Origin | None) -> None:
        self._program = program
        # Of each transfer, or storage, the buffers that are there now, by what they are for and their number.
        self._open: dict[tuple[str, int], dict[tuple[str, int], _Open]] = defaultdict(dict)
        self._done: list[BufferLifetime] = []
        self._holders: dict[int, set[int]] = defaultdict(set)  # values that hold each storage
        self._lent: dict[Step, tuple[int, ...]] = {}
        self._full = _full_gradients(program)
        self._saved = origin.modules(program) if origin is not None else {}
        for storage in origin.returned(program) if origin is not None else ():
            self._holders[storage].add(_CALLER)
        for value in range(program.num_inputs):
            self._hold(value, -1, "")

    def step(self, at: int, instr: Instruction) -> None:
        program = self._program
        started, ended = instr.starts(program), instr.ends(program)
        if ended is not None:
            self._ended(at, ended)
        if started is not None:
            self._started(at, started)
        if instr.device_bytes(program)[0]:
            o = program.offloads[instr.index]
            back = _Open(ACTIVATION, (o.name,), layer_of(o.module), o.nbytes, at)
            self._open["offloads", instr.index]["back", 0] = back
        modules = program.modules[instr.segment] if isinstance(instr, Compute) else ""
        for value in instr.writes:
            if value >= 0:
                self._hold(value, at, modules)
        if (of := reducing(program, instr)) is not None:
            self._result(at, instr.index, of)
        if instr.effects.leaves == "released":
            self._close(at, (instr.table, instr.index))
        # Of one rank a gradient and its mean are the same memory.
        same = of is not None and not of.starts and program.slots_ranks == 1 and of.desc.copies == 1
        for value in self._given_up(instr, started, ended):
            self._drop(value, at - 1 if same else at)

    def finish(self) -> list[BufferLifetime]:
        for of in list(self._open):
            self._close(len(self._program.instrs), of)
        return sorted(self._done, key=lambda b: (b.begin, b.table, b.index, b.offset))

    # Values, and the storages that they lie in.

    def _hold(self, value: int, at: int, modules: str) -> None:
        for storage in _lies_in(self._program, value):
            self._holders[storage].add(value)
            opened = self._open["storages", storage]
            if opened:
                continue
            nbytes = self._program.storages[storage]
            if storage in self._full:
                name, layer = self._full[storage]
                opened["value", 0] = _Open(FULL_GRADIENT, (name,), layer, nbytes, at, ready=at)
            else:
                made_by = modules if at >= 0 else self._saved.get(storage, "")
                names = (made_by,) if made_by else ()
                opened["value", 0] = _Open(ACTIVATION, names, layer_of(made_by), nbytes, at, ready=at)

    def _drop(self, value: int, at: int) -> None:
        for storage in _lies_in(self._program, value):
            self._holders[storage].discard(value)
            if not self._holders[storage]:
                self._close(at, ("storages", storage))

    def _given_up(self, instr: Instruction, started: Step | None, ended: Step | None) -> list[int]:
        """Values that nothing reads any more, and no transfer that was started either."""
        free = instr.frees
        if started is not None and instr.lends(self._program):
            self._lent[started], free = tuple(free), ()
        lent = self._lent.pop(ended, ()) if ended is not None else ()
        return [v for v in (*free, *lent) if v >= 0]

    # Transfers.

    def _started(self, at: int, step: Step) -> None:
        program, index = self._program, step.which
        if step.table == "gathers":
            g = program.gathers[index]
            if step.number < g.steps - 1:
                self._chunks(at, g, index, step.number)
            elif not g.home:
                self._gather(at, g, index)
        elif step.table == "reduces" and step.number == 0:
            r = program.reduces[index]
            if r.staging >= 0:
                pool, nbytes = OWN if r.shared else TRANSIENT, _staging_bytes(r, program.slots_ranks)
                staging = _Open(STAGING, r.names, r.unit, nbytes, at, pool, r.staging)
                self._open["reduces", index]["staging", 0] = staging
        elif step.table == "offloads" and step.number == 0 and program.offloads[index].pooled:
            o = program.offloads[index]
            way = _Open(AWAY, (o.name,), layer_of(o.module), o.nbytes, at, HOST_POOL, o.offset)
            self._open["offloads", index]["pool", 0] = way

    def _chunks(self, at: int, g: GatherDesc, index: int, number: int) -> None:
        item, hop = _item(g.rest_dtype or g.dtype), g.hops[number]
        pool = HOST_POOL if hop.pool == "host" else DEVICE_POOL
        for k, name in enumerate(g.names):
            chunk = _Open(CHUNK, (name,), g.unit, g.chunk_numels[k] * item, at, pool, hop.offsets[k])
            self._open["gathers", index][f"hop {number}", k] = chunk

    def _gather(self, at: int, g: GatherDesc, index: int) -> None:
        item, world = _item(g.dtype), g.ranks(self._program.slots_ranks)
        pool = KEPT if g.kept else SLOTS if g.shared else TRANSIENT
        opened = self._open["gathers", index]
        for k, name in enumerate(g.names):
            nbytes = g.chunk_numels[k] * world * item
            opened["weight", k] = _Open(WEIGHT, (name,), g.unit, nbytes, at, pool, g.offsets[k])
        if g.staging >= 0:
            nbytes = g.staging_bytes(world)
            opened["staging", 0] = _Open(STAGING, g.names, g.unit, nbytes, at, TRANSIENT, g.staging)

    def _ended(self, at: int, step: Step) -> None:
        """A step has been waited for: what it has written may be read, and what it has read is free."""
        program, of = self._program, (step.table, step.which)
        for opened in self._open[of].values():
            opened.ready = at if opened.ready is None else opened.ready
        if step.table == "gathers":
            g = program.gathers[step.which]
            if (
                step.number and not g.home
            ):  # where it is read in place, it is used where the last hop has brought it
                self._close(at, of, f"hop {step.number - 1}")
            if step.number == g.steps - 1:
                self._close(at, of, "staging")
        elif step.table == "reduces" and step.number == 0:
            self._close(at, of, "staging")
        elif step.table == "offloads" and ("back", 0) in self._open[of]:
            if step.number == program.offloads[step.which].steps - 1:
                self._close(at, of, "pool")

    def _result(self, at: int, index: int, of: Reducing) -> None:
        """This rank's rows of a mean: to stay in memory, or on their way to another tier or to the other tiles."""
        stays, (passes, _) = results_of(self._program, of), passing_of(self._program, of)
        for role, nbytes in (("result", stays), ("passing", passes)):
            if nbytes:
                made = _Open(GRADIENT, of.desc.names, of.desc.unit, nbytes, at)
                self._open["reduces", index][role, 0] = made
        if of.completes:
            for opened in self._open["reduces", index].values():
                opened.ready = at if opened.ready is None else opened.ready
            self._close(at, ("reduces", index), "passing")

    def _close(self, at: int, of: tuple[str, int], role: str | None = None) -> None:
        """The buffers of a transfer that are for ``role``, or all of them, are there for the last time."""
        opened = self._open[of]
        for key in [k for k in opened if role in (None, k[0])]:
            o = opened.pop(key)
            ready = at if o.ready is None else o.ready
            self._done.append(
                BufferLifetime(o.what, o.pool, o.offset, o.nbytes, o.names, o.layer, o.begin, at, ready, *of)
            )


def _full_gradients(program: Program) -> dict[int, tuple[str, str]]:
    """Storages of the full gradients that are reduced or kept, with parameter and layer."""
    found: dict[int, tuple[str, str]] = {}
    for instr, of in zip(program.instrs, program.reductions, strict=True):
        desc: ReduceDesc | KeepDesc
        if of is not None and of.starts:
            desc, layer = of.desc, of.desc.unit
        elif instr.table == "keeps":
            desc = program.keeps[instr.index]
            layer = unit_of(desc.names[0])
        else:
            continue
        for name, value in zip(desc.names, instr.reads, strict=True):
            for storage in _lies_in(program, value):
                found.setdefault(storage, (name, layer))
    return found


def _lies_in(program: Program, value: int) -> Sequence[int]:
    return program.lies_in[value] if value < len(program.lies_in) else ()


def _staging_bytes(r: ReduceDesc, ranks: int) -> int:
    """Of the gradients of a reduction: as they are where peers read them, or the chunks of all ranks and the result."""
    if r.shared:
        return sum(map(math.prod, r.shapes)) * _item(r.dtype)
    chunks = sum(r.chunk_numels) * _item(r.dtype)
    return chunks if r.replicated else arena_aligned(chunks * ranks) + chunks


def _item(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)
