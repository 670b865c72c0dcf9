"""Offsets for what transfers need: gathered weights, staging, and chunks from other tiers, one arena per pool."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..alignment import arena_aligned, block_aligned
from ..errors import VerifyError
from ..ir import facts
from ..ir.facts import ParamRef, Tile
from ..ir.program import GatherDesc, Hop, OffloadDesc, Part, ReduceDesc
from ..memory.arena import Slot, check, pack
from .prefetch_hops import Fetches


def plan_slots(
    gathers: list[dict[str, Any]],
    reduces: list[dict[str, Any]],
    params: Mapping[ParamRef, Any],
    kept_offsets: Mapping[str, dict[str, int]],
    end: int,
    fetches: Fetches,
    offloads: Sequence[dict[str, Any]] = (),
) -> tuple[list[GatherDesc], list[ReduceDesc], list[OffloadDesc], dict[str, int]]:
    """Descriptions of all transfers, with their offsets, and the size of each arena.

    Args:
        gathers, reduces: of each, its node, the instructions where it starts and ends, and for a gather where it is
            ready.
        end: number of instructions.
        fetches: when chunks of a gather come from other tiers.
    """
    slots: dict[str, list[Slot]] = {"transient": [], "slots": [], "own": [], "host": [], "device": []}
    where: dict[str, list[tuple[str, int, int]]] = {pool: [] for pool in slots}
    gather_rows, reduce_rows = [], []

    def need(pool: str, key: tuple[str, int, int], slot: Slot) -> None:
        where[pool].append(key)
        slots[pool].append(slot)

    for k, g in enumerate(gathers):
        node = g["node"]
        plans = [params[r] for r in facts.params(node)]
        item = plans[0].gather_dtype.itemsize
        chunks = [_chunk(p, facts.tile(node)) for p in plans]
        kept, shared = not plans[0].released, plans[0].shared
        home = all(p.home for p in plans)
        gather_rows.append((node, plans, chunks, kept, home))
        for hop, (_, pool) in enumerate(_hops(plans[0])):
            # It lies there until it has come one step further. One rank computes with what has arrived, where it lies.
            last = fetches.waits.get((k, hop + 1))
            if last is None:
                last = g["ready"] if plans[0].world > 1 or g["end"] is None else g["end"]
            for m, (p, chunk) in enumerate(zip(plans, chunks, strict=True)):
                size = block_aligned(chunk * p.dtype.itemsize) if pool == "host" else chunk * p.dtype.itemsize
                need(pool, (f"fetch {hop}", k, m), Slot(size, fetches.starts[k, hop], last))
        if home:
            continue
        if kept:
            for p, chunk in zip(plans, chunks, strict=True):
                table = kept_offsets[p.ref.owner]
                if p.ref.name not in table:
                    table[p.ref.name] = table.get(_KEPT_END, 0)
                    table[_KEPT_END] = table[p.ref.name] + arena_aligned(chunk * p.world * item)
        else:
            for m, (p, chunk) in enumerate(zip(plans, chunks, strict=True)):
                live = g["start"], g["end"] if g["end"] is not None else end
                need(
                    "slots" if shared else "transient", ("gather", k, m), Slot(chunk * p.world * item, *live)
                )
        several, cast = len(plans) > 1, plans[0].gather_dtype != plans[0].dtype
        if (several or cast) and not shared:
            total = sum(chunks) * item
            size = total * (plans[0].world + 1) if several else total
            need("transient", ("gather_staging", k, 0), Slot(size, g["start"], g["ready"]))
    read_by_all = _read_by_all([(r["start"], r["end"]) for r in reduces], end)
    for k, r in enumerate(reduces):
        node = r["node"]
        plans = [params[ref] for ref in facts.params(node)]
        chunks = [_chunk(p, facts.tile(node)) for p in plans]
        item = plans[0].reduce_dtype.itemsize
        world = plans[0].world if plans[0].cut else 1
        live = r["start"], r["end"]
        if plans[0].shared:
            live = r["start"], read_by_all[k]
            numel = sum(math.prod(_shape(p, facts.tile(node))) for p in plans)
            need("own", ("reduce", k, 0), Slot(numel * item, *live))
        elif not _from_where_it_lies(node, plans):
            size = arena_aligned(sum(chunks) * world * item) + (sum(chunks) * item if plans[0].cut else 0)
            need("transient", ("reduce", k, 0), Slot(size, *live))
        reduce_rows.append((node, plans, chunks))
    for k, o in enumerate(offloads):
        if o["away"].tier == "nvme":  # by way of the pool
            size = block_aligned(facts.bytes_of(o["value"]))
            need("host", ("offload", k, 0), Slot(size, o["start"], o["end"]))
    at: dict[tuple[str, int, int], int] = {}
    sizes: dict[str, int] = {}
    for pool, wanted in slots.items():
        offsets, sizes[pool] = pack(wanted)
        wrong = check(wanted, offsets, sizes[pool])
        if wrong:
            raise VerifyError(f"planned memory: {wrong}")
        at |= zip(where[pool], offsets, strict=True)
    gather_descs = [
        GatherDesc(
            owner=plans[0].ref.owner,
            names=tuple(p.ref.name for p in plans),
            shapes=tuple(_shape(p, facts.tile(node)) for p in plans),
            chunk_numels=tuple(chunks),
            dtype=_dtype_text(plans[0].gather_dtype),
            kept=kept,
            offsets=tuple(
                -1 if home else kept_offsets[p.ref.owner][p.ref.name] if kept else at[("gather", k, m)]
                for m, p in enumerate(plans)
            ),
            staging=at.get(("gather_staging", k, 0), -1),
            unit=facts.unit(node).split(":", 1)[-1],
            home=home,
            shared=plans[0].shared,
            hops=tuple(
                Hop(tier, pool, tuple(at[(f"fetch {hop}", k, m)] for m in range(len(plans))))
                for hop, (tier, pool) in enumerate(_hops(plans[0]))
            ),
            rest_dtype=_dtype_text(plans[0].dtype),
            tile=_part(node, plans[0]),
        )
        for k, (node, plans, chunks, kept, home) in enumerate(gather_rows)
    ]
    reduce_descs = [
        ReduceDesc(
            owner=plans[0].ref.owner,
            names=tuple(p.ref.name for p in plans),
            shapes=tuple(_shape(p, facts.tile(node)) for p in plans),
            chunk_numels=tuple(chunks),
            dtype=_dtype_text(plans[0].reduce_dtype),
            out_dtype=_dtype_text(plans[0].dtype),
            replicated=not plans[0].cut,
            staging=at.get(("reduce", k, 0), -1),
            unit=facts.unit(node).split(":", 1)[-1],
            shared=plans[0].shared,
            tiers=plans[0].grad_path,
            copies=plans[0].copies,
            tile=_part(node, plans[0]),
            grad_dtype=_dtype_text(plans[0].gather_dtype),
            direct=facts.direct(node),
        )
        for k, (node, plans, chunks) in enumerate(reduce_rows)
    ]
    offload_descs = [
        OffloadDesc(
            name=o["away"].name,
            module=o["away"].module,
            tiers=o["away"].tiers,
            shape=tuple(map(int, o["value"].shape)),
            stride=tuple(map(int, o["value"].stride())),
            dtype=_dtype_text(o["value"].dtype),
            where=o["where"],
            offset=at.get(("offload", k, 0), -1),
        )
        for k, o in enumerate(offloads)
    ]
    return gather_descs, reduce_descs, offload_descs, sizes


def _hops(plan: Any) -> list[tuple[str, str]]:
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


# The end of a kept arena stands in its table of offsets under a name that no parameter has.
_KEPT_END = ""


def kept_ends(kept_offsets: Mapping[str, dict[str, int]]) -> dict[str, int]:
    """Bytes of the kept arena of each owner."""
    return {owner: table.get(_KEPT_END, 0) for owner, table in kept_offsets.items()}


def kept_bytes(kept_offsets: Mapping[str, dict[str, int]]) -> int:
    """Bytes of all kept arenas."""
    return sum(kept_ends(kept_offsets).values())


def _from_where_it_lies(node: fx.Node, plans: Sequence[Any]) -> bool:
    """True for a lone gradient that the engine reduces with no copy before or after: whole chunks of rows, one
    piece of memory, and the dtype of the arithmetic is that of the gradient and of the result."""
    plan, grad = plans[0], facts.value(node.args[0][0])
    return (
        len(plans) == 1
        and plan.cut
        and (facts.tile(node) is not None or plan.shape[0] % plan.world == 0)
        and plan.reduce_dtype == plan.dtype == grad.dtype
        and grad.is_contiguous()
    )


def _chunk(plan: Any, tile: Tile | None) -> int:
    """Elements that every rank has of what is moved."""
    if not plan.cut:
        return int(plan.numel)
    rows = plan.chunk_rows if tile is None else tile.rows
    return rows * (plan.numel // plan.shape[0])


def _shape(plan: Any, tile: Tile | None) -> tuple[int, ...]:
    """Of what is moved, from all ranks together."""
    return plan.shape if tile is None else (plan.world * tile.rows, *plan.shape[1:])


def _part(node: fx.Node, plan: Any) -> Part | None:
    tile = facts.tile(node)
    if tile is None:
        return None
    row = plan.numel // plan.shape[0]
    return Part(tile.begin * row, tile.index, tile.of, plan.chunk_rows * row)


def _dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
