"""Which weights are gathered in tiles, and how many rows at a time: by size, and where a budget decides as all ranks
have agreed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from ..alignment import BLOCK_BYTES
from ..ir.facts import ParamRef
from ..layout import Layout
from ..passes.base import ParamPlan
from ..ranks.agreement import digest
from ..sharded.sharded_model import ShardedModel

_aten = torch.ops.aten
# What a compiler takes apart by the sizes of a batch.
WHOLE = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
    }
)


def tile_rows(layout: Layout, dtype: torch.dtype, far: bool, limit_bytes: int | None) -> int:
    """Rows of a rank's chunk in a tile; 0 where the weight is gathered whole, as every vector is.

    A tile is gathered in at most ``limit_bytes``, or of the fewest rows that can be: one, or on another tier as many as
    whole blocks hold. One rank that computes with a weight where it lies at rest gathers nothing, and tiles nothing.

    Args:
        dtype: in which it is gathered.
        far: it, or its gradient, rests on another tier.
    """
    row_bytes = layout.row_numel * dtype.itemsize
    if limit_bytes is None or not layout.sharded or len(layout.shape) < 2:
        return 0
    if layout.world * layout.chunk_rows * row_bytes <= limit_bytes:
        return 0
    if layout.world == 1 and dtype == layout.dtype and not far:
        return 0
    least = math.lcm(layout.row_numel * layout.dtype.itemsize, BLOCK_BYTES) // (
        layout.row_numel * layout.dtype.itemsize
    )
    least = least if far else 1
    rows = max(1, limit_bytes // (layout.world * row_bytes) // least) * least
    if rows >= layout.chunk_rows:
        return 0
    tiles = -(-layout.chunk_rows // rows)
    even = next((n for n in range(tiles, 2 * tiles) if layout.chunk_rows % n == 0), None)
    if even is not None and layout.chunk_rows // even % least == 0:
        return layout.chunk_rows // even  # then one artifact serves all tiles
    return rows


# Tiles of fewer bytes are not tried for a budget: their latency would be most of their time.
LEAST_BYTES = 1 << 16
# Of so many sizes of weights at most larger tiles are tried: each takes a few plans.
_CLASSES = 8


def undecided(
    sharded_models: Mapping[str, ShardedModel], params: Mapping[ParamRef, ParamPlan]
) -> list[ParamRef]:
    """Weights of which nobody has decided yet whether a budget makes tiles of them."""
    return [
        ref
        for ref, plan in params.items()
        if plan.sharded and ref.name not in sharded_models[ref.owner].agreed.tile_bytes
    ]


def largest_bytes(plans: Iterable[ParamPlan]) -> int:
    """Most bytes that are gathered at a time, of any of the weights that can be tiled."""
    most = 0
    for plan in plans:
        row = plan.world * (plan.numel // plan.shape[0]) * plan.gather_dtype.itemsize
        if plan.world > 1 or plan.path or plan.gather_dtype != plan.dtype:
            most = max(most, row * (plan.tile_rows or plan.chunk_rows))
    return most


def set_tile_rows(
    sharded_models: Mapping[str, ShardedModel], refs: Iterable[ParamRef], limit_bytes: int | None
) -> None:
    """Have weights gathered in tiles of at most so many bytes; None: whole."""
    for ref in refs:
        sharded_models[ref.owner].agreed.tile_bytes[ref.name] = limit_bytes


def coarsen(
    plans: Mapping[ParamRef, ParamPlan],
    limit_bytes: int,
    fits: Callable[[Mapping[ParamRef, int | None]], bool],
) -> dict[ParamRef, int | None]:
    """The largest tiles of weights that a budget leaves them, where ``limit_bytes`` for all is known to fit.

    One limit is found for the largest weights, and by halving: there may be room left, and the arena need not grow with
    smaller ones. Every tile is the latency of a transfer: so weights of one size are tried together, those with the
    most transfers first, whole and else in the largest of tiles of twice the bytes, and twice again. As with whole
    weights one is on its way while another one is used.

    Args:
        plans: of the weights that may be tiled, as they are with the limit.
        fits: whether a plan with tiles of at most so many bytes of each weight does; None: it is whole.

    Returns the bytes of each weight.
    """
    found: dict[ParamRef, int | None] = dict.fromkeys(plans, limit_bytes)
    sizes: dict[int, list[ParamRef]] = {}
    for ref, plan in plans.items():
        if plan.tile_rows:
            sizes.setdefault(plan.gather_bytes, []).append(ref)

    def transfers(refs: list[ParamRef]) -> int:
        return sum(-(-plans[ref].chunk_rows // plans[ref].tile_rows) for ref in refs)

    for nbytes, refs in sorted(sizes.items(), key=lambda item: (-transfers(item[1]), item[0]))[:_CLASSES]:
        limits: list[int | None] = [limit_bytes]
        while limits[-1] is not None:
            twice = 2 * limits[-1]
            limits.append(twice if twice < nbytes else None)
        choices = [{**found, **dict.fromkeys(refs, limit)} for limit in limits]
        small, large = 0, len(limits) - 1
        if fits(choices[large]):
            found = choices[large]
            continue
        while large - small > 1:
            middle = (small + large) // 2
            small, large = (middle, large) if fits(choices[middle]) else (small, middle)
        found = choices[small]
    return found


def agree_on_rows(
    sharded_models: Mapping[str, ShardedModel],
    refs: Sequence[ParamRef],
    chosen: Mapping[ParamRef, int | None],
    room_bytes: int,
    tightest: Callable[[ShardedModel, str, int, str], str],
) -> None:
    """Note for all ranks what the one with the least room has chosen of these weights: what fits depends on the sizes
    of activations, which ranks may legally disagree about, and collectives must not.

    Args:
        chosen: by this rank.
        room_bytes: of the budget, what a plan with all of them whole leaves; below 0 by as much as it lacks.
        tightest: the text of the rank with the least room, for all ranks of a sharded_model (``Loader.tightest``).
    """
    first = next(iter(sharded_models.values()))
    limits = [chosen.get(ref) for ref in refs]
    names = "\n".join(f"{sharded_models[r.owner].identity.serial} {r.name}" for r in refs)
    key = f"tiles/{first.identity.serial}/{digest(names).hex()[:16]}"
    text = tightest(first, key, room_bytes, ",".join("" if limit is None else str(limit) for limit in limits))
    for ref, limit in zip(refs, text.split(","), strict=True):
        set_tile_rows(sharded_models, [ref], int(limit) if limit else None)
