"""The reference executor: one Program, N ranks in one process, in lock step. The oracle that tests hold the engine to.

No engine, no process group, no concurrency, and every hazard in the open: arenas are byte buffers with the
planned offsets, so overlapping slots give wrong numbers; a transfer fills its buffers with NaN when it
starts, and writes them when it is waited for; a release fills the weight with NaN, so a late read shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from zero_compiler.errors import TransferError
from zero_compiler.ir.facts import ParamRef
from zero_compiler.ir.instructions import (
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
from zero_compiler.ir.program import Program, outputs_of
from zero_compiler.ir.transfers import GatherDesc, KeepDesc, OffloadDesc, ReduceDesc
from zero_compiler.layout import Layout, second_runs, tiled_rows
from zero_compiler.quantised_blocks import pack, packed_bytes, round_trip, unpack

# All bits set: NaN in every floating dtype, and no likely value in the others.
_POISON = 0xFF


class _Freed:
    """Stands in the value table for what the Program said is read no more."""


_FREED = _Freed()


class Rank:
    """What one simulated rank holds: its chunks at rest and its arenas.

    Args:
        chunks: the flat padded chunk of every parameter, as it lies at rest.
    """

    def __init__(self, chunks: Mapping[ParamRef, torch.Tensor]) -> None:
        self.chunks = dict(chunks)
        self.waiting: dict[
            ParamRef, torch.Tensor
        ] = {}  # full gradients, for the next Program that reduces them
        self._arenas: dict[str, torch.Tensor] = {}
        self.files: dict[tuple[int, int], torch.Tensor] = {}
        self.tickets = 0
        self.second: dict[tuple[ParamRef, int, int], torch.Tensor] = {}  # by elements, and those of a tile
        self.moving: dict[str, int] = {}
        self.copying: dict[str, torch.Tensor] = {}  # to the pool

    def arena(self, pool: str, nbytes: int) -> torch.Tensor:
        """Bytes of a pool ("transient" or "kept"), at least ``nbytes`` of them."""
        have = self._arenas.get(pool)
        if have is None or have.numel() < nbytes:
            new = torch.full((nbytes,), _POISON, dtype=torch.uint8)
            if have is not None:
                new[: have.numel()] = have
            self._arenas[pool] = have = new
        return have


class _Call:
    """One run: the values of every rank, and transfers that were started and are not waited for."""

    def __init__(self, envs: list[list[object]]) -> None:
        self.envs = envs
        self.started: dict[tuple[str, int], Any] = {}

    def start(self, kind: str, index: int, given: object) -> None:
        if (kind, index) in self.started:
            raise TransferError(f"{kind} {index} is started again before its wait")
        self.started[kind, index] = given


class Reference:
    """One loaded Program.

    Args:
        program: what to run.
        segments: callable of each ``Compute.segment``; takes a list that it may empty.
        layouts: layout of every parameter that the Program moves.
        ranks: the ranks, which keep their arenas from one Program to the next.
        copies: how many of them, in turn, hold the same rows: rank ``k`` those of ``k % (len(ranks) / copies)``.
    """

    def __init__(
        self,
        program: Program,
        segments: Sequence[Callable[[list[object]], Sequence[object]]],
        layouts: Mapping[ParamRef, Layout],
        ranks: Sequence[Rank],
        copies: int = 1,
    ) -> None:
        self.program = program
        self.segments = list(segments)
        self.layouts = layouts
        self.ranks = list(ranks)
        self.world, self.copies = len(self.ranks) // copies, copies
        for r in program.reduces:
            if r.copies != copies:
                raise TransferError(
                    f"{r.label} is planned for {r.copies} ranks with the same rows, not {copies}"
                )
        self._tiles: dict[tuple[int, str, str], torch.Tensor] = {}
        if any(g.shared for g in program.gathers) or any(r.shared for r in program.reduces):
            raise TransferError("the reference runs Programs over collectives, not over shared memory")

    def run(self, inputs: Sequence[list[object]]) -> list[list[object]]:
        """Outputs of every rank for the inputs of every rank; each list of inputs is emptied."""
        p = self.program
        envs = [list(given) + [None] * (p.num_values - p.num_inputs) for given in inputs]
        for given in inputs:
            given.clear()
        call = _Call(envs)
        for instr in p.instrs:
            _STEPS.get(type(instr), Reference._read_only)(self, call, instr)
        if call.started:
            left = sorted(call.started)
            raise TransferError(f"the Program ends with transfers that nothing waited for: {left}")
        return [outputs_of(p, functools.partial(_read, env)) for env in envs]

    def _each(self, call: _Call) -> Iterator[tuple[Rank, list[object]]]:
        return zip(self.ranks, call.envs, strict=True)

    def _read_only(self, call: _Call, instr: Instruction) -> None:
        """An instruction that gives no values and moves nothing changes nothing here; but what it reads must be
        there."""
        if instr.writes or instr.starts(self.program) or instr.ends(self.program):
            raise TransferError(f"the reference does not know what a {instr.op!r} does")
        for _, env in self._each(call):
            for i in instr.reads:
                _read(env, i)
            _free(env, instr.frees)

    def _compute(self, call: _Call, instr: Compute) -> None:
        for env in call.envs:
            args = [_read(env, i) for i in instr.ins]
            _free(env, instr.free)
            for i, value in zip(instr.outs, self.segments[instr.segment](args), strict=True):
                env[i] = value

    def _fetch(self, call: _Call, instr: Fetch | WaitFetch) -> None:
        """A hop reads where it comes from until it is done, and then nothing needs that place any more."""
        g = self.program.gathers[instr.index]
        for rank in self.ranks:
            sources, slots = self._chunks(rank, g, instr.hop - 1), self._chunks(rank, g, instr.hop)
            for source, slot in zip(sources, slots, strict=True):
                if isinstance(instr, Fetch):
                    slot.view(torch.uint8).fill_(_POISON)
                    continue
                slot.copy_(source)
                if instr.hop:
                    source.view(torch.uint8).fill_(_POISON)

    def _gather(self, call: _Call, instr: Gather) -> None:
        call.start("gather", instr.index, self._gather_start(self.program.gathers[instr.index]))

    def _wait_gather(self, call: _Call, instr: WaitGather) -> None:
        inputs_of = call.started.pop(("gather", instr.index))
        g = self.program.gathers[instr.index]
        ranks = g.ranks(self.world)
        for k, (rank, env) in enumerate(self._each(call)):
            sent = inputs_of[k - k % ranks :][:ranks]
            _write(env, instr.outs, self._gather_end(rank, g, sent))

    def _keep_part(self, call: _Call, instr: KeepPart) -> None:
        """From the slots, where the weights must still be."""
        g = self.program.gathers[instr.index]
        tiles = g.part_tiles or (0,) * len(g.names)
        for k, rank in enumerate(self.ranks):
            slots = zip(self._slots(rank, g), g.shapes, g.parts, g.chunk_numels, tiles, strict=True)
            for second, (slot, shape, part, chunk, tile) in zip(self._second(rank, g), slots, strict=True):
                flat = slot.view(_dtype(g.dtype))[: _numel(shape)]
                second.zero_()  # padding is zeros, as it is in chunks
                for to, begin, size in second_runs(flat.numel(), part, k % g.host_ranks, chunk, tile):
                    second[to : to + size] = flat[begin : begin + size]

    def _second(self, rank: Rank, g: GatherDesc) -> list[torch.Tensor]:
        """Of each weight, the second shard of a rank, or the part of it that a tile has."""
        out = []
        parts = g.parts or g.chunk_numels
        for name, part, chunk, tile in zip(g.names, parts, g.chunk_numels, g.second_tiles, strict=True):
            hosts = part // chunk if g.parts else 1
            begin, numel = (g.tile.begin * hosts, g.tile.numel * hosts) if g.tile else (0, part)
            key = ParamRef(g.owner, name), numel, tile
            if key not in rank.second:
                if g.from_second:
                    raise TransferError(f"{g.label}: no forward has kept a part of {name!r}")
                rank.second[key] = torch.full((numel,), torch.nan).to(_dtype(g.dtype))
            out.append(rank.second[key][begin : begin + part])
        return out

    def _release(self, call: _Call, instr: Release) -> None:
        for rank, env in self._each(call):
            for slot in self._slots(rank, self.program.gathers[instr.index]):
                slot.fill_(_POISON)
            _free(env, instr.values)

    def _keep(self, call: _Call, instr: Keep) -> None:
        for rank, env in self._each(call):
            self._add_to_waiting(rank, self.program.keeps[instr.index], [_read(env, i) for i in instr.ins])
            _free(env, instr.free)

    def _reduce(self, call: _Call, instr: Reduce) -> None:
        r, given = self.program.reduces[instr.index], []
        for k, (rank, env) in enumerate(self._each(call)):
            grads = self._with_waiting(rank, r, [_read(env, i) for i in instr.ins])
            given.append(self._reduce_start(k, r, grads))
        call.start("reduce", instr.index, given)
        for env in call.envs:
            _free(env, instr.free)

    def _store(self, call: _Call, instr: Store) -> None:
        r = self.program.reduces[instr.index]
        call.start("store", instr.index, self._reduced(r, call.started.pop(("reduce", instr.index))))

    def _wait_reduce(self, call: _Call, instr: WaitReduce) -> None:
        r = self.program.reduces[instr.index]
        if r.copied:
            ends = call.started.pop(("store", instr.index))
        else:
            ends = self._reduced(r, call.started.pop(("reduce", instr.index)))
        for env, end in zip(call.envs, ends, strict=True):
            _write(env, instr.outs, end)

    # Gathers -----------------------------------------------------------------------------------------------

    def _slots(self, rank: Rank, g: GatherDesc) -> list[torch.Tensor]:
        """Bytes of the full weights of a gather in the arena of a rank, padding included."""
        item = _dtype(g.dtype).itemsize
        sizes = [c * g.ranks(self.world) * item for c in g.chunk_numels]
        ends = max((o + s for o, s in zip(g.offsets, sizes, strict=True)), default=0)
        arena = rank.arena("kept " + g.owner if g.kept else "transient", max(ends, self._need(g)))
        return [arena[o : o + s] for o, s in zip(g.offsets, sizes, strict=True)]

    def _need(self, g: GatherDesc) -> int:
        return 0 if g.kept else self.program.transient_bytes

    def _chunks_staged(self, rank: Rank, g: GatherDesc) -> torch.Tensor | None:
        """Staging of the rank's own chunks, or None where they are sent from where they lie."""
        if g.staging < 0:
            return None
        return rank.arena("transient", self.program.transient_bytes)[g.staging : g.staging + g.sent_bytes]

    def _chunks(self, rank: Rank, g: GatherDesc, hop: int) -> list[torch.Tensor]:
        """The chunks of a rank where hop ``hop`` has brought them; -1: where they rest."""
        if g.from_second:
            return self._second(rank, g)
        if hop < 0:
            rest = [rank.chunks[ParamRef(g.owner, n)] for n in g.names]
            return [c[g.begin : g.begin + g.chunk_numels[0]] for c in rest] if g.tile is not None else rest
        sizes = {"host": self.program.host_bytes, "device": self.program.device_bytes}
        step, dtype = g.hops[hop], _dtype(g.rest_dtype)
        pool = rank.arena(step.pool, sizes[step.pool])
        ends = [o + n * dtype.itemsize for o, n in zip(step.offsets, g.chunk_numels, strict=True)]
        return [pool[o:end].view(dtype) for o, end in zip(step.offsets, ends, strict=True)]

    def _gather_start(self, g: GatherDesc) -> list[torch.Tensor]:
        """For each rank, its chunks one after the other in the dtype of the gather."""
        sent = []
        for rank in self.ranks:
            for slot in self._slots(rank, g):
                slot.fill_(_POISON)
            chunks = self._chunks(rank, g, len(g.hops) - 1)
            for name, chunk, numel in zip(g.names, chunks, g.chunk_numels, strict=True):
                if chunk.numel() != numel:
                    raise TransferError(
                        f"{g.label}: the chunk of {name!r} has {chunk.numel()} elements, not {numel}"
                    )
            if g.wire:
                wire = _dtype(g.wire)
                flat = torch.cat([pack(c, row, wire) for c, row in zip(chunks, g.row_numels, strict=True)])
            else:
                flat = torch.cat([c.to(_dtype(g.dtype)) for c in chunks])
            staged = self._chunks_staged(rank, g)
            if staged is not None:
                if g.wire or len(g.names) > 1:
                    arena = rank.arena("transient", self.program.transient_bytes)
                    staging = staged.numel() * (g.ranks(self.world) + 1)
                    arena[g.staging : g.staging + staging].fill_(_POISON)
                flat = staged.view(flat.dtype).copy_(flat)
            sent.append(flat)
        return sent

    def _gather_end(self, rank: Rank, g: GatherDesc, sent: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        out, at = [], 0
        for slot, numel, shape in zip(self._slots(rank, g), g.chunk_numels, g.shapes, strict=True):
            full = slot.view(_dtype(g.dtype))
            if g.wire:
                row = _numel(shape[1:])
                nbytes = packed_bytes(numel, row)
                for part, s in zip(full.split(numel), sent, strict=True):
                    unpack(s[at : at + nbytes], numel, row, _dtype(g.wire), part)
                at += nbytes
            else:
                full.copy_(torch.cat([s[at : at + numel] for s in sent]))
                at += numel
            out.append(full[: _numel(shape)].view(shape))
        return out

    # Activations. Other tiers are a dictionary by ticket and place. A file is written when the wait is over, and so
    # read. A copy to the pool is there when it is sent on, and one from it when it has been waited for.

    def _activation(self, rank: Rank, instr: Instruction) -> tuple[OffloadDesc, torch.Tensor, torch.Tensor]:
        """An offloaded tensor, the bytes that it has on its way, and the same as the tensor that it is."""
        o = self.program.offloads[instr.index]
        if o.pooled:
            raw = rank.arena("host", self.program.host_bytes)[o.offset : o.offset + o.nbytes]
        else:
            raw = torch.empty(o.nbytes, dtype=torch.uint8)
        return o, raw, raw.view(_dtype(o.dtype)).as_strided(o.shape, o.stride)

    def _offload(self, call: _Call, instr: Offload) -> None:
        for rank, env in self._each(call):
            o, raw, slot = self._activation(rank, instr)
            value = _read(env, instr.ins[0])
            rank.tickets += 1
            env[instr.outs[0]] = torch.tensor([rank.tickets])
            rank.moving[o.name] = rank.tickets
            if o.staged:
                raw.fill_(_POISON)
                rank.copying[o.name] = value
            else:
                slot.copy_(value)
            if not o.pooled:
                rank.files[rank.tickets, o.where] = raw
            _free(env, instr.free)

    def _send_on(self, call: _Call, instr: Write) -> None:
        for rank in self.ranks:
            o, _, slot = self._activation(rank, instr)
            slot.copy_(rank.copying.pop(o.name))

    def _wait_offload(self, call: _Call, instr: WaitOffload) -> None:
        for rank in self.ranks:
            o, raw, _ = self._activation(rank, instr)
            key = rank.moving.pop(o.name), o.where
            if o.pooled:
                rank.files[key] = raw.clone()
                raw.fill_(_POISON)

    def _restore(self, call: _Call, instr: Restore) -> None:
        for rank, env in self._each(call):
            o, raw, _ = self._activation(rank, instr)
            raw.fill_(_POISON)
            rank.moving[o.name] = int(_read(env, instr.ins[0]))

    def _bring(self, call: _Call, instr: Bring) -> None:
        for rank in self.ranks:
            o, raw, _ = self._activation(rank, instr)
            raw.copy_(rank.files[rank.moving.pop(o.name), o.where])

    def _wait_restore(self, call: _Call, instr: WaitRestore) -> None:
        for rank, env in self._each(call):
            o, raw, slot = self._activation(rank, instr)
            if o.staged:
                env[instr.outs[0]] = slot.clone()
                raw.fill_(_POISON)
            else:
                raw.copy_(rank.files[rank.moving.pop(o.name), o.where])
                env[instr.outs[0]] = slot

    def _discard(self, call: _Call, instr: Discard) -> None:
        for rank, env in self._each(call):
            o, raw, _ = self._activation(rank, instr)
            if not o.staged:
                raw.fill_(_POISON)
            _free(env, instr.values)

    # Reductions --------------------------------------------------------------------------------------------

    def _staging(self, rank: Rank, r: ReduceDesc) -> torch.Tensor:
        """Bytes of the staged gradients of a reduction: rank-major chunks, or the whole where replicated."""
        item = _dtype(r.dtype).itemsize
        nbytes = sum(r.chunk_numels) * item * (1 if r.replicated else self.world)
        return rank.arena("transient", self.program.transient_bytes)[r.staging : r.staging + nbytes]

    def _rows(self, desc: KeepDesc | ReduceDesc, name: str, grad: torch.Tensor) -> list[tuple[Any, Any]]:
        """Which part of a full gradient is which of the one that is given."""
        if desc.tile is None:
            return [(..., ...)]
        return tiled_rows(self.layouts[ParamRef(desc.owner, name)], desc.tile.begin, grad.shape[0])

    def _add_to_waiting(self, rank: Rank, keep: KeepDesc, given: Sequence[torch.Tensor]) -> None:
        for name, grad in zip(keep.names, given, strict=True):
            ref = ParamRef(keep.owner, name)
            if ref not in rank.waiting:
                rank.waiting[ref] = torch.zeros(self.layouts[ref].shape, dtype=_dtype(keep.dtype))
            for theirs, ours in self._rows(keep, name, grad):
                rank.waiting[ref][theirs] += grad[ours].to(_dtype(keep.dtype))

    def _with_waiting(
        self, rank: Rank, r: ReduceDesc, given: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Gradients with what has waited for them, which waits no more."""
        out = []
        for name, grad in zip(r.names, given, strict=True):
            ref = ParamRef(r.owner, name)
            if (full := rank.waiting.get(ref)) is not None:
                rows = self._rows(r, name, grad)
                grad = grad.to(_dtype(r.dtype), copy=True)
                for theirs, ours in rows:
                    grad[ours] += full[theirs]
                if r.tile is None or r.tile.last:
                    del rank.waiting[ref]
            out.append(grad)
        return out

    def _reduce_start(self, k: int, r: ReduceDesc, given: Sequence[torch.Tensor]) -> torch.Tensor:
        dtype = _dtype(r.dtype)
        for name, grad, shape in zip(r.names, given, r.shapes, strict=True):
            if tuple(grad.shape) != shape and not r.replicated:
                raise TransferError(
                    f"{r.label}: the gradient of {name!r} has shape {tuple(grad.shape)}, not {shape}"
                )
        whole = [g.reshape(-1).to(dtype) for g in given]
        if r.replicated:
            flat = torch.cat(whole)
        else:
            first, lone = given[0], len(given) == 1
            if (
                lone
                and first.is_contiguous()
                and first.dtype == dtype
                and first.numel() == self.world * r.chunk_numels[0]
            ):
                return first.view(
                    -1
                )  # sent from where it lies: whoever writes to it before the wait spoils it
            rows = []
            for owner in range(self.world):
                for grad, numel in zip(whole, r.chunk_numels, strict=True):
                    part = grad[owner * numel : (owner + 1) * numel]
                    rows.append(torch.nn.functional.pad(part, (0, numel - part.numel())))
            flat = torch.cat(rows)
        if r.staging < 0:
            raise TransferError(
                f"{r.label}: the plan has no staging, but this gradient cannot be sent as it lies"
            )
        return self._staging(self.ranks[k], r).view(dtype).copy_(flat)

    def _reduce_end(self, k: int, r: ReduceDesc, sent: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        total = sum(r.chunk_numels)
        low = 0 if r.replicated else k * total
        sums = []
        for copy in range(self.copies):
            given = [s[low : low + total] for s in sent[copy * self.world : (copy + 1) * self.world]]
            sums.append(_summed(given) if not r.wire else self._summed_between_hosts(k, r, given))
        mean = sums[0]
        for other in sums[1:]:
            mean += other
        if len(self.ranks) > 1:
            mean /= len(self.ranks)
        out, at = [], 0
        for name, numel, shape in zip(r.names, r.chunk_numels, r.shapes, strict=True):
            part = mean[at : at + numel].to(_dtype(r.out_dtype), copy=True)
            layout = self.layouts[ParamRef(r.owner, name)]
            if r.tile is not None:
                part = self._with_tiles(k, r, layout, part)
            rows = layout.local_shape(k) if layout.sharded else shape
            out.append(part[: _numel(rows)].view(rows))
            at += numel
        return out

    def _summed_between_hosts(self, k: int, r: ReduceDesc, given: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum over this rank's host, and to it, in float32, those of the other hosts as they arrive."""
        ranks = self.world // r.hosts
        by_host = [_summed(given[at : at + ranks]) for at in range(0, self.world, ranks)]
        wide = by_host[k // ranks].float()
        for host, there in enumerate(by_host):
            if host != k // ranks:
                arrived = [
                    round_trip(part.view(1, -1), _dtype(r.wire), torch.float32).view(-1)
                    for part in there.split(list(r.chunk_numels))
                ]
                wide += torch.cat(arrived)
        return wide.to(_dtype(r.dtype))

    def _reduced(self, r: ReduceDesc, inputs_of: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """What a reduction gives each rank; its staging is free from then on."""
        ends = [self._reduce_end(k % self.world, r, inputs_of) for k in range(len(self.ranks))]
        for rank in self.ranks if r.staging >= 0 else ():
            self._staging(rank, r).fill_(_POISON)
        return ends

    def _with_tiles(self, k: int, r: ReduceDesc, layout: Layout, part: torch.Tensor) -> torch.Tensor:
        """The chunk of rank ``k`` with the tiles of its gradient that have landed so far; NaN for the others."""
        assert r.tile is not None
        whole = self._tiles.setdefault(
            (k, r.owner, r.names[0]), torch.full((layout.chunk_numel,), torch.nan, dtype=part.dtype)
        )
        whole[r.tile.begin : r.tile.begin + part.numel()] = part
        return self._tiles.pop((k, r.owner, r.names[0])) if r.tile.last else whole


_STEPS: dict[type, Callable[[Reference, _Call, Any], None]] = {
    Compute: Reference._compute,
    Fetch: Reference._fetch,
    WaitFetch: Reference._fetch,
    Gather: Reference._gather,
    WaitGather: Reference._wait_gather,
    KeepPart: Reference._keep_part,
    Release: Reference._release,
    Reduce: Reference._reduce,
    Store: Reference._store,
    WaitReduce: Reference._wait_reduce,
    Keep: Reference._keep,
    Offload: Reference._offload,
    Write: Reference._send_on,
    WaitOffload: Reference._wait_offload,
    Restore: Reference._restore,
    Bring: Reference._bring,
    WaitRestore: Reference._wait_restore,
    Discard: Reference._discard,
}


def _read(env: list[object], i: int) -> Any:
    if env[i] is _FREED:
        raise TransferError(f"value {i} is read after the instruction that freed it")
    return env[i]


def _free(env: list[object], values: Sequence[int]) -> None:
    for i in values:
        if i >= 0:
            env[i] = _FREED


def _write(env: list[object], outs: Sequence[int], values: Sequence[object]) -> None:
    for i, value in zip(outs, values, strict=True):
        if i >= 0:
            env[i] = value


def _summed(given: Sequence[torch.Tensor]) -> torch.Tensor:
    total = given[0].clone()
    for other in given[1:]:
        total += other
    return total


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def _numel(shape: Sequence[int]) -> int:
    n = 1
    for s in shape:
        n *= s
    return n
