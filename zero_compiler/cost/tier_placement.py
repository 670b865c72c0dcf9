"""On which tier each tensor of a sharded model rests, chosen by what its transfers cost.

A byte on a far tier costs a step its transfers: a shard that rests in a file is read in forward, in backward and by
the update, which also writes it; a gradient is written once and read once, and so are optimizer states. On an
accelerator there are copies beside: a shard on the host, or in a file behind it, is copied to the device in forward and
in backward and its gradient comes back, while states move only where the parameter stays on the device. Under
``device_rest_bytes`` everything that is left to the planner goes where all of it fits the budgets and transfers take
least time, all ranks reading and writing their own parts at once (ZeRO-Infinity, Rajbhandari et al. 2021, sections 4
and 5.2). What must be chosen together is one item of a knapsack (``assign.py``): on CPU ranks each tensor by itself, on
an accelerator what belongs to one parameter, since torch has a gradient where its parameter is. A pure function of
shapes, options and HardwareSpec: equal on every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..config import TIERS, Config
from ..errors import ConfigError, MemoryBudgetError
from ..layout import Layout
from .assign import Option, assign
from .hardware import HardwareSpec

# What rests, and how often a step reads it from its file and writes it back.
TRANSFERS = {"params": (3, 1), "grads": (1, 1), "optimizer": (1, 1)}
# The same between an accelerator and its host, of a parameter that rests off the device and of one that stays there.
COPIES = {"params": (2, 0), "grads": (0, 1), "optimizer": (0, 0)}
COPIES_HOME = {"params": (0, 0), "grads": (0, 0), "optimizer": (1, 1)}
WORDS = {"params": "parameters", "grads": "gradients", "optimizer": "optimizer states"}


@dataclass(frozen=True)
class Resting:
    """A tensor at rest on one rank: the shard, gradient or optimizer states (a kind of TRANSFERS) of a parameter."""

    kind: str
    name: str
    nbytes: int


@dataclass(frozen=True)
class Together:
    """Tensors whose tiers are chosen together.

    Args:
        options: of each, a tier for every tensor; the nearest first, and one where nothing is left to decide.
        apart: the memory of the compute device is another than the host's.
    """

    tensors: tuple[Resting, ...]
    options: tuple[tuple[str, ...], ...]
    apart: bool = False

    def option(self, tiers: tuple[str, ...], spec: HardwareSpec) -> Option:
        """What they take of each tier, and cost, where they rest on ``tiers``."""
        nbytes = dict.fromkeys(TIERS, 0)
        for t, tier in zip(self.tensors, tiers, strict=True):
            nbytes[tier] += t.nbytes
        return Option(tuple(nbytes.values()), sum(self.costs_us(tiers, spec)))

    def costs_us(self, tiers: tuple[str, ...], spec: HardwareSpec) -> list[float]:
        """Microseconds of transfers a step of each tensor."""
        home = all(tier == "none" for t, tier in zip(self.tensors, tiers, strict=True) if t.kind == "params")
        return [
            cost_us(t.kind, t.nbytes, tier, spec, self.apart, home)
            for t, tier in zip(self.tensors, tiers, strict=True)
        ]


@dataclass(frozen=True)
class Placed:
    """The tier of every tensor, by kind and name, and why, in words.

    ``later``: of parameters that were frozen, the same of their gradients and states, for when they are trained.
    """

    tiers: Mapping[tuple[str, str], str]
    why: tuple[str, ...] = ()
    later: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def tier(self, kind: str, name: str) -> str:
        """Where a tensor rests; on the device what is not known."""
        return self.tiers.get((kind, name)) or self.later.get((kind, name), "none")

    def was_frozen(self, name: str) -> bool:
        """Whether nothing was placed of a parameter but itself."""
        return ("grads", name) in self.later


@dataclass(frozen=True)
class Given:
    """What the planner knows of a parameter; ``tier``: where construction has put its rows, if they stay there."""

    layout: Layout
    trainable: bool
    tier: str | None = None


def tiers_of(
    config: Config,
    apart: bool,
    params: Mapping[str, Given],
    spec: HardwareSpec,
    wanted: Mapping[tuple[str, str], str] | None = None,
) -> Placed:
    """Where shards, gradients and states of a model rest on every rank: as ``config`` says, the rest as it fits.

    Args:
        apart: the memory of the compute device is another than the host's.
        params: by name.
        wanted: the tier of each by kind and name, where a plan file has decided it.

    Raises:
        ConfigError: a budget for a tier that this device does not have, or a tensor cannot rest where it is wanted.
        MemoryBudgetError: the model does not fit the budgets.
    """
    placed = _placed(config, apart, params, spec, wanted)
    later = {
        (kind, name): tier
        for name, given in params.items()
        if not given.trainable
        for kind, tier in _once_trained(config, apart, given, placed.tier("params", name)).items()
    }
    return replace(placed, later=later)


def _once_trained(config: Config, apart: bool, given: Given, tier: str) -> dict[str, str]:
    """Where the gradient and the states of a parameter will rest that is frozen, on ``tier``: they take nothing yet.
    What is left to the planner rests where the parameter does."""
    able = {kind: _able(config, apart, kind, given) for kind in ("grads", "optimizer")}
    if not apart:
        return {kind: tier if tier in tiers else tiers[0] for kind, tiers in able.items()}
    options = (dict(zip(able, tiers, strict=True)) for tiers in itertools.product(*able.values()))
    return next((o for o in options if _may_rest_so({"params": tier, **o})), dict.fromkeys(able, tier))


def _placed(
    config: Config,
    apart: bool,
    params: Mapping[str, Given],
    spec: HardwareSpec,
    wanted: Mapping[tuple[str, str], str] | None,
) -> Placed:
    items = [item for name, given in params.items() for item in _of(config, apart, name, given)]
    left = items if wanted is None else [_resting_as(item, wanted) for item in items]
    if config.device_rest_bytes is None:
        return Placed(
            {(t.kind, t.name): tier for i in left for t, tier in zip(i.tensors, i.options[0], strict=True)}
        )
    if config.host_rest_bytes is not None and not apart:
        raise ConfigError(
            "host_rest_bytes is for accelerators: compute is on the CPU, whose memory is the host's; give "
            "device_rest_bytes alone"
        )
    room: dict[str, int | None] = {"none": config.device_rest_bytes}
    if apart:
        # Without a budget what was sent there rests there, and nothing else.
        room["host"] = config.host_rest_bytes
    if config.nvme_dir is not None:
        room["nvme"] = config.nvme_rest_bytes
    return place(items, room, spec, left)


def _resting_as(item: Together, wanted: Mapping[tuple[str, str], str]) -> Together:
    """The same with one option, which is what a plan file says."""
    tiers = tuple(wanted[t.kind, t.name] for t in item.tensors)
    if tiers in item.options:
        return replace(item, options=(tiers,))
    said, can = (
        " or ".join(
            " and ".join(f"{WORDS[t.kind]} on {tier!r}" for t, tier in zip(item.tensors, o, strict=True))
            for o in options
        )
        for options in ((tiers,), item.options)
    )
    raise ConfigError(
        f"{item.tensors[0].name!r} has {said} there; with the options that were given it can have {can}: edit its "
        "rests, or the options of zero.shard"
    )


def _of(config: Config, apart: bool, name: str, given: Given) -> Iterable[Together]:
    """What rests of one parameter, and where each may: nearest first, and all that a wish leaves."""
    layout = given.layout
    sizes = {"params": layout.bytes_local()}
    if given.trainable:
        sizes |= {"grads": layout.bytes_local(), "optimizer": layout.chunk_numel * config.state_bytes}
    tensors = tuple(Resting(kind, name, nbytes) for kind, nbytes in sizes.items())
    able = {kind: _able(config, apart, kind, given) for kind in sizes}
    if not apart:
        yield from (Together((t,), tuple((tier,) for tier in able[t.kind])) for t in tensors)
        return
    options = [
        tiers
        for tiers in itertools.product(*able.values())
        if _may_rest_so(dict(zip(able, tiers, strict=True)))
    ]
    if layout.sharded and config.offload_params in ("host", "nvme") and config.host_rest_bytes is None:
        options = options[:1]  # what updates need is beside the parameter, unless told otherwise
    yield Together(tensors, tuple(options), apart)


def _able(config: Config, apart: bool, kind: str, given: Given) -> tuple[str, ...]:
    """Tiers where a tensor may rest, as far as it is alone."""
    asked = getattr(config, f"offload_{kind}")
    far = apart and config.offload_params in ("host", "nvme")
    if asked == "host" and not apart:
        asked = "none"  # the same memory
    if not given.layout.sharded and (kind != "optimizer" or (far and asked == "host")):
        asked = "none"  # a scalar, or a whole copy, which every rank has on its device
    if kind == "params" and given.tier is not None:
        asked = given.tier
    if asked is not None:
        return (asked,)
    if kind == "params" and (config.stage != 3 or (apart and config.device_rest_bytes is None)):
        return ("none",)  # every weight is kept gathered; or nothing is left to the planner
    there = {
        "none": True,
        "host": apart and (far or config.host_rest_bytes is not None),
        "nvme": config.nvme_dir is not None,
    }
    return tuple(tier for tier in TIERS if there[tier])


def _may_rest_so(tiers: Mapping[str, str]) -> bool:
    """Whether tensors of one parameter of an accelerator may rest so: a gradient is where its parameter is, and updates
    run there too; those on the device bring states from elsewhere."""
    if tiers["params"] == "none":
        return tiers.get("grads", "none") == "none"
    return tiers.get("grads") != "none" and tiers.get("optimizer") != "none"


def cost_us(
    kind: str, nbytes: int, tier: str, spec: HardwareSpec, apart: bool = False, home: bool = False
) -> float:
    """Microseconds of transfers a step that a tensor costs where it rests on ``tier``.

    Args:
        apart, home: the compute device is an accelerator, and the tensor's parameter rests there.
    """
    if tier == "none":
        return 0.0
    hops = [("nvme", TRANSFERS[kind])] if tier == "nvme" else []
    if apart:
        hops.append(("host", (COPIES_HOME if home else COPIES)[kind]))
    us = 0.0
    for link, (reads, writes) in hops:
        read, write = spec.links(link)
        us += reads * read.us(nbytes) + writes * write.us(nbytes)
    return us


def place(
    items: Sequence[Together],
    room_bytes: Mapping[str, int | None],
    spec: HardwareSpec,
    left: Sequence[Together] | None = None,
) -> Placed:
    """Give every tensor a tier.

    Args:
        room_bytes: what may rest on each tier that there is; None: no limit.
        left: the same items with the options that are left of theirs; None: all of them.

    Raises:
        MemoryBudgetError: they do not fit; by how much, and what would help.
    """
    left = items if left is None else left
    options = [tuple(item.option(tiers, spec) for tiers in item.options) for item in left]
    rooms = [room_bytes.get(tier, 0) for tier in TIERS]
    chosen = assign(options, rooms)
    if chosen is None:
        raise _too_much(left, options, room_bytes)
    found = [(item, of.options[k]) for item, of, k in zip(items, left, chosen, strict=True)]
    tiers = {(t.kind, t.name): tier for item, to in found for t, tier in zip(item.tensors, to, strict=True)}
    return Placed(tiers, tuple(_why(found, spec, "nvme" in room_bytes)))


FIELDS = {"none": "device_rest_bytes", "host": "host_rest_bytes", "nvme": "nvme_rest_bytes"}
_PLACES = {"none": "on the device", "host": "on the host", "nvme": "in files"}


def _too_much(
    items: Sequence[Together], options: Sequence[tuple[Option, ...]], room: Mapping[str, int | None]
) -> MemoryBudgetError:
    """Which budget is too small, and by how much: the one that lacks least where it alone need change."""
    limited = [tier for tier in TIERS if room.get(tier) is not None]
    lacks: list[tuple[int, str, list[int]]] = []
    for tier in limited:
        rooms = [None if x == tier else room.get(x, 0) for x in TIERS]
        chosen = assign(_least_on(options, tier), rooms)
        if chosen is not None:
            lacks.append((_taken(options, chosen, tier) - (room[tier] or 0), tier, chosen))
    if not lacks:  # one is too small whatever the others are
        for tier in limited:
            chosen = assign(_least_on(options, tier), [None] * len(TIERS))
            assert chosen is not None
            lacks.append((_taken(options, chosen, tier) - (room[tier] or 0), tier, chosen))
        lacks = [max(lacks, key=lambda lack: lack[0])]
    over, tier, chosen = min(lacks, key=lambda lack: lack[0])
    must, given = _taken(options, chosen, tier), room[tier] or 0
    here = [
        t
        for item, k in zip(items, chosen, strict=True)
        for t, x in zip(item.tensors, item.options[k], strict=True)
        if x == tier
    ]
    what = ", ".join(f"{WORDS[k]} {n:,}" for k in TRANSFERS if (n := _sum(t for t in here if t.kind == k)))
    more = f"{FIELDS[tier]} of at least {must:,}"
    if any(item.apart for item in items) and room.get("host") is None:
        more += ", host_rest_bytes for a tier on the host"
    if "nvme" not in room:
        more += ", nvme_dir for a tier of files"
    total = sum(t.nbytes for item in items for t in item.tensors)
    return MemoryBudgetError(
        f"{FIELDS[tier]}={given:,} is {over:,} bytes too small for this rank: {must:,} bytes can rest nowhere else "
        f"({what}), of {total:,} in all; give {more}, or more ranks, which share these bytes"
    )


def _least_on(options: Sequence[tuple[Option, ...]], tier: str) -> list[tuple[Option, ...]]:
    """The same options, which cost what they take of a tier."""
    at = TIERS.index(tier)
    return [tuple(Option(o.nbytes, o.nbytes[at]) for o in item) for item in options]


def _taken(options: Sequence[tuple[Option, ...]], chosen: Sequence[int], tier: str) -> int:
    return sum(item[k].nbytes[TIERS.index(tier)] for item, k in zip(options, chosen, strict=True))


def _sum(tensors: Iterable[Resting]) -> int:
    return sum(t.nbytes for t in tensors)


def _why(found: Sequence[tuple[Together, tuple[str, ...]]], spec: HardwareSpec, files: bool) -> Iterable[str]:
    rows = [
        (t, tier, us, len({option[k] for option in item.options}) == 1)
        for item, tiers in found
        for k, (t, tier, us) in enumerate(zip(item.tensors, tiers, item.costs_us(tiers, spec), strict=True))
    ]
    for kind, word in WORDS.items():
        mine = [row for row in rows if row[0].kind == kind]
        for tier in TIERS:
            here = [row for row in mine if row[1] == tier]
            if not here:
                continue
            fixed = sum(only for *_, only in here)
            us = sum(us for _, _, us, _ in here)
            yield (
                f"{word} of {len(here)} of {len(mine)} {_PLACES[tier]}: {_sum(t for t, *_ in here):,} bytes"
                + (f", {us / 1e3:,.1f} ms of transfers a step" if tier != "none" else "")
                + (f"; {fixed} of them can rest nowhere else" if fixed else "")
            )
    apart = any(item.apart for item, _ in found)
    for tier, there in (("host", apart), ("nvme", files)):
        if there:
            costs = [
                f"{cost_us(k, 1 << 20, tier, spec, apart) / 1e3:.2f} ms as {w}" for k, w in WORDS.items()
            ]
            if apart:
                us = cost_us("optimizer", 1 << 20, tier, spec, apart, home=True)
                costs[-1] += f" ({us / 1e3:.2f} ms of parameters on the device)"
            yield f"a MiB {_PLACES[tier]} costs a step {', '.join(costs)}: what costs most stays nearest"
