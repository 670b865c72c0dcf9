"""The verifier's last word: what must be true of a Program, proved from its instructions alone.

Lifetimes of slots are read off the instructions again; that no two of them overlap is found by the sweep that tests
hold to the definition, pair by pair (`arena.check`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from ..errors import VerifyError
from ..ir.program import (
    Bring,
    Compute,
    Discard,
    Fetch,
    Gather,
    Instr,
    Keep,
    KeepDesc,
    Offload,
    Program,
    Reduce,
    ReduceDesc,
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
from .peak_check import recount
from .verify_places import verify_places


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
    moving = (Reduce, Store, WaitReduce, Keep)
    rest, base_rest = ([i for i in p.instrs if not isinstance(i, moving)] for p in (program, base))
    if rest != base_rest or have != want:
        raise VerifyError("a backward under zero.no_sync does something else than the one that reduces")
    rows = {v for i in base.instrs if isinstance(i, WaitReduce) for v in i.outs}
    for mine, theirs in zip(program.outputs, base.outputs, strict=True):
        if mine != theirs and not (mine is None and theirs in rows):
            raise VerifyError(f"output {theirs} is lost")


def _gradients(program: Program) -> list[tuple[Any, ...]]:
    """Each gradient, or tile of one, that is kept or reduced, in order: whose it is, how it is summed, its value."""
    found = []
    for instr in program.instrs:
        if isinstance(instr, (Reduce, Keep)):
            desc: Any = (program.keeps if isinstance(instr, Keep) else program.reduces)[instr.index]
            for name, shape, value in zip(desc.names, desc.shapes, instr.ins, strict=True):
                found.append((desc.owner, name, shape, desc.dtype, desc.tile, value))
    return found


def _fail(i: int, instr: Instr, fact: str) -> NoReturn:
    raise VerifyError(f"instruction {i} ({instr.op}): {fact}")


def _values(program: Program) -> None:
    written = set(range(program.num_inputs))
    freed: set[int] = set()
    for i, instr in enumerate(program.instrs):
        ins = getattr(instr, "ins", ())
        # The last reader of a weight drops it from the table; the release then ends the life of its bytes.
        gone = instr.values if isinstance(instr, (Release, Discard)) else getattr(instr, "free", ())
        for v in (*ins, *gone):
            if v >= 0 and v not in written:
                _fail(i, instr, f"value {v} is read before anything writes it")
        for v in ins:
            if v in freed:
                _fail(i, instr, f"value {v} is read after it was freed")
        freed.update(gone)
        for v in getattr(instr, "outs", ()):
            if v == -1:
                continue
            if v in written:
                _fail(i, instr, f"value {v} is written twice")
            if not 0 <= v < program.num_values:
                _fail(i, instr, f"value {v} is outside the table of {program.num_values} values")
            written.add(v)
    for v in program.outputs:
        if isinstance(v, int) and (v not in written or v in freed):
            raise VerifyError(f"output {v} was never written, or was freed")


def _transfers(program: Program) -> None:
    state: dict[tuple[str, int], str] = {}
    # For each instruction: what it moves, the state that it needs, the state that it leaves.
    steps = {
        Fetch: ("gather", "idle", "fetching"),
        WaitFetch: ("gather", "fetching", "fetched"),
        Gather: ("gather", "idle", "started"),
        WaitGather: ("gather", "started", "ready"),
        Release: ("gather", "ready", "released"),
        Reduce: ("reduce", "idle", "started"),
        Store: ("reduce", "started", "stored"),
        WaitReduce: ("reduce", "started", "done"),
        Keep: ("keep", "idle", "done"),
        Offload: ("offload", "idle", "started"),
        Write: ("offload", "started", "sent on"),
        WaitOffload: ("offload", "started", "released"),
        Restore: ("offload", "idle", "started"),
        Bring: ("offload", "started", "sent on"),
        WaitRestore: ("offload", "started", "ready"),
        Discard: ("offload", "ready", "released"),
    }
    given: dict[int, tuple[int, ...]] = {}
    hops: dict[int, int] = {}  # of each gather, those that its chunks have made
    for i, instr in enumerate(program.instrs):
        if isinstance(instr, Compute):
            continue
        kind, need, leave = steps[type(instr)]
        if isinstance(instr, (Fetch, WaitFetch, Gather)):
            done, wanted = hops.get(instr.index, 0), len(program.gathers[instr.index].hops)
            if not isinstance(instr, WaitFetch) and done:
                need = "fetched"
            if isinstance(instr, Gather) and wanted:
                need = "fetched"
                if done < wanted and state.get((kind, instr.index)) == need:
                    _fail(
                        i, instr, f"gather {instr.index} starts after {done} of {wanted} hops of its chunks"
                    )
            elif not isinstance(instr, Gather) and (instr.hop != done or done >= wanted):
                _fail(i, instr, f"hop {instr.hop} of gather {instr.index} is not number {done} of {wanted}")
            hops[instr.index] = done + isinstance(instr, WaitFetch)
        if isinstance(instr, (Store, WaitReduce)) and program.reduces[instr.index].copied:
            need = "started" if isinstance(instr, Store) else "stored"
        elif isinstance(instr, Store):
            _fail(i, instr, f"reduction {instr.index} rests where it is, and is not to be copied")
        if isinstance(instr, (WaitOffload, WaitRestore)) and program.offloads[instr.index].staged:
            need = "sent on"
        elif isinstance(instr, (Write, Bring)) and not program.offloads[instr.index].staged:
            _fail(i, instr, f"offload {instr.index} has one step to go, and is not sent on")
        have = state.get((kind, instr.index), "idle")
        if have != need:
            _fail(i, instr, f"{kind} {instr.index} is {have}, must be {need}")
        state[kind, instr.index] = leave
        if isinstance(instr, WaitGather):
            given[instr.index] = instr.outs
        if isinstance(instr, Release) and set(instr.values) != {v for v in given[instr.index] if v >= 0}:
            _fail(
                i,
                instr,
                f"releases values {instr.values}, but gather {instr.index} gave {given[instr.index]}",
            )
    for k, gather in enumerate(program.gathers):
        have, want = state.get(("gather", k), "idle"), "ready" if gather.kept else "released"
        if have != want:
            raise VerifyError(f"{gather.label} ends {have}, must end {want}")
    for k, offload in enumerate(program.offloads):
        if (have := state.get(("offload", k), "idle")) != "released":
            raise VerifyError(f"{offload.label} ends {have}, must end released")
    for k, reduction in enumerate(program.reduces):
        if state.get(("reduce", k), "idle") != "done":
            raise VerifyError(f"{reduction.label} is not waited for")
    for k, keep in enumerate(program.keeps):
        if state.get(("keep", k), "idle") != "done":
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
        if not isinstance(instr, WaitReduce) or (part := program.reduces[instr.index].tile) is None:
            continue
        r = program.reduces[instr.index]
        key = (r.owner, r.names[0])
        if key in reduced:
            _fail(i, instr, f"{r.label}: the whole of it is reduced already")
        if (part.index, part.begin) != following.get(key, (0, 0)):
            _fail(i, instr, f"{r.label} begins at element {part.begin}: it is not the next one")
        if (instr.outs[0] >= 0) > part.last:
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
