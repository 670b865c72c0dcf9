"""Bytes that a Program holds, counted again from its instructions: the verifier's own count, beside `live.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from ..ir.program import (
    Bring,
    Compute,
    Discard,
    Keep,
    Offload,
    Program,
    Reduce,
    ReduceDesc,
    Restore,
    Store,
    WaitOffload,
    WaitReduce,
    Write,
)


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


def recount(program: Program) -> list[tuple[int, int]]:
    """For each instruction the most bytes held during it or after it, beside the arenas: of reduced gradients that rest
    in memory, and of all else.

    What a segment holds of its own while it runs is taken from the plan (``inside``); what is held around it is not.
    """
    values = _Values(program)
    reduced = 0  # gradients
    lent: dict[tuple[str, int], tuple[int, ...]] = {}  # values that a transfer reads until it is waited for
    sums = early = 0  # on their way between ranks with the same rows; of these, what is not waited for yet
    restored = 0  # back on an accelerator
    passing = 0  # reduced, and on their way to another tier or to the place of a whole gradient
    waiting = (
        program.waiting_bytes
    )  # of full gradients: an earlier backward has left as many as this one will
    rows = []
    for instr in program.instrs:
        free = tuple(getattr(instr, "free", ()))
        most = 0
        if isinstance(instr, Compute):
            most = values.nbytes + program.inside[instr.segment]
            values.die(free)
            free = ()
            values.born(instr.outs)
        elif isinstance(instr, Offload) and program.offloads[instr.index].copied:
            lent["offload", instr.index], free = free, ()
        elif isinstance(instr, (Write, WaitOffload)):
            free = lent.pop(("offload", instr.index), ())
        elif isinstance(instr, Bring) or (
            isinstance(instr, Restore) and program.offloads[instr.index].tiers == ("host",)
        ):
            restored += program.offloads[instr.index].nbytes
        elif isinstance(instr, Keep):
            most = values.nbytes + program.keeps[instr.index].cast_bytes
        elif isinstance(instr, Reduce):
            r = program.reduces[instr.index]
            if _read_until_the_wait(r):
                lent["reduce", instr.index], free = free, ()
            if _result_is_there_from_the_start(program, r):
                reduced += _stays(r)
                passing += _passes(r)
            elif _summed_twice_from_the_start(program, r):
                early += _summed_bytes(r)
        elif isinstance(instr, WaitReduce) and program.reduces[instr.index].copied:
            pass  # its store has waited for the reduction
        elif isinstance(instr, (Store, WaitReduce)):
            r = program.reduces[instr.index]
            free = lent.pop(("reduce", instr.index), ())
            # The sums before these have become results by now.
            sums = _between_replicas(r)
            if _summed_twice_from_the_start(program, r):
                early -= _summed_bytes(r)
            if program.slots_ranks == 1 and r.copies == 1:
                values.die(free)  # of one rank the gradient itself is the result
            if not _result_is_there_from_the_start(program, r):
                reduced += _stays(r)
                passing += _passes(r)
        if isinstance(instr, WaitReduce):
            reduced += _place_of_tiles(program.reduces[instr.index])
        most = max(most, values.nbytes)
        rows.append((reduced, most + sums + early + restored + passing + waiting))
        values.die(free)
        if isinstance(instr, Discard) and program.offloads[instr.index].copied:
            restored -= program.offloads[instr.index].nbytes
        if isinstance(instr, WaitReduce):
            passing -= _passes(program.reduces[instr.index])
    return rows


def _read_until_the_wait(r: ReduceDesc) -> bool:
    """Whether gradients are reduced from where they lie, and not from a copy that is made at the start."""
    whole = all(c >= math.prod(shape) for c, shape in zip(r.chunk_numels, r.shapes, strict=True))
    return not r.shared and (r.staging < 0 or whole)


def _result_is_there_from_the_start(program: Program, r: ReduceDesc) -> bool:
    """Whether the process group writes what the Program gives: no cast, and nothing to be taken apart."""
    return len(r.names) == 1 and r.dtype == r.out_dtype and not r.shared and program.slots_ranks > 1


def _summed_twice_from_the_start(program: Program, r: ReduceDesc) -> bool:
    """Whether the process group writes what another one sums then, in a dtype that is not that of the result."""
    alone = len(r.names) == 1 and not r.shared and program.slots_ranks > 1
    return r.copies > 1 and alone and r.dtype != r.out_dtype


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
