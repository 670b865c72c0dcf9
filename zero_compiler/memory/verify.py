"""The verifier's last word: what must be true of a Program, proved from its instructions alone.

Lifetimes of slots are read off the instructions again; that no two of them overlap is found by the sweep that tests
hold to the definition, pair by pair (`arena.check`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from ..errors import VerifyError
from ..ir.instructions import Instruction, Release, WaitGather
from ..ir.program import Program
from ..ir.transfers import KeepDesc, ReduceDesc
from .peak_check import known, recount
from .verify_places import verify_places

_SUMMED = ("reduces", "keeps")  # tables of gradients


def verify_program(
    program: Program,
    worlds: Mapping[str, int],
    budget_bytes: int | None = None,
    gradients_bytes: int = 0,
    kept_bytes: Mapping[str, int] | None = None,
) -> None:
    """Prove that the instructions of ``program`` can be run, in order, in the memory that it plans.

    Values are written once, before they are read, and not read after they were freed. A transfer is started
    once and waited for once; a gathered weight is released once, or kept. No two buffers of an arena overlap
    while both are in use. Live bytes never pass the budget, where there is one.

    Args:
        worlds: number of ranks of each owner.
        budget_bytes: most bytes that may be live at once beside the arenas, gradients that rest in memory among them;
            None: any number.
        gradients_bytes: of all such gradients of the model. A backward finds those there that it does not reduce
            itself.
        kept_bytes: size of the arena of kept weights of each owner; None: unknown.

    Raises:
        VerifyError: naming the instruction and the fact that it breaks.
    """
    _values(program)
    _transfers(program)
    verify_places(program, worlds, kept_bytes)
    if budget_bytes is not None:
        _budget(program, budget_bytes, gradients_bytes)


def verify_accumulating(
    program: Program, base: Program, owners: Collection[str], worlds: Mapping[str, int]
) -> None:
    """Prove that ``program`` does what ``base`` does, in its order, but for the reductions of ``owners``: each gradient
    that these reduce is kept.

    Raises:
        VerifyError: naming the gradient, or the fact that is broken.
    """
    verify_program(program, worlds)
    have, want = _gradients(program), _gradients(base)
    for gradient in want:
        if gradient not in have:
            raise VerifyError(f"the gradient of {gradient[1]} is lost: it is neither kept nor reduced")
    for r in program.reduces:
        if r.owner in owners:
            raise VerifyError(f"{r.label}: they are to be kept")
    for k in program.keeps:
        if k.owner not in owners:
            raise VerifyError(f"{k.label}: they are to be reduced")
    rest, base_rest = ([i for i in p.instrs if i.table not in _SUMMED] for p in (program, base))
    if rest != base_rest or have != want:
        raise VerifyError("a backward under zero.no_sync does something else than the one that reduces")
    rows = {v for i in base.instrs if i.effects.completes for v in i.writes}
    for mine, theirs in zip(program.outputs, base.outputs, strict=True):
        if mine != theirs and not (mine is None and theirs in rows):
            raise VerifyError(f"output {theirs} is lost")


def _gradients(program: Program) -> list[tuple[Any, ...]]:
    """Each gradient, or tile of one, that is kept or reduced, in order: whose it is, how it is summed, its value."""
    found = []
    for instr in program.instrs:
        if instr.table in _SUMMED and instr.reads:
            desc = getattr(program, instr.table)[instr.index]
            for name, shape, value in zip(desc.names, desc.shapes, instr.reads, strict=True):
                found.append((desc.owner, name, shape, desc.dtype, desc.tile, value))
    return found


def _fail(i: int, instr: Instruction, fact: str) -> NoReturn:
    raise VerifyError(f"instruction {i} ({instr.op}): {fact}")


def _values(program: Program) -> None:
    written = set(range(program.num_inputs))
    freed: set[int] = set()
    for i, instr in enumerate(program.instrs):
        if not known(instr):
            _fail(i, instr, "the verifier does not know what memory it takes (peak_check.py)")
        # The last reader of a weight drops it from the table; the release then ends the life of its bytes.
        for v in (*instr.reads, *instr.frees):
            if v >= 0 and v not in written:
                _fail(i, instr, f"value {v} is read before anything writes it")
        for v in instr.reads:
            if v in freed:
                _fail(i, instr, f"value {v} is read after it was freed")
        freed.update(instr.frees)
        for v in instr.writes:
            if v == -1:
                continue
            if v in written:
                _fail(i, instr, f"value {v} is written twice")
            if not 0 <= v < program.num_values:
                _fail(i, instr, f"value {v} is outside the table of {program.num_values} values")
            written.add(v)
    for out in program.outputs:
        if isinstance(out, int) and (out not in written or out in freed):
            raise VerifyError(f"output {out} was never written, or was freed")


def _transfers(program: Program) -> None:
    state: dict[tuple[str, int], str] = {}
    given: dict[int, tuple[int, ...]] = {}
    hops: Counter[int] = Counter()  # of each gather, those that its chunks have made
    for i, instr in enumerate(program.instrs):
        if not instr.table:
            continue
        kind, need = instr.table.removesuffix("s"), instr.needs(program)
        have = state.get((instr.table, instr.index), "idle")
        wrong = instr.misplaced(program)
        if instr.table == "gathers":
            wrong = wrong or _hop(program, instr, hops[instr.index], have)
            hops[instr.index] += hasattr(instr, "hop") and instr.ends(program) is not None
        if wrong or have != need:
            _fail(i, instr, wrong or f"{kind} {instr.index} is {have}, must be {need}")
        state[instr.table, instr.index] = instr.effects.leaves
        if isinstance(instr, WaitGather):
            given[instr.index] = instr.outs
        if isinstance(instr, Release) and set(instr.values) != {v for v in given[instr.index] if v >= 0}:
            gave = f"gather {instr.index} gave {given[instr.index]}"
            _fail(i, instr, f"releases values {instr.values}, but {gave}")
    _ended(program, state)


def _hop(program: Program, instr: Instruction, done: int, have: str) -> str:
    """What is wrong with a step of a gather whose chunks have made ``done`` hops; "" where nothing is."""
    wanted, hop = len(program.gathers[instr.index].hops), getattr(instr, "hop", None)
    if hop is not None and (hop != done or done >= wanted):
        return f"hop {hop} of gather {instr.index} is not number {done} of {wanted}"
    if hop is None and instr.starts(program) is not None and have == "fetched" and done < wanted:
        return f"gather {instr.index} starts after {done} of {wanted} hops of its chunks"
    return ""


def _ended(program: Program, state: Mapping[tuple[str, int], str]) -> None:
    """Every transfer has come to its end, and each gradient is reduced, or kept, once."""
    for k, gather in enumerate(program.gathers):
        have, want = state.get(("gathers", k), "idle"), "ready" if gather.kept else "released"
        if have != want:
            raise VerifyError(f"{gather.label} ends {have}, must end {want}")
    for k, offload in enumerate(program.offloads):
        if (have := state.get(("offloads", k), "idle")) != "released":
            raise VerifyError(f"{offload.label} ends {have}, must end released")
    for k, reduction in enumerate(program.reduces):
        if state.get(("reduces", k), "idle") != "done":
            raise VerifyError(f"{reduction.label} is not waited for")
    for k, keep in enumerate(program.keeps):
        if state.get(("keeps", k), "idle") != "done":
            raise VerifyError(f"the {keep.label} is not made")
    reduced: set[tuple[str, str]] = set()
    summed: list[ReduceDesc | KeepDesc] = [*program.reduces, *program.keeps]
    for desc in summed:
        for name in desc.names if desc.tile is None else ():
            if (desc.owner, name) in reduced:
                raise VerifyError(f"the gradient of {name} is reduced twice")
            reduced.add((desc.owner, name))
    _tiles(program, reduced)


def _tiles(program: Program, reduced: set[tuple[str, str]]) -> None:
    """The tiles of a gradient follow each other, without a gap, in the order in which they are waited for; the wait
    for the last one, and no other, gives the gradient."""
    following: dict[tuple[str, str], tuple[int, int]] = {}
    for i, instr in enumerate(program.instrs):
        if not instr.effects.completes or (part := program.reduces[instr.index].tile) is None:
            continue
        r = program.reduces[instr.index]
        key = (r.owner, r.names[0])
        if key in reduced:
            _fail(i, instr, f"{r.label}: the whole of it is reduced already")
        if (part.index, part.begin) != following.get(key, (0, 0)):
            _fail(i, instr, f"{r.label} begins at element {part.begin}: it is not the next one")
        if (instr.writes[0] >= 0) > part.last:
            _fail(i, instr, f"{r.label} is not the last one, and gives the gradient")
        following[key] = (part.index + 1, part.begin + r.chunk_numels[0])
        if part.last:
            if following[key][1] != part.numel:
                _fail(i, instr, f"{r.label} ends at element {following[key][1]} of {part.numel}")
            reduced.add(key)
            del following[key]
    for _, name in following:
        raise VerifyError(f"the last tile of the gradient of {name} is not reduced")


def _budget(program: Program, budget_bytes: int, gradients_bytes: int) -> None:
    rows = recount(program)
    found = max(0, gradients_bytes - rows[-1][0]) if program.phase == "backward" and rows else 0
    for i, (instr, (reduced, others)) in enumerate(zip(program.instrs, rows, strict=True)):
        live = others + min(gradients_bytes, found + reduced)
        if live > budget_bytes:
            _fail(i, instr, f"{live:,} bytes are live, and the budget leaves {budget_bytes:,}")
