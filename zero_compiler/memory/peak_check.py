"""Bytes that a Program holds, counted again from its instructions: the verifier's own count, beside `live.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

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
from ..ir.transfers import ReduceDesc


class _Values:
    """Storages live as long as a value that lies in them."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._holders: list[set[int]] = [set() for _ in program.storages]
        self.nbytes = 0
        self.born(range(program.num_inputs))

    def born(self, values: Iterable[int]) -> None:
        for value in values:
            for storage in self._program.lies_in[value] if value >= 0 else ():
                if not self._holders[storage]:
                    self.nbytes += self._program.storages[storage]
                self._holders[storage].add(value)

    def die(self, values: Iterable[int]) -> None:
        for value in values:
            for storage in self._program.lies_in[value]:
                if value in self._holders[storage]:
                    self._holders[storage].remove(value)
                    if not self._holders[storage]:
                        self.nbytes -= self._program.storages[storage]


def known(instr: Instruction) -> bool:
    """Whether this count knows what memory an instruction takes."""
    return type(instr) in _COUNTS


def recount(program: Program) -> list[tuple[int, int]]:
    """For each instruction the most bytes held during it or after it, beside the arenas: of reduced gradients that rest
    in memory, and of all else.

    What a segment holds of its own while it runs is taken from the plan (``inside``); what is held around it is not.
    """
    count = _Count(program)
    return [count.row(instr) for instr in program.instrs]


class _Count:
    """What is held now, as the instructions are gone through one after the other. What instructions say of their own
    effects on memory is not read here, since it is what is to be checked."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._values = _Values(program)
        self._reduced = 0  # gradients
        self._lent: dict[tuple[str, int], tuple[int, ...]] = {}  # values that a transfer reads until its wait
        self._sums = self._early = 0  # between ranks with the same rows; of these, what is not waited for yet
        # Back on an accelerator; and reduced, on the way to another tier or to the place of a whole gradient.
        self._passing = 0
        # Of full gradients: an earlier backward has left as many as this one will.
        self._waiting = program.waiting_bytes
        # Of the instruction that is counted: values that it frees, bytes that it holds at most of values, and bytes of
        # what passes that are gone behind it.
        self._free: tuple[int, ...] = ()
        self._most = self._leaving = 0

    def row(self, instr: Instruction) -> tuple[int, int]:
        """Bytes of gradients, and of all else, during an instruction, the next one."""
        self._free, self._most, self._leaving = tuple(getattr(instr, "free", ())), 0, 0
        _COUNTS[type(instr)](self, instr)
        values = max(self._most, self._values.nbytes)
        row = self._reduced, values + self._sums + self._early + self._passing + self._waiting
        self._values.die(self._free)
        self._passing -= self._leaving
        return row

    def _nothing(self, instr: Instruction) -> None:
        """It moves nothing but what lies in arenas."""

    def _compute(self, instr: Compute) -> None:
        self._most = self._values.nbytes + self._program.inside[instr.segment]
        self._values.die(self._free)
        self._free = ()
        self._values.born(instr.outs)

    def _offload(self, instr: Offload) -> None:
        if self._program.offloads[instr.index].copied:
            self._lent["offload", instr.index], self._free = self._free, ()

    def _offload_read(self, instr: Write | WaitOffload) -> None:
        self._free = self._lent.pop(("offload", instr.index), ())

    def _restore(self, instr: Restore) -> None:
        o = self._program.offloads[instr.index]
        self._passing += o.nbytes if o.tiers == ("host",) else 0

    def _bring(self, instr: Bring) -> None:
        self._passing += self._program.offloads[instr.index].nbytes

    def _discard(self, instr: Discard) -> None:
        o = self._program.offloads[instr.index]
        self._leaving = o.nbytes if o.copied else 0

    def _keep(self, instr: Keep) -> None:
        self._most = self._values.nbytes + self._program.keeps[instr.index].cast_bytes

    def _reduce(self, instr: Reduce) -> None:
        program, r = self._program, self._program.reduces[instr.index]
        if _read_until_the_wait(r):
            self._lent["reduce", instr.index], self._free = self._free, ()
        if _result_is_there_from_the_start(program, r):
            self._result(r)
        elif _summed_twice_from_the_start(program, r):
            self._early += _summed_bytes(r)

    def _store(self, instr: Store | WaitReduce) -> None:
        """The collective has been waited for."""
        program, r = self._program, self._program.reduces[instr.index]
        self._free = self._lent.pop(("reduce", instr.index), ())
        # The sums before these have become results by now.
        self._sums = _between_replicas(r)
        if _summed_twice_from_the_start(program, r):
            self._early -= _summed_bytes(r)
        if program.slots_ranks == 1 and r.copies == 1:
            self._values.die(self._free)  # of one rank the gradient itself is the result
        if not _result_is_there_from_the_start(program, r):
            self._result(r)

    def _wait_reduce(self, instr: WaitReduce) -> None:
        r = self._program.reduces[instr.index]
        if not r.copied:  # else its store has waited for the reduction
            self._store(instr)
        self._reduced += _place_of_tiles(r)
        self._leaving = _passes(r)

    def _result(self, r: ReduceDesc) -> None:
        self._reduced += _stays(r)
        self._passing += _passes(r)


# Every kind of instruction: the verifier refuses one that is not here.
_COUNTS: dict[type, Callable[[_Count, Any], None]] = {
    **dict.fromkeys((Fetch, WaitFetch, Gather, WaitGather, KeepPart, Release, WaitRestore), _Count._nothing),
    **dict.fromkeys((Write, WaitOffload), _Count._offload_read),
    Compute: _Count._compute,
    Offload: _Count._offload,
    Restore: _Count._restore,
    Bring: _Count._bring,
    Discard: _Count._discard,
    Keep: _Count._keep,
    Reduce: _Count._reduce,
    Store: _Count._store,
    WaitReduce: _Count._wait_reduce,
}


def _read_until_the_wait(r: ReduceDesc) -> bool:
    """Whether gradients are reduced from where they lie, and not from a copy that is made at the start."""
    whole = all(c >= math.prod(shape) for c, shape in zip(r.chunk_numels, r.shapes, strict=True))
    return not r.shared and (r.staging < 0 or whole)


def _result_is_there_from_the_start(program: Program, r: ReduceDesc) -> bool:
    """Whether the process group writes what the Program gives: no cast, and nothing to be taken apart."""
    return len(r.names) == 1 and r.dtype == r.out_dtype and not r.shared and program.slots_ranks > 1


def _summed_twice_from_the_start(program: Program, r: ReduceDesc) -> bool:
    """Whether the process group writes what another one sums then, in a dtype that is not that of the result."""
    single = len(r.names) == 1 and not r.shared and program.slots_ranks > 1
    return r.copies > 1 and single and r.dtype != r.out_dtype


def _summed_bytes(r: ReduceDesc) -> int:
    return sum(r.chunk_numels) * _itemsize(r.dtype)


def _between_replicas(r: ReduceDesc) -> int:
    """What ranks with the same rows hold beside the results: the flat copy in which several sums travel, and sums that
    are cast once that copy is gone."""
    if r.copies == 1:
        return 0
    flat = _summed_bytes(r) if len(r.names) > 1 else 0
    late = 0 if r.copied else _passes(r)  # what is passed on waits for the sum
    if r.dtype == r.out_dtype:
        return flat + late
    results = sum(r.chunk_numels) * _itemsize(r.out_dtype)
    return _summed_bytes(r) + max(0, flat - results) + late


def _stays(r: ReduceDesc) -> int:
    return 0 if r.tiers or r.tile else r.result_bytes


def _passes(r: ReduceDesc) -> int:
    """What lands and does not stay: it goes to another tier, or a tile into the place of its gradient."""
    return r.result_bytes if r.tiers or r.tile else 0


def _place_of_tiles(r: ReduceDesc) -> int:
    """The place of a whole gradient, made when its first tile has landed."""
    if r.tile is None or r.tile.index or r.tiers:
        return 0
    return r.tile.numel * _itemsize(r.out_dtype)


def _itemsize(dtype: str) -> int:
    return getattr(torch, dtype).itemsize
