"""The verifier of places: no two buffers of an arena overlap while both are in use.

When a buffer is in use is read off the instructions again, and not taken from what planned it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from ..alignment import BLOCK_BYTES, block_aligned
from ..errors import VerifyError
from ..ir.instructions import (
    Compute,
    Discard,
    Fetch,
    Gather,
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
)
from ..ir.program import Program
from ..ir.transfers import GatherDesc, OffloadDesc, ReduceDesc
from .arena import Slot, check


def verify_places(program: Program, worlds: Mapping[str, int], kept_bytes: Mapping[str, int] | None) -> None:
    """Prove that every transfer has the place that it needs, and that no other one uses it meanwhile.

    Args:
        worlds: number of ranks of each owner.
        kept_bytes: size of the arena of kept weights of each owner; None: unknown.

    Raises:
        VerifyError: naming the transfer, or the bytes that overlap.
    """
    places = _Places(program, worlds)
    for k, g in enumerate(program.gathers):
        places.chunks(k, g)
        places.weights(k, g)
        places.staging(k, g)
    for k, o in enumerate(program.offloads):
        if o.pooled:
            places.offload(k, o)
    read = _read_by_peers(program)
    for k, r in enumerate(program.reduces):
        places.reduction(k, r, read)
    places.check_pools()
    places.check_kept(kept_bytes)


class _Places:
    """Who uses which bytes of each pool, from which instruction to which."""

    def __init__(self, program: Program, worlds: Mapping[str, int]) -> None:
        self._worlds = worlds
        self._at = {
            (type(instr), instr.index): i
            for i, instr in enumerate(program.instrs)
            if not isinstance(instr, Compute)
        }
        self._fetched = {
            (type(instr), instr.index, instr.hop): i
            for i, instr in enumerate(program.instrs)
            if isinstance(instr, (Fetch, WaitFetch))
        }
        self._sizes = {
            "transient": program.transient_bytes,
            "slots": program.slots_bytes,
            "own": program.own_bytes,
            "host": program.host_bytes,
            "device": program.device_bytes,
        }
        self._slots: dict[str, list[Slot]] = {pool: [] for pool in self._sizes}
        self._offsets: dict[str, list[int]] = {pool: [] for pool in self._sizes}
        self._labels: dict[str, list[str]] = {pool: [] for pool in self._sizes}
        # Of each kept weight, where it lies and how many bytes it has.
        self._kept: dict[str, dict[str, tuple[int, int]]] = {}

    def _use(
        self, label: str, offset: int, nbytes: int, start: int, end: int, pool: str = "transient"
    ) -> None:
        if offset < 0:
            raise VerifyError(f"{label} needs a place in the arena and has none")
        self._slots[pool].append(Slot(nbytes, start, end))
        self._offsets[pool].append(offset)
        self._labels[pool].append(label)

    def chunks(self, k: int, g: GatherDesc) -> None:
        """Chunks of a gather that come from other tiers."""
        world, ready = self._worlds[g.owner], self._at[WaitGather, k]
        for h, hop in enumerate(g.hops):
            last = ready if world > 1 or g.kept else self._at[Release, k]
            last = self._fetched.get((WaitFetch, k, h + 1), last)  # until it has come one step further
            for name, numel, offset in zip(g.names, g.chunk_numels, hop.offsets, strict=True):
                if hop.tier == "nvme" and offset % BLOCK_BYTES:
                    raise VerifyError(
                        f"{g.label}: {name} is read to byte {offset}, no multiple of {BLOCK_BYTES}"
                    )
                size = numel * _itemsize(g.rest_dtype)
                size = block_aligned(size) if hop.tier == "nvme" else size
                label, start = f"{hop.what} of {name}", self._fetched[Fetch, k, h]
                self._use(label, offset, size, start, last, hop.pool)

    def weights(self, k: int, g: GatherDesc) -> None:
        """The full weights of a gather."""
        world = g.host_ranks if g.from_second else self._worlds[g.owner]
        for part, shape in zip(g.parts, g.shapes, strict=False):
            if part and g.tile is None and part * g.host_ranks < math.prod(shape):
                raise VerifyError(f"{g.label}: {g.host_ranks} parts of {part} elements are not all of it")
        for name, shape, numel, offset in zip(g.names, g.shapes, g.chunk_numels, g.offsets, strict=True):
            nbytes = numel * world * _itemsize(g.dtype)
            if math.prod(shape) > numel * world:
                raise VerifyError(
                    f"{g.label}: {name} has {math.prod(shape)} elements, its chunks {numel * world}"
                )
            if g.kept and not g.home:
                place = offset, nbytes
                if self._kept.setdefault(g.owner, {}).setdefault(name, place) != place:
                    raise VerifyError(f"{g.label}: {name} is kept in two places")
            elif not g.home:
                start, end = self._at[Gather, k], self._at[Release, k]
                pool = "slots" if g.shared else "transient"
                self._use(f"{g.label}: {name}", offset, nbytes, start, end, pool)

    def staging(self, k: int, g: GatherDesc) -> None:
        """The buffer in which the parameters of a bucket, or a cast, travel."""
        if g.home or g.shared:
            return
        item, label = _itemsize(g.dtype), f"staging of the {g.label}"
        span = self._at[Gather, k], self._at[WaitGather, k]
        if g.wire:
            # A byte a number, and four for every 256 of a row, from here and from every rank.
            nbytes = 0
            for shape, numel in zip(g.shapes, g.chunk_numels, strict=True):
                row = math.prod(shape[1:])
                nbytes += -(-numel // 4) * 4 + numel // row * -(-row // 256) * 4
            self._use(label, g.staging, nbytes * (self._worlds[g.owner] + 1), *span)
        elif len(g.names) > 1:
            ranks = g.host_ranks if g.from_second else self._worlds[g.owner]
            nbytes = sum(g.chunk_numels) * (ranks + 1) * item
            self._use(label, g.staging, nbytes, *span)
        elif g.staging >= 0:
            self._use(label, g.staging, g.chunk_numels[0] * item, *span)

    def offload(self, k: int, o: OffloadDesc) -> None:
        """A tensor on its way to a file, or back."""
        # What came back to a device has left the pool when the device has been told to wait for it.
        back = WaitRestore if o.staged else Discard
        kinds = (Offload, WaitOffload) if (Offload, k) in self._at else (Restore, back)
        if o.offset % BLOCK_BYTES or o.where % BLOCK_BYTES:
            raise VerifyError(f"{o.label}: lies at no multiple of {BLOCK_BYTES}")
        span = self._at[kinds[0], k], self._at[kinds[1], k]
        self._use(o.label, o.offset, block_aligned(o.nbytes), *span, "host")

    def reduction(self, k: int, r: ReduceDesc, read: Mapping[int, int]) -> None:
        """What a reduction is summed in.

        Args:
            read: for each reduction, the instruction by which peers have read what lies there.
        """
        start = self._at[Reduce, k]
        if r.shared:
            nbytes = sum(math.prod(s) for s in r.shapes) * _itemsize(r.dtype)
            self._use(r.label, r.staging, nbytes, start, read[k], "own")
            return
        if r.staging < 0:
            if len(r.names) > 1 or r.replicated or r.dtype != r.out_dtype:
                raise VerifyError(f"{r.label}: needs a staging area")
            return
        parts = 1 if r.replicated else self._worlds[r.owner] + 1
        nbytes = sum(r.chunk_numels) * _itemsize(r.dtype) * parts
        end = self._at.get((Store, k), self._at[WaitReduce, k])
        self._use(r.label, r.staging, nbytes, start, end)

    def check_pools(self) -> None:
        """Raise where two uses of a pool overlap, or one ends behind it."""
        for pool, nbytes in self._sizes.items():
            wrong = check(self._slots[pool], self._offsets[pool], nbytes)
            if wrong:
                labels = ", ".join(self._labels[pool][:8])
                raise VerifyError(f"planned memory ({pool}): {wrong} (slots {labels}, ...)")

    def check_kept(self, kept_bytes: Mapping[str, int] | None) -> None:
        """The same of kept weights, which never leave their places."""
        for owner, places in self._kept.items():
            end = 0
            for offset, nbytes in sorted(places.values()):
                if offset < end:
                    raise VerifyError(f"kept weights of {owner} overlap at byte {offset}")
                end = offset + nbytes
            if kept_bytes is not None and end > kept_bytes.get(owner, 0):
                raise VerifyError(
                    f"kept weights of {owner} end at byte {end}, and their arena has {kept_bytes.get(owner, 0)}"
                )


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
