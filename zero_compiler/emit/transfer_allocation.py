"""Offsets for what transfers need: gathered weights, staging, and chunks from other tiers, one arena per pool."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..alignment import arena_aligned, block_aligned
from ..errors import VerifyError
from ..ir import facts, ops
from ..ir.facts import Away, ParamRef, Tile
from ..ir.transfers import GatherDesc, Hop, OffloadDesc, Part, ReduceDesc
from ..memory.arena import Slot, check, pack
from ..passes.base import ParamPlan
from ..quantised_blocks import packed_bytes
from .prefetch_hops import Fetches

# Gather buffers and staging of this rank; buffers that ranks share, and staging that peers read; pinned memory on the
# host, and chunks that come to the device from other tiers.
POOLS = ("transient", "slots", "own", "host", "device")


@dataclass
class GatherSpan:
    """A gather of the graph, and the instructions where it starts, is ready, and is released (None: it is kept). Of the
    weights ``parted`` a part stays for backward."""

    node: fx.Node
    start: int
    ready: int
    end: int | None = None
    parted: frozenset[ParamRef] = frozenset()


@dataclass
class ReduceSpan:
    """A reduction of the graph, and the instructions where it starts and ends."""

    node: fx.Node
    start: int
    end: int


@dataclass
class OffloadSpan:
    """A tensor that goes to another tier or comes back, ``where`` bytes behind the begin of all that do, and the
    instructions between which it takes a place in a pool."""

    away: Away
    where: int
    value: fx.node.Argument
    start: int
    end: int = -1


@dataclass(frozen=True)
class Allocation:
    """Descriptions of all transfers of a Program, with their offsets, and the bytes of each pool."""

    gathers: list[GatherDesc]
    reduces: list[ReduceDesc]
    offloads: list[OffloadDesc]
    pool_bytes: dict[str, int]


def allocate_transfers(
    gathers: Sequence[GatherSpan],
    reduces: Sequence[ReduceSpan],
    offloads: Sequence[OffloadSpan],
    params: Mapping[ParamRef, ParamPlan],
    kept_offsets: Mapping[str, dict[str, int]],
    end: int,
    fetches: Fetches,
) -> Allocation:
    """Give every transfer the place that it needs, in one arena per pool.

    Args:
        kept_offsets: for each owner, offsets of kept weights by name, and bytes of second shards; grown here.
        end: number of instructions.
        fetches: when chunks of a gather come from other tiers.
    """
    pools = _PoolNeeds()
    bundles = [_Bundle.of(g.node, params) for g in gathers]
    for k, (g, bundle) in enumerate(zip(gathers, bundles, strict=True)):
        _need_for_hops(pools, k, g, bundle, fetches)
        if bundle.kept and not bundle.home:
            _keep(bundle, kept_offsets)
        elif not bundle.home:
            _need_for_weights(pools, k, g, bundle, end)
        _need_for_gather_staging(pools, k, g, bundle)
        _keep_parts(bundle, g.parted, kept_offsets)
    summed = [_Bundle.of(r.node, params) for r in reduces]
    read_by_all = _read_by_all([(r.start, r.end) for r in reduces], end)
    for k, (r, bundle) in enumerate(zip(reduces, summed, strict=True)):
        _need_for_reduction(pools, k, r, bundle, read_by_all[k])
    for k, o in enumerate(offloads):
        if o.away.tier == "nvme":  # by way of the pool
            pools.need("host", ("offload", k, 0), block_aligned(facts.bytes_of(o.value)), o.start, o.end)
    at, pool_bytes = pools.packed()
    return Allocation(
        [_gather_desc(k, bundle, kept_offsets, at, gathers[k].parted) for k, bundle in enumerate(bundles)],
        [_reduce_desc(k, bundle, at) for k, bundle in enumerate(summed)],
        [_offload_desc(o, at.get(("offload", k, 0), -1)) for k, o in enumerate(offloads)],
        pool_bytes,
    )


# What has a place in a pool: its kind, the number of the transfer, and which of the transfer's parameters it is of.
_Key = tuple[str, int, int]


class _PoolNeeds:
    """What is to lie in each pool, from when to when."""

    def __init__(self) -> None:
        self._slots: dict[str, list[Slot]] = {pool: [] for pool in POOLS}
        self._keys: dict[str, list[_Key]] = {pool: [] for pool in POOLS}

    def need(self, pool: str, key: _Key, nbytes: int, start: int, end: int) -> None:
        self._keys[pool].append(key)
        self._slots[pool].append(Slot(nbytes, start, end))

    def packed(self) -> tuple[dict[_Key, int], dict[str, int]]:
        """The offset of everything, and the bytes of each pool.

        Raises:
            VerifyError: two of them overlap.
        """
        at: dict[_Key, int] = {}
        pool_bytes: dict[str, int] = {}
        for pool, wanted in self._slots.items():
            offsets, pool_bytes[pool] = pack(wanted)
            wrong = check(wanted, offsets, pool_bytes[pool])
            if wrong:
                raise VerifyError(f"planned memory: {wrong}")
            at |= zip(self._keys[pool], offsets, strict=True)
        return at, pool_bytes


@dataclass(frozen=True)
class _Bundle:
    """The parameters that one transfer moves, with the elements that every rank has of each. They share their dtypes,
    their ranks, and where they rest."""

    node: fx.Node
    plans: list[ParamPlan]
    chunks: list[int]
    tile: Tile | None
    part: Part | None  # that the tile is, of each rank's chunk
    host_ranks: int = 0  # among which it is, where it is one of second shards

    @staticmethod
    def of(node: fx.Node, params: Mapping[ParamRef, ParamPlan]) -> _Bundle:
        plans, tile = [params[ref] for ref in facts.params(node)], facts.tile(node)
        if node.target is not ops.gather or not facts.over_host(node):
            return _Bundle(node, plans, [_chunk(p, tile) for p in plans], tile, _part(tile, plans[0]))
        first, part = plans[0], None
        if tile is not None:  # the same rows: those of several ranks' chunks are in one rank's second shard
            hosts, row = first.world // first.second, first.numel // first.shape[0]
            part = Part(tile.begin * hosts * row, tile.index, tile.of, first.second_numel)
            tile = Tile(tile.begin * hosts, tile.rows * hosts, tile.index, tile.of)
        within = [p.within_host for p in plans]
        return _Bundle(node, within, [_chunk(p, tile) for p in within], tile, part, first.second)

    @property
    def first(self) -> Any:
        return self.plans[0]

    @property
    def kept(self) -> bool:
        return not self.first.released

    @property
    def home(self) -> bool:
        """Whether all of it is read where it lies at rest."""
        return all(p.home for p in self.plans)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(_shape(p, self.tile) for p in self.plans)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(p.ref.name for p in self.plans)

    @property
    def unit(self) -> str:
        return facts.unit(self.node).split(":", 1)[-1]


def _need_for_hops(pools: _PoolNeeds, k: int, g: GatherSpan, bundle: _Bundle, fetches: Fetches) -> None:
    for hop, (_, pool) in enumerate(_hops(bundle.first)):
        # It lies there until it has come one step further. One rank computes with what has arrived, where it lies.
        last = fetches.waits.get((k, hop + 1))
        if last is None:
            last = g.ready if bundle.first.world > 1 or g.end is None else g.end
        for m, (p, chunk) in enumerate(zip(bundle.plans, bundle.chunks, strict=True)):
            nbytes = chunk * p.dtype.itemsize
            nbytes = block_aligned(nbytes) if pool == "host" else nbytes
            pools.need(pool, (f"fetch {hop}", k, m), nbytes, fetches.starts[k, hop], last)


def _keep_parts(
    bundle: _Bundle, parted: frozenset[ParamRef], kept_offsets: Mapping[str, dict[str, int]]
) -> None:
    """Second shards have memory of their own, from the first forward on. A weight that stays gathered has none,
    whatever was planned before that was decided."""
    for p in bundle.plans:
        if p.ref in parted:
            nbytes = p.second_numel * p.gather_dtype.itemsize
            kept_offsets[p.ref.owner][_second(p)] = nbytes
        elif bundle.kept:
            table = kept_offsets[p.ref.owner]
            for key in [k for k in table if k.startswith(f"{_SECOND}{p.ref.name} ")]:
                del table[key]


def _second(plan: ParamPlan) -> str:
    """A second shard's place in the table of its owner: there is one of each dtype and each size of tiles."""
    return f"{_SECOND}{plan.ref.name} {plan.gather_dtype} {plan.tile_rows}"


def _keep(bundle: _Bundle, kept_offsets: Mapping[str, dict[str, int]]) -> None:
    item = bundle.first.gather_dtype.itemsize
    for p, chunk in zip(bundle.plans, bundle.chunks, strict=True):
        table = kept_offsets[p.ref.owner]
        if p.ref.name not in table:
            table[p.ref.name] = table.get(_KEPT_END, 0)
            table[_KEPT_END] = table[p.ref.name] + arena_aligned(chunk * p.world * item)


def _need_for_weights(pools: _PoolNeeds, k: int, g: GatherSpan, bundle: _Bundle, end: int) -> None:
    pool, item = "slots" if bundle.first.shared else "transient", bundle.first.gather_dtype.itemsize
    last = g.end if g.end is not None else end
    for m, (p, chunk) in enumerate(zip(bundle.plans, bundle.chunks, strict=True)):
        pools.need(pool, ("gather", k, m), chunk * p.world * item, g.start, last)


def _need_for_gather_staging(pools: _PoolNeeds, k: int, g: GatherSpan, bundle: _Bundle) -> None:
    first = bundle.first
    if first.wire is not None:
        sent = sum(
            packed_bytes(c, math.prod(s[1:])) for c, s in zip(bundle.chunks, bundle.shapes, strict=True)
        )
        pools.need("transient", ("gather_staging", k, 0), sent * (first.world + 1), g.start, g.ready)
        return
    several, cast = len(bundle.plans) > 1, first.gather_dtype != first.dtype
    if bundle.home or first.shared or not (several or cast):
        return
    total = sum(bundle.chunks) * first.gather_dtype.itemsize
    nbytes = total * (first.world + 1) if several else total
    pools.need("transient", ("gather_staging", k, 0), nbytes, g.start, g.ready)


def _need_for_reduction(pools: _PoolNeeds, k: int, r: ReduceSpan, bundle: _Bundle, read_by_all: int) -> None:
    first, item = bundle.first, bundle.first.reduce_dtype.itemsize
    if first.shared:
        numel = sum(map(math.prod, bundle.shapes))
        pools.need("own", ("reduce", k, 0), numel * item, r.start, read_by_all)
    elif not _from_where_it_lies(bundle.node, bundle.plans):
        chunks, world = sum(bundle.chunks), first.world if first.sharded else 1
        nbytes = arena_aligned(chunks * world * item) + (chunks * item if first.sharded else 0)
        pools.need("transient", ("reduce", k, 0), nbytes, r.start, r.end)


def _gather_desc(
    k: int,
    bundle: _Bundle,
    kept_offsets: Mapping[str, dict[str, int]],
    at: Mapping[_Key, int],
    parted: frozenset[ParamRef],
) -> GatherDesc:
    first, numbers = bundle.first, range(len(bundle.plans))
    parts = (
        tuple(_kept_part(p, bundle.tile) if p.ref in parted else 0 for p in bundle.plans) if parted else ()
    )
    if bundle.home:
        offsets = [-1 for _ in numbers]
    elif bundle.kept:
        offsets = [kept_offsets[p.ref.owner][p.ref.name] for p in bundle.plans]
    else:
        offsets = [at["gather", k, m] for m in numbers]
    return GatherDesc(
        owner=first.ref.owner,
        names=bundle.names,
        shapes=bundle.shapes,
        chunk_numels=tuple(bundle.chunks),
        dtype=_dtype_text(first.gather_dtype),
        kept=bundle.kept,
        offsets=tuple(offsets),
        staging=at.get(("gather_staging", k, 0), -1),
        unit=bundle.unit,
        home=bundle.home,
        shared=first.shared,
        hops=tuple(
            Hop(tier, pool, tuple(at[f"fetch {hop}", k, m] for m in numbers))
            for hop, (tier, pool) in enumerate(_hops(first))
        ),
        rest_dtype=_dtype_text(first.dtype),
        tile=bundle.part,
        wire="" if first.wire is None else _dtype_text(first.wire),
        host_ranks=first.second if parted else bundle.host_ranks,
        parts=parts,
        part_tiles=_part_tiles(bundle) if parted else (),
        second_tiles=_tile_numels(bundle) if parted or bundle.host_ranks else (),
    )


def _reduce_desc(k: int, bundle: _Bundle, at: Mapping[_Key, int]) -> ReduceDesc:
    first = bundle.first
    return ReduceDesc(
        owner=first.ref.owner,
        names=bundle.names,
        shapes=bundle.shapes,
        chunk_numels=tuple(bundle.chunks),
        dtype=_dtype_text(first.reduce_dtype),
        out_dtype=_dtype_text(first.dtype),
        replicated=not first.sharded,
        staging=at.get(("reduce", k, 0), -1),
        unit=bundle.unit,
        shared=first.shared,
        tiers=first.grad_path,
        copies=first.copies,
        tile=bundle.part,
        grad_dtype=_dtype_text(first.gather_dtype),
        direct=facts.direct(bundle.node),
        wire="" if first.sum_wire is None else _dtype_text(first.sum_wire),
        hosts=first.sum_hosts,
    )


def _offload_desc(o: OffloadSpan, offset: int) -> OffloadDesc:
    return OffloadDesc(
        name=o.away.name,
        module=o.away.module,
        tiers=o.away.tiers,
        shape=tuple(map(int, o.value.shape)),
        stride=tuple(map(int, o.value.stride())),
        dtype=_dtype_text(o.value.dtype),
        where=o.where,
        offset=offset,
    )


def _hops(plan: ParamPlan) -> list[tuple[str, str]]:
    """The tiers that chunks leave on their way to the device, and the pools to which they come."""
    return [(tier, "host" if tier == "nvme" else "device") for tier in plan.path]


def _read_by_all(spans: Sequence[tuple[int, int]], end: int) -> list[int]:
    """For each reduction in shared memory, the instruction after which no peer reads its slot any more.

    A peer has read it when its own wait is over. This rank knows when it has waited for one that every peer starts
    later than that.

    Args:
        spans: start and wait of each, in the order of their starts.
    """
    out = []
    starts = [start for start, _ in spans]
    # The earliest wait among a reduction and those that start after it.
    first_wait = [end] * (len(spans) + 1)
    for k in range(len(spans) - 1, -1, -1):
        first_wait[k] = min(spans[k][1], first_wait[k + 1])
    for _, wait in spans:
        out.append(first_wait[bisect_right(starts, wait)])
    return out


# The end of a kept arena stands in its table of offsets under a name that no parameter has; so do the bytes of second
# shards, which lie in memory of their own.
_KEPT_END = ""
_SECOND = "second shard of "


def kept_ends(kept_offsets: Mapping[str, dict[str, int]]) -> dict[str, int]:
    """Bytes of the kept arena of each owner."""
    return {owner: table.get(_KEPT_END, 0) for owner, table in kept_offsets.items()}


def kept_bytes(kept_offsets: Mapping[str, dict[str, int]]) -> int:
    """Bytes of all kept arenas, and of second shards."""
    second = (n for table in kept_offsets.values() for name, n in table.items() if name.startswith(_SECOND))
    return sum(kept_ends(kept_offsets).values()) + sum(second)


def _from_where_it_lies(node: fx.Node, plans: Sequence[ParamPlan]) -> bool:
    """True for a lone gradient that the engine reduces with no copy before or after: whole chunks of rows, one
    piece of memory, and the dtype of the arithmetic is that of the gradient and of the result."""
    plan, grad = plans[0], facts.value(node.args[0][0])
    return (
        len(plans) == 1
        and plan.sharded
        and (facts.tile(node) is not None or plan.shape[0] % plan.world == 0)
        and plan.reduce_dtype == plan.dtype == grad.dtype
        and grad.is_contiguous()
    )


def _chunk(plan: ParamPlan, tile: Tile | None) -> int:
    """Elements that every rank has of what is moved."""
    if not plan.sharded:
        return int(plan.numel)
    rows = plan.chunk_rows if tile is None else tile.rows
    return rows * (plan.numel // plan.shape[0])


def _shape(plan: ParamPlan, tile: Tile | None) -> tuple[int, ...]:
    """Of what is moved, from all ranks together."""
    return plan.shape if tile is None else (plan.world * tile.rows, *plan.shape[1:])


def _kept_part(plan: ParamPlan, tile: Tile | None) -> int:
    """Elements of what is gathered that this rank keeps."""
    if tile is None:
        return plan.second_numel
    return plan.world // plan.second * tile.rows * (plan.numel // plan.shape[0])


def _part_tiles(bundle: _Bundle) -> tuple[int, ...]:
    """Of weights that are gathered whole, and by backward in tiles, the elements of a chunk in a tile; () of others."""
    return (
        () if bundle.tile is not None or not any(p.tile_rows for p in bundle.plans) else _tile_numels(bundle)
    )


def _tile_numels(bundle: _Bundle) -> tuple[int, ...]:
    return tuple(p.tile_rows * (p.numel // p.shape[0]) for p in bundle.plans)


def _part(tile: Tile | None, plan: ParamPlan) -> Part | None:
    if tile is None:
        return None
    row = plan.numel // plan.shape[0]
    return Part(tile.begin * row, tile.index, tile.of, plan.chunk_rows * row)


def _dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
