"""On which tier each tensor of a sharded model rests, chosen by what its transfers cost.

A byte on a far tier costs a step its transfers: a shard that rests in a file is read in forward, in backward and by
the update, which also writes it; a gradient is written once and read once, and so are optimizer states. Under
``device_rest_bytes`` what is left to the planner stays on the device where that saves most time per byte, and the rest
goes to the next tier, all ranks reading and writing their own parts at once (ZeRO-Infinity, Rajbhandari et al. 2021,
sections 4 and 5.2). Each tier is a 0/1 knapsack (``knapsack.py``). A pure function of shapes, options and HardwareSpec:
equal on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .config import Config
from .errors import ConfigError, MemoryBudgetError
from .hardware import HardwareSpec
from .knapsack import STEPS, Candidate, choose
from .layout import Layout

# What rests, and how often a step reads it from its tier and writes it back.
TRANSFERS = {"params": (3, 1), "grads": (1, 1), "optimizer": (1, 1)}
WORDS = {"params": "parameters", "grads": "gradients", "optimizer": "optimizer states"}
# Nearest first.
TIERS = ("none", "host", "nvme")
# What an optimizer is taken to keep before there is one: two fp32 values a parameter, as Adam does.
ASSUMED_STATE_BYTES = 8


@dataclass(frozen=True)
class Resting:
    """A tensor at rest on one rank: the shard, gradient or optimizer states of parameter ``name``.

    Args:
        kind: of TRANSFERS.
        tiers: where it may rest, nearest first; one where nothing is left to decide.
    """

    kind: str
    name: str
    nbytes: int
    tiers: tuple[str, ...]


@dataclass(frozen=True)
class Placed:
    """The tier of every tensor, by kind and name, and why, in words."""

    tiers: Mapping[tuple[str, str], str]
    why: tuple[str, ...] = ()

    def tier(self, kind: str, name: str) -> str:
        """Where a tensor rests; on the device what is not known."""
        return self.tiers.get((kind, name), "none")


@dataclass(frozen=True)
class Given:
    """What the planner knows of a parameter; ``filed``: construction has put it into a file."""

    layout: Layout
    trainable: bool
    filed: bool


def tiers_of(config: Config, apart: bool, params: Mapping[str, Given], spec: HardwareSpec) -> Placed:
    """Where shards, gradients and states of a model rest on every rank: as ``config`` says, the rest as it fits.

    Args:
        apart: the memory of the compute device is another than the host's.
        params: by name.

    Raises:
        ConfigError: a budget for a tier that this device does not have.
        MemoryBudgetError: the model does not fit the budgets.
    """
    tensors = [t for name, given in params.items() for t in _of(config, apart, name, given)]
    if config.device_rest_bytes is None:
        return Placed({(t.kind, t.name): t.tiers[0] for t in tensors})
    if config.host_rest_bytes is not None and not apart:
        raise ConfigError(
            "host_rest_bytes is for accelerators: compute is on the CPU, whose memory is the host's; give "
            "device_rest_bytes alone"
        )
    room: dict[str, int | None] = {"none": config.device_rest_bytes}
    told = sum(t.nbytes for t in tensors if t.tiers == ("host",))
    if config.host_rest_bytes is not None or told:
        room["host"] = told if config.host_rest_bytes is None else config.host_rest_bytes
    if config.nvme_dir is not None:
        room["nvme"] = config.nvme_rest_bytes
    return place(tensors, room, spec)


def _of(config: Config, apart: bool, name: str, given: Given) -> Iterable[Resting]:
    """What rests of one parameter, and where each may: nearest first, and all that a wish leaves."""
    layout = given.layout
    sizes = {"params": layout.bytes_local()}
    if given.trainable:
        sizes |= {"grads": layout.bytes_local(), "optimizer": layout.chunk_numel * ASSUMED_STATE_BYTES}
    far = apart and config.offload_params in ("host", "nvme")
    for kind, nbytes in sizes.items():
        asked = getattr(config, f"offload_{kind}")
        if asked == "host" and not apart:
            asked = "none"  # the same memory
        if far and layout.cut:
            asked = asked or "host"  # what updates need is beside the parameter, unless told otherwise
        if not layout.cut and (kind != "optimizer" or (far and asked == "host")):
            asked = "none"  # a scalar, or a whole copy, which every rank has on its device
        if kind == "params" and given.filed:
            asked = "nvme"
        able: tuple[str, ...] = TIERS
        if asked is not None:
            able = (asked,)
        elif apart and kind != "optimizer":
            able = ("none",)
        elif kind == "params" and config.stage != 3:
            able = ("none",)  # every weight is kept gathered
        yield Resting(kind, name, nbytes, able)


def cost_us(kind: str, nbytes: int, tier: str, spec: HardwareSpec) -> float:
    """Microseconds of transfers a step that a tensor costs where it rests on ``tier``."""
    reads, writes = TRANSFERS[kind]
    if tier == "none":
        return 0.0
    read, write = spec.links(tier)
    return reads * read.us(nbytes) + writes * write.us(nbytes)


def place(tensors: Sequence[Resting], room_bytes: Mapping[str, int | None], spec: HardwareSpec) -> Placed:
    """Give every tensor a tier.

    Args:
        room_bytes: what may rest on each tier that there is; None: no limit.

    Raises:
        MemoryBudgetError: they do not fit; by how much, and what would help.
    """
    tiers: dict[tuple[str, str], str] = {}
    left = list(tensors)
    for tier in TIERS:
        if tier not in room_bytes:
            continue
        bound = [t for t in left if _last(t, tier, room_bytes)]
        free = [t for t in left if tier in t.tiers and not _last(t, tier, room_bytes)]
        room = room_bytes[tier]
        taken = {*bound, *free}
        if room is not None:
            room -= sum(t.nbytes for t in bound)
            if room < 0:
                raise _too_much(tensors, tier, bound, room_bytes)
            taken = {
                *bound,
                *_chosen(free, room, functools.partial(_saved_us, tier=tier, room=room_bytes, spec=spec)),
            }
        tiers |= {(t.kind, t.name): tier for t in taken}
        left = [t for t in left if t not in taken]
    return Placed(tiers, tuple(_why(tensors, tiers, room_bytes, spec)))


def _chosen(free: Sequence[Resting], room: int, saved_us: Callable[[Resting], float]) -> set[Resting]:
    """What of ``free`` is to stay within ``room``.

    Tensors below a step of the knapsack, which would count as a whole one, come first: they save most per byte.
    """
    small = {t for t in free if t.nbytes * STEPS < room}
    if _sum(small) * 8 > room:
        small = set()
    large = {f"{t.kind} {t.name}": t for t in free if t not in small}
    candidates = [Candidate(key, t.nbytes, saved_us(t)) for key, t in large.items()]
    return small | {large[key] for key in choose(candidates, room - _sum(small))}


def _farther(t: Resting, tier: str, room: Mapping[str, int | None]) -> list[str]:
    return [x for x in TIERS[TIERS.index(tier) + 1 :] if x in t.tiers and x in room]


def _last(t: Resting, tier: str, room: Mapping[str, int | None]) -> bool:
    """Whether a tensor that is not placed yet must rest here."""
    return tier in t.tiers and not _farther(t, tier, room)


def _saved_us(t: Resting, tier: str, room: Mapping[str, int | None], spec: HardwareSpec) -> float:
    there = _farther(t, tier, room)[0]
    return cost_us(t.kind, t.nbytes, there, spec) - cost_us(t.kind, t.nbytes, tier, spec)


FIELDS = {"none": "device_rest_bytes", "host": "host_rest_bytes", "nvme": "nvme_rest_bytes"}
_PLACES = {"none": "on the device", "host": "on the host", "nvme": "in files"}


def _too_much(
    tensors: Sequence[Resting], tier: str, bound: Sequence[Resting], room: Mapping[str, int | None]
) -> MemoryBudgetError:
    must, given = sum(t.nbytes for t in bound), room[tier]
    what = ", ".join(f"{WORDS[k]} {n:,}" for k in TRANSFERS if (n := _sum(t for t in bound if t.kind == k)))
    more = f"a larger {FIELDS[tier]}" if tier != "none" else f"{FIELDS[tier]} of at least {must:,}"
    if "nvme" not in room:
        more += ", nvme_dir for a tier of files"
    return MemoryBudgetError(
        f"{FIELDS[tier]}={given:,} is {must - (given or 0):,} bytes too small for this rank: {must:,} bytes can rest "
        f"nowhere else ({what}), of {_sum(tensors):,} in all; give {more}, or more ranks, which share these bytes"
    )


def _sum(tensors: Iterable[Resting]) -> int:
    return sum(t.nbytes for t in tensors)


def _why(
    tensors: Sequence[Resting],
    tiers: Mapping[tuple[str, str], str],
    room: Mapping[str, int | None],
    spec: HardwareSpec,
) -> Iterable[str]:
    for kind, word in WORDS.items():
        mine = [t for t in tensors if t.kind == kind]
        for tier in TIERS:
            here = [t for t in mine if tiers[kind, t.name] == tier]
            if not here:
                continue
            fixed = sum(len(t.tiers) == 1 for t in here)
            us = sum(cost_us(kind, t.nbytes, tier, spec) for t in here)
            yield (
                f"{word} of {len(here)} of {len(mine)} {_PLACES[tier]}: {_sum(here):,} bytes"
                + (f", {us / 1e3:,.1f} ms of transfers a step" if tier != "none" else "")
                + (f"; {fixed} of them can rest nowhere else" if fixed else "")
            )
    yield (
        "a MiB in files costs a step "
        + ", ".join(f"{cost_us(k, 1 << 20, 'nvme', spec) / 1e3:.2f} ms as {w}" for k, w in WORDS.items())
        + ": what costs most stays nearest"
    )
