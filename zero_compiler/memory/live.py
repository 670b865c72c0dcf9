"""Bytes live after each instruction of a Program, and what of them is gradients at rest."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import fx

from ..ir import facts, ops
from ..ir.instructions import Compute, Instruction, Reducing, Step
from ..ir.program import Program
from ..ir.transfers import ReduceDesc
from .segment_graph import SegmentGraph
from .segment_peak import peak_inside

_CALLER = -1  # holds what forward has returned; no value has this number
# What comes back lies in the pool, or is counted where it begins to.
_BROUGHT = frozenset({ops.restore, ops.bring})


def live_bytes(
    program: Program,
    graph: fx.Graph,
    numbers: Mapping[fx.Node, int],
    segments: Sequence[SegmentGraph],
    sizes: facts.Sizes | None = None,
    roots: Mapping[fx.Node, frozenset[fx.Node]] | None = None,
    gives_up: bool = True,
) -> tuple[list[int], list[int]]:
    """Bytes live after each instruction, or inside it where that is more: the arena, values that the Program
    made, what forward saved for backward, and segments' internals.

    The batch, buffers and shards are the caller's. Of each segment, what it holds at most beyond what is live before
    it (see `segment_peak.py`).

    Args:
        sizes: at which symbolic ones are counted; None: as the capture saw them.
        roots: of the graph, see :func:`facts.alias_roots`, where they are known.
        gives_up: what a segment is the last to read may go within it.
    """
    roots = facts.alias_roots(graph) if roots is None else roots
    count = _LiveBytes(program, graph, numbers, segments, sizes, roots, gives_up)
    rows = list(map(count.step, program.instrs, program.reductions))
    return rows, count.beyond


class _LiveBytes:
    """Bytes live now, as the instructions of a Program are gone through one after the other.

    ``beyond`` is, of each segment so far, what it holds at most beyond what was live before it.
    """

    def __init__(
        self,
        program: Program,
        graph: fx.Graph,
        numbers: Mapping[fx.Node, int],
        segments: Sequence[SegmentGraph],
        sizes: facts.Sizes | None,
        roots: Mapping[fx.Node, frozenset[fx.Node]],
        gives_up: bool,
    ) -> None:
        self._program, self._segments, self._sizes = program, segments, sizes
        self._gives_up = gives_up
        self.beyond: list[int] = []
        self._node_of = {i: n for n, i in numbers.items()}
        self._roots = roots
        self._made: dict[fx.Node, int] = {}  # bytes of each storage that is live
        self._holders: dict[fx.Node, set[int]] = {}  # values that hold each
        # Values that live until a step has read them: gradients until their reduction ends, and tensors on their way to
        # the host.
        self._lent: dict[Step, tuple[int, ...]] = {}
        # What the sum between ranks with the same rows takes, until the next reduction is waited for.
        self._summing = 0
        if program.phase == "backward":
            owner, self._made = facts.saved_storages(graph, sizes)
            for node, first in owner.items():
                self._holders.setdefault(first, set()).add(numbers[node])
                if facts.is_returned(node):
                    self._holders[first].add(_CALLER)
            self._roots = {n: frozenset(owner.get(r, r) for r in rs) for n, rs in self._roots.items()}
        self._live = sum(self._made.values())

    def step(self, instr: Instruction, of: Reducing | None) -> int:
        """Bytes live during an instruction, the next one, which is ``of`` a reduction or none."""
        program = self._program
        inside = self._compute(instr) if isinstance(instr, Compute) else None
        free = self._given_up(instr)
        if of is not None:
            self._sum_between_replicas(of)
        made, gone = instr.device_bytes(program)
        self._live += made + results_of(program, of)
        gone += self._freed_bytes(free)
        made, ended = passing_of(program, of)
        self._live, gone = self._live + made, gone + ended
        if of is not None and not of.starts and program.slots_ranks == 1 and of.desc.copies == 1:
            # Of one rank a gradient and its mean are the same memory.
            self._live, gone = self._live - gone + ended, ended
        row = program.buffer_bytes + (self._live if inside is None else inside)
        self._live -= gone
        return row

    def _compute(self, instr: Compute) -> int:
        """Bytes inside a segment when it holds most. Behind it, what it returns is live."""
        ins = [self._node_of[i] for i in instr.ins]
        # Given up to the segment, and nobody else's: the segment frees them at their last use.
        dying = [
            self._gives_up
            and i in instr.free
            and all(r in self._made and self._holders[r] <= set(instr.free) for r in self._roots[n])
            for i, n in zip(instr.ins, ins, strict=True)
        ]
        given: dict[
            fx.Node, int
        ] = {}  # with what the segment's inputs have of it; the rest waits for its end
        for n in (n for n, gone in zip(ins, dying, strict=True) if gone):
            for r in self._roots[n]:
                given[r] = given.get(r, 0) + facts.bytes_of(facts.value(n), self._sizes)
        self.beyond.append(
            peak_inside(self._segments[instr.segment], dying, self._sizes)
            - sum(min(self._made[r], n) for r, n in given.items())
        )
        inside = self._live + self.beyond[-1]
        for o in instr.outs:
            for r in self._roots[self._node_of[o]]:
                self._holders.setdefault(r, set()).add(o)
                if r in self._made or r.op == "placeholder" or facts.is_weight(r) or r.target in _BROUGHT:
                    continue
                self._made[r] = facts.bytes_of(facts.value(r), self._sizes)
                self._live += self._made[r]
        return inside

    def _given_up(self, instr: Instruction) -> tuple[int, ...]:
        """Values that nothing reads behind an instruction any more."""
        program, free = self._program, instr.frees
        started, ended = instr.starts(program), instr.ends(program)
        if started is not None and instr.lends(program):
            self._lent[started], free = free, ()
        return free if ended is None else (*free, *self._lent.pop(ended, ()))

    def _sum_between_replicas(self, of: Reducing) -> None:
        r = of.desc
        if of.starts and _written_there(self._program, r):
            self._live += sums_of(r)
        elif of.ends:
            self._live -= self._summing
            self._summing = sums_of(r)
            if not _written_there(self._program, r):
                self._live += self._summing

    def _freed_bytes(self, free: Iterable[int]) -> int:
        """Bytes of storages that nothing holds when the values ``free`` are dropped."""
        gone = 0
        for o in free:
            for r in self._roots[self._node_of[o]]:
                held = self._holders.get(r)
                if held is not None:
                    held.discard(o)
                    if not held and r in self._made:
                        gone += self._made.pop(r)
        return gone


def most_made(
    program: Program,
    graph: fx.Graph,
    numbers: Mapping[fx.Node, int],
    segments: Sequence[SegmentGraph],
) -> int:
    """Most bytes that values which the segments of a Program make, and what they take inside, have at once: without
    arenas, what a forward has saved, and means of gradients that lie elsewhere than the gradients."""
    alone = replace(program, phase="forward", before_bytes=0, again_bytes=0, returned_bytes=0)
    # Whoever records a segment holds what it was given until it has run.
    live, inside = live_bytes(alone, graph, numbers, segments, gives_up=False)
    rows = moments(replace(alone, live=live, inside=inside), waiting=False)
    same = program.slots_ranks == 1 and all(r.copies == 1 for r in program.reduces)
    return max((m.others + m.gradients * same for m in rows), default=0)


def results_of(program: Program, of: Reducing | None) -> int:
    """Bytes of the reduced gradients that come to be at an instruction, and rest in memory.

    Padded chunks: a plan is the same on every rank, whichever rows it has. Over c10d a lone result of the right
    dtype is where the transport writes to, and there from the start. The first tile of a gradient that lands brings
    the place of all of them.
    """
    if of is None or of.desc.tiers:
        return 0
    r = of.desc
    if r.tile is not None:
        return (
            r.tile.numel * getattr(torch, r.out_dtype).itemsize if of.completes and r.tile.index == 0 else 0
        )
    return r.result_bytes if (of.starts if _early(program, r) else of.completes) else 0


def _early(program: Program, r: ReduceDesc) -> bool:
    """Whether the result is where the transport writes to."""
    return len(r.names) == 1 and r.dtype == r.out_dtype and not r.shared and program.slots_ranks > 1


def passing_of(program: Program, of: Reducing | None) -> tuple[int, int]:
    """Bytes of results that do not stay in memory as they are: those that come to be at an instruction, and those that
    are gone behind it."""
    if of is None or not of.desc.passes:
        return 0, 0
    made = of.starts if _early(program, of.desc) else of.ends
    return of.desc.result_bytes * made, of.desc.result_bytes * of.completes


def sums_of(r: ReduceDesc) -> int:
    """Bytes beside the results of a reduction while it is summed between ranks with the same rows.

    A process group sums several tensors in a copy, in which they lie one after the other; it is gone before anything
    is cast. What is summed in another dtype than that of the result lives until that is made. A result that does not
    stay goes on only then.
    """
    if r.copies == 1:
        return 0
    numel = sum(r.chunk_numels)
    summed = numel * getattr(torch, r.dtype).itemsize
    copied = summed if len(r.names) > 1 else 0
    passing = r.result_bytes if r.passes and not r.copied else 0
    if r.dtype == r.out_dtype:
        return copied + passing
    return max(summed + copied - numel * getattr(torch, r.out_dtype).itemsize, summed) + passing


def _written_there(program: Program, r: ReduceDesc) -> bool:
    """Whether the transport writes, from the start on, what ranks with the same rows sum and cast then."""
    lone = len(r.names) == 1 and not r.shared and program.slots_ranks > 1
    return r.copies > 1 and lone and r.dtype != r.out_dtype


class Moment(NamedTuple):
    """During one instruction: bytes of ``gradients`` that rest in memory and were reduced so far, of the ``full`` ones
    that these came from, and of all ``others`` beside them and the arenas: what other frames and the caller hold is
    among them, and memory of results that pass which waits for others."""

    others: int
    gradients: int
    full: int = 0


def waiting_of(program: Program) -> list[int]:
    """During each instruction, bytes of memory that waits for results that pass.

    A storage of one that has gone is used again by another of its size, or given back before one is made of another
    size (``passing_`` in csrc/include/zero/engine.h). So at each moment they take, of each owner, what those took that
    were there at once at some moment before, and no more.
    """
    passing = [_passing_storage(program, r) for r in program.reduces]
    if not any(passing):
        return [0] * len(program.instrs)
    now: Counter[str] = Counter()
    most: Counter[str] = Counter()
    summing: Counter[str] = Counter()  # until the next reduction is waited for
    held = taken = 0
    rows = []
    for instr, of in zip(program.instrs, program.reductions, strict=True):
        gone = ""  # the owner of what is gone behind it
        if of is not None:
            r = of.desc
            nbytes = passing[instr.index]
            if of.ends and summing:
                now -= summing
                held -= summing.total()
                summing.clear()
            early = _early(program, r) or _written_there(program, r)
            if of.starts if early else of.ends:
                held += nbytes
                now[r.owner] += nbytes
                more = max(0, now[r.owner] - most[r.owner])
                most[r.owner] += more
                taken += more
            if of.completes and of.ends and r.copies > 1:
                summing[r.owner] += nbytes
            elif of.completes:
                gone = r.owner
        rows.append(taken - held)
        if gone:
            now[gone] -= nbytes
            held -= nbytes
    return rows


def _passing_storage(program: Program, r: ReduceDesc) -> int:
    """Bytes of the engine's that results of a reduction lie in and leave again."""
    if r.cast_last:
        return sum(r.chunk_numels) * getattr(torch, r.dtype).itemsize
    if not r.passes:
        return 0
    itself = program.slots_ranks == 1 and r.copies == 1 and (r.grad_dtype or r.dtype) == r.out_dtype
    return 0 if itself else r.result_bytes  # of one rank the gradient itself is the result


def moments(program: Program, waiting: bool = True) -> list[Moment]:
    """What lives when, of what a Program makes; with or without what :func:`waiting_of` counts."""
    out = []
    gradients = full = 0
    beside, arenas = program.beside_bytes, program.buffer_bytes
    tiles: dict[tuple[str, str], int] = {}
    waits = waiting_of(program) if waiting else [0] * len(program.instrs)
    for of, live, wait in zip(program.reductions, program.live, waits, strict=True):
        if of is not None:
            gradients += results_of(program, of)
        out.append(Moment(live - arenas - gradients + beside + wait, gradients, full))
        if of is not None and of.completes:
            r = of.desc
            key = (r.owner, r.names[0])
            nbytes = tiles.pop(key, 0) + sum(map(math.prod, r.shapes)) * getattr(torch, r.dtype).itemsize
            if r.tile is None or r.tile.last:
                full += nbytes
            else:
                tiles[key] = nbytes  # the whole of it waits for its last tile
    return out


def most(program: Program, gradients: int) -> int:
    """Most bytes that a Program holds beside its arenas, the gradients that it has made among them.

    Args:
        gradients: bytes of all gradients of the model. Those that another Program makes count during the whole
            backward.
    """
    rows = moments(program)
    rest = max(0, gradients - rows[-1].gradients) if program.phase == "backward" and rows else 0
    return max((m.others + min(gradients, m.gradients + rest) for m in rows), default=0)


def idle_bytes(programs: Iterable[Program], gradients: int, most_bytes: int) -> int:
    """Of the storages of gradients, how many bytes may wait for the next backward without raising a peak.

    A storage that is kept need not be allocated, and its pages not be touched for the first time, in every step.
    Between two backwards its bytes serve nothing else: where activations make the peak, gradients are to be born in
    memory that these have left.

    Args:
        most_bytes: that may be held at any moment, as :func:`most` counts.
    """
    idle = gradients
    for program in programs:
        rows = moments(program)
        rest = max(0, gradients - rows[-1].gradients) if program.phase == "backward" and rows else 0
        for m in rows:
            if m.others + gradients > most_bytes:
                idle = min(idle, most_bytes - m.others - m.gradients - rest)
    return max(0, idle)
