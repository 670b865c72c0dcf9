"""The Program of a backward under ``zero.no_sync``: the one that reduces, with every reduction replaced by a sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from ..ir.instructions import Instruction, Keep
from ..ir.program import Program
from ..ir.transfers import KeepDesc, ReduceDesc
from ..memory.arena_extents import ends_by_owner
from ..memory.live import moments, passing_of, results_of


def accumulating(program: Program, owners: Collection[str]) -> Program:
    """The Program that adds up the gradients of ``owners`` where ``program``, a backward, reduces them.

    A ``keep`` stands where a reduction starts, and nothing where it is waited for; all else is as it was, on the same
    segments and values. Buffers that only those reductions used are not counted. Live bytes are those of a backward
    that is not the first of its step: all sums are there when it begins.

    Before and after, of a layer:

        compute         segment 3: layers.0                 compute         segment 3: layers.0
        reduce-scatter  layers.0.weight float32[32, 32]     keep            layers.0.weight float32[32, 32]
        compute         segment 4                           compute         segment 4
        wait            gradients of layers.0.weight
    """
    keeps: list[KeepDesc] = []
    reduces: list[ReduceDesc] = []
    index = []  # of each reduction, in the table that it is in from now on
    for r in program.reduces:
        if r.owner in owners:
            index.append(len(keeps))
            keeps.append(KeepDesc(r.owner, r.names, r.shapes, r.dtype, r.grad_dtype or r.dtype, r.tile))
        else:
            index.append(len(reduces))
            reduces.append(r)
    instrs: list[Instruction] = []
    came_from: list[int] = []
    gone: set[int] = set()
    for at, (instr, of) in enumerate(zip(program.instrs, program.reductions, strict=True)):
        if of is not None:
            kept = of.desc.owner in owners
            if kept and not of.starts:
                gone.update(instr.writes)
                continue
            if kept:
                instr = Keep(index[instr.index], instr.reads, instr.frees)
            else:
                instr = replace(instr, index=index[instr.index])
        instrs.append(instr)
        came_from.append(at)
    out = replace(
        program,
        instrs=instrs,
        outputs=[None if v in gone else v for v in program.outputs],
        reduces=reduces,
        keeps=keeps,
    )
    ends = ends_by_owner(out).values()
    out = replace(
        out,
        transient_bytes=max((at.transient for at in ends), default=0),
        own_bytes=max((at.own for at in ends), default=0),
    )
    return replace(out, live=_live(program, out, came_from) if program.live else [])


def most_accumulating(program: Program, gradients: int, full: int) -> int:
    """Most bytes that a Program holds beside its arenas in a step that accumulates under ``zero.no_sync``, in whichever
    of its calls: full gradients wait from one backward to the next, and the last backward holds each until it is
    reduced.

    Args:
        gradients: bytes of all reduced gradients of the model.
        full: bytes of all full ones, in the dtype that they are summed in.
    """
    rows = moments(program)
    if program.phase != "backward" or not rows:
        return full + max((m.others for m in rows), default=0)
    again = accumulating(program, {r.owner for r in program.reduces})
    waiting = max(0, full - again.waiting_bytes) + max((m.others for m in moments(again)), default=0)
    end = rows[-1]
    elsewhere = max(0, full - end.full, gradients - end.gradients)  # those of other Programs
    cast = max((k.cast_bytes for k in again.keeps), default=0)
    return max(waiting, max(m.others + m.gradients + end.full - m.full for m in rows) + elsewhere + cast)


def _live(program: Program, out: Program, came_from: list[int]) -> list[int]:
    """Live bytes of ``out``, whose instructions are those of ``program`` at ``came_from``."""
    before, added = moments(program, waiting=False), _added(program, {k.owner for k in out.keeps})
    beside = program.beside_bytes  # not what this Program holds
    rows, results, always = [], 0, out.buffer_bytes + out.waiting_bytes
    for instr, of, at in zip(out.instrs, out.reductions, came_from, strict=True):
        results += results_of(out, of)
        cast = out.keeps[instr.index].cast_bytes if instr.table == "keeps" else 0
        others = before[at].others - beside - added[at] + cast
        rows.append(always + others + results)
    return rows


def _added(program: Program, owners: Collection[str]) -> list[int]:
    """During each instruction, bytes of gradients that a reduction still reads there, and of what it has made and
    passes on: a sum is done with gradients at once, and makes nothing.

    Only of gradients that no other value shares its memory with.
    """
    out = [0] * len(program.instrs)
    holders = Counter(s for storages in program.lies_in for s in storages)
    reading: dict[int, tuple[int, int]] = {}
    passing = 0
    for at, (instr, of) in enumerate(zip(program.instrs, program.reductions, strict=True)):
        if of is None or of.desc.owner not in owners:
            out[at] += passing
            continue
        made, ended = passing_of(program, of)
        passing += made
        out[at] += passing
        passing -= ended
        if of.starts and instr.lends(program):
            dropped = Counter(s for v in instr.frees for s in program.lies_in[v])
            unshared = [program.storages[s] for s, count in dropped.items() if count == holders[s]]
            reading[instr.index] = at, sum(unshared)
        elif of.ends and instr.index in reading:
            begin, nbytes = reading.pop(instr.index)
            for between in range(begin + 1, at):
                out[between] += nbytes
    return out
