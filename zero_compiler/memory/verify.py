"""The verifier's last word: what must be true of a Program, proved from its instructions alone.

Lifetimes of slots are read off the instructions again; that no two of them overlap is found by the sweep that tests
hold to the definition, pair by pair (`arena.check`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

import torch

from ..alignment import BLOCK_BYTES, block_aligned
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
from .arena import Slot, check
from .peak_check import recount


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
    _memory(program, worlds, kept_bytes)
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


def _memory(program: Program, worlds: Mapping[str, int], kept_bytes: Mapping[str, int] | None) -> None:
    at: dict[tuple[type, int], int] = {
        (type(instr), instr.index): i
        for i, instr in enumerate(program.instrs)
        if not isinstance(instr, Compute)
    }
    fetched = {
        (type(instr), instr.index, instr.hop): i
        for i, instr in enumerate(program.instrs)
        if isinstance(instr, (Fetch, WaitFetch))
    }
    sizes = {"transient": program.transient_bytes, "slots": program.slots_bytes, "own": program.own_bytes}
    sizes |= {"host": program.host_bytes, "device": program.device_bytes}
    slots: dict[str, list[Slot]] = {pool: [] for pool in sizes}
    offsets: dict[str, list[int]] = {pool: [] for pool in sizes}
    labels: dict[str, list[str]] = {pool: [] for pool in sizes}
    kept: dict[
        str, dict[str, tuple[int, int]]
    ] = {}  # of each weight, where it lies and how many bytes it has

    def use(label: str, offset: int, nbytes: int, start: int, end: int, pool: str = "transient") -> None:
        if offset < 0:
            raise VerifyError(f"{label} needs a place in the arena and has none")
        slots[pool].append(Slot(nbytes, start, end))
        offsets[pool].append(offset)
        labels[pool].append(label)

    for k, g in enumerate(program.gathers):
        world, item = worlds[g.owner], _itemsize(g.dtype)
        start, ready = at[Gather, k], at[WaitGather, k]
        for h, hop in enumerate(g.hops):
            last = ready if world > 1 or g.kept else at[Release, k]
            last = fetched.get((WaitFetch, k, h + 1), last)  # until it has come one step further
            for name, numel, offset in zip(g.names, g.chunk_numels, hop.offsets, strict=True):
                if hop.tier == "nvme" and offset % BLOCK_BYTES:
                    raise VerifyError(
                        f"{g.label}: {name} is read to byte {offset}, no multiple of {BLOCK_BYTES}"
                    )
                size = numel * _itemsize(g.rest_dtype)
                size = block_aligned(size) if hop.tier == "nvme" else size
                use(f"{hop.what} of {name}", offset, size, fetched[Fetch, k, h], last, hop.pool)
        for name, shape, numel, offset in zip(g.names, g.shapes, g.chunk_numels, g.offsets, strict=True):
            nbytes = numel * world * item
            if math.prod(shape) > numel * world:
                raise VerifyError(
                    f"{g.label}: {name} has {math.prod(shape)} elements, its chunks {numel * world}"
                )
            if g.home:
                continue
            if g.kept:
                if kept.setdefault(g.owner, {}).setdefault(name, (offset, nbytes)) != (offset, nbytes):
                    raise VerifyError(f"{g.label}: {name} is kept in two places")
            else:
                pool = "slots" if g.shared else "transient"
                use(f"{g.label}: {name}", offset, nbytes, start, at[Release, k], pool)
        if g.home or g.shared:
            continue
        if len(g.names) > 1:
            use(
                f"staging of the {g.label}", g.staging, sum(g.chunk_numels) * (world + 1) * item, start, ready
            )
        elif g.staging >= 0:
            use(f"staging of the {g.label}", g.staging, g.chunk_numels[0] * item, start, ready)
    read = _read_by_peers(program)
    for k, o in enumerate(program.offloads):
        if not o.pooled:
            continue
        # What came back to a device has left the pool when the device has been told to wait for it.
        back = WaitRestore if o.staged else Discard
        kinds = (Offload, WaitOffload) if (Offload, k) in at else (Restore, back)
        if o.offset % BLOCK_BYTES or o.where % BLOCK_BYTES:
            raise VerifyError(f"{o.label}: lies at no multiple of {BLOCK_BYTES}")
        use(o.label, o.offset, block_aligned(o.nbytes), at[kinds[0], k], at[kinds[1], k], "host")
    for k, r in enumerate(program.reduces):
        if r.shared:
            nbytes = sum(math.prod(s) for s in r.shapes) * _itemsize(r.dtype)
            use(r.label, r.staging, nbytes, at[Reduce, k], read[k], "own")
            continue
        if r.staging < 0:
            if len(r.names) > 1 or r.replicated or r.dtype != r.out_dtype:
                raise VerifyError(f"{r.label}: needs a staging area")
            continue
        world = 1 if r.replicated else worlds[r.owner]
        total = sum(r.chunk_numels) * _itemsize(r.dtype)
        use(
            r.label,
            r.staging,
            total * (world if r.replicated else world + 1),
            at[Reduce, k],
            at.get((Store, k), at[WaitReduce, k]),
        )
    for pool, nbytes in sizes.items():
        wrong = check(slots[pool], offsets[pool], nbytes)
        if wrong:
            raise VerifyError(f"planned memory ({pool}): {wrong} (slots {', '.join(labels[pool][:8])}, ...)")
    for owner, places in kept.items():
        end = 0
        for offset, nbytes in sorted(places.values()):
            if offset < end:
                raise VerifyError(f"kept weights of {owner} overlap at byte {offset}")
            end = offset + nbytes
        if kept_bytes is not None and end > kept_bytes.get(owner, 0):
            raise VerifyError(
                f"kept weights of {owner} end at byte {end}, and their arena has {kept_bytes.get(owner, 0)}"
            )


def _budget(program: Program, budget_bytes: int, gradients_bytes: int) -> None:
    rows = recount(program)
    found = max(0, gradients_bytes - rows[-1][0]) if program.phase == "backward" and rows else 0
    for i, (instr, (reduced, others)) in enumerate(zip(program.instrs, rows, strict=True)):
        live = others + min(gradients_bytes, found + reduced)
        if live > budget_bytes:
            _fail(i, instr, f"{live:,} bytes are live, and the budget leaves {budget_bytes:,}")


def _read_by_peers(program: Program) -> dict[int, int]:
    """For each reduction, the instruction by which every peer is done with what this rank laid there.

    Peers are, once a reduction has ended that they start behind their wait for this one.
    """
    waits: dict[int, int] = {}
    for i, instr in enumerate(program.instrs):
        if isinstance(instr, (Store, WaitReduce)):
            waits.setdefault(instr.index, i)
    soonest, done = len(program.instrs), {}
    for i, instr in reversed(list(enumerate(program.instrs))):
        if isinstance(instr, (Store, WaitReduce)):
            if waits[instr.index] == i:
                done[instr.index] = soonest
        elif isinstance(instr, Reduce):
            soonest = min(soonest, waits[instr.index])
    return done


def _itemsize(dtype: str) -> int:
    return getattr(torch, dtype).itemsize
