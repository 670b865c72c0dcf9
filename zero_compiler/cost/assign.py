"""A multiple-choice knapsack: one option for each tensor, so that budgets of bytes hold all and the cost is least.

It has several budgets at once, and is solved by dynamic programming over what has been taken of each. Exact as long
as there are few different sums; beyond that the plane of sums is divided into cells, each of which keeps its cheapest.
Sums themselves stay exact, so that what is found always fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

MOST = 4096  # sums that are followed at once
_ALIKE = 8  # of so many equal things, the largest part that is decided as one


@dataclass(frozen=True)
class Option:
    """Takes ``nbytes`` of each room, and costs."""

    nbytes: tuple[int, ...]
    cost: float


def assign(items: Sequence[tuple[Option, ...]], rooms: Sequence[int | None]) -> list[int] | None:
    """The option of every item, by number; None where nothing was found that fits.

    Args:
        rooms: bytes of each; None: no limit.
    """
    total = sum(max((sum(o.nbytes) for o in item), default=0) for item in items)
    limited = [k for k, room in enumerate(rooms) if room is not None]
    room = np.array([min(rooms[k] or 0, total) for k in limited], dtype=np.int64)
    # The largest last: a cell holds many small ones, of which the cheapest option is then taken.
    parts = sorted(_parts(items), key=lambda part: len(part) * _most(items[part[0]]))
    costs = [np.array([o.cost for o in items[part[0]]]) * len(part) for part in parts]
    sizes = [
        np.array([[o.nbytes[k] for k in limited] for o in items[part[0]]], dtype=np.int64) * len(part)
        for part in parts
    ]
    still = np.zeros_like(room)  # what the parts to come take of each room at least
    for size in sizes:
        still += size.min(axis=0)
    sums, cost = np.zeros((1, len(limited)), dtype=np.int64), np.zeros(1)
    steps: list[tuple[np.ndarray, np.ndarray]] = []
    for size, us in zip(sizes, costs, strict=True):
        still -= size.min(axis=0)
        count = len(us)
        sums = (sums[:, None, :] + size[None]).reshape(len(sums) * count, len(limited))
        cost = (cost[:, None] + us[None]).reshape(-1)
        (fits,) = np.nonzero((sums + still <= room).all(axis=1))
        kept = fits[_cheapest(sums[fits], cost[fits], room)]
        if not len(kept):
            return None
        sums, cost = sums[kept], cost[kept]
        steps.append((kept // count, kept % count))
    chosen = [0] * len(items)
    at = int(np.argmin(cost))
    left = room - sums[at]
    for part, (before, option) in zip(reversed(parts), reversed(steps), strict=True):
        for item in part:
            chosen[item] = int(option[at])
        at = int(before[at])
    _fill(items, chosen, limited, left)
    return chosen


def _parts(items: Sequence[tuple[Option, ...]]) -> Iterable[list[int]]:
    """Items that are decided as one: equal ones where there are many of them."""
    alike: dict[tuple[Option, ...], list[int]] = {}
    for at, item in enumerate(items):
        alike.setdefault(item, []).append(at)
    for members in alike.values():
        while members:
            size = max(1, len(members) // _ALIKE)
            yield members[:size]
            members = members[size:]


def _most(item: tuple[Option, ...]) -> int:
    return max(max(o.nbytes, default=0) for o in item)


def _cheapest(sums: np.ndarray, cost: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Of equal sums, the cheapest, the first of those; where too many remain, of those in one cell."""
    kept = _firsts(sums, cost)
    if len(kept) > MOST:
        # Rooms hold everything together, so that what is in one of them follows from the others.
        width = int(MOST ** (1 / max(1, min(2, len(room)))))
        cells = sums[kept] * width // np.maximum(room, 1)
        kept = kept[_firsts(cells, cost[kept])]
    return kept


def _firsts(keys: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """The cheapest row of each key."""
    order = np.lexsort((cost, *keys.T))
    rows = keys[order]
    new = np.ones(len(order), dtype=bool)
    new[1:] = (rows[1:] != rows[:-1]).any(axis=1)
    return np.sort(order[new])


def _fill(
    items: Sequence[tuple[Option, ...]], chosen: list[int], limited: Sequence[int], left: np.ndarray
) -> None:
    """Give items a cheaper option where what is left holds it: cells and equal parts may have left room."""

    def gain(at: int) -> float:
        item = items[at]
        return (item[chosen[at]].cost - min(o.cost for o in item)) / max(1, _most(item))

    for at in sorted(range(len(items)), key=gain, reverse=True):
        item = items[at]
        now = np.array([item[chosen[at]].nbytes[k] for k in limited], dtype=np.int64)
        for k in sorted(range(len(item)), key=lambda k: item[k].cost):
            if not item[k].cost < item[chosen[at]].cost or math.isclose(
                item[k].cost, item[chosen[at]].cost, rel_tol=1e-12
            ):
                break
            size = np.array([item[k].nbytes[j] for j in limited], dtype=np.int64) - now
            if (size <= left).all():
                left -= size
                chosen[at] = k
                break
