"""What a plan has decided, apart from what follows from it: a value that is written, edited, and read again.

All else in a plan (Programs, bytes, times) follows from the model, the configuration, the machine and these.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from ..config import TIERS
from ..errors import ConfigError
from ..json_fields import as_flag, as_list, as_object, as_text, as_whole, check_fields, shown
from .content_digest import digest_of

VERSION = 1
RESTING = ("params", "grads", "optimizer")  # what rests of a parameter
TRAINING, INFERENCE = "training", "inference"
PHASES = {TRAINING: ("forward", "backward"), INFERENCE: ("inference",)}
_FILE = "decisions"  # what an error of this file is about
_MOST = 1 << 31  # of what is counted: units, tiles, ranks


@dataclass(frozen=True)
class MadeFor:
    """What a plan holds for.

    Args:
        world, replicas, tensor_ranks: ranks that share a parameter, that hold the same rows, and that compute with
            other parts of the same parameters.
        config: fields of Config of which another value would be another plan, by name; dtypes by name.
        memory_budget_bytes: within which it was made. Another budget may hold for a run: what is then too large is
            refused.
        torch, compute: whose operators the values of forward are named by.
    """

    world: int
    replicas: int
    tensor_ranks: int
    config: Mapping[str, object]
    memory_budget_bytes: int | None
    torch: str
    compute: str


@dataclass(frozen=True)
class WeightDecisions:
    """A parameter by its shape, and what was decided of it.

    Args:
        shape, dtype: of the whole parameter.
        rests: the tier of its rows, of their gradients and of their optimizer states.
        kept: at stage 3 it stays gathered from forward to backward.
        tile_bytes: most bytes of it that are gathered at a time; None: it is gathered whole.
        quantised: it travels in the 8 bits that ``gather_dtype`` asks for.
    """

    shape: tuple[int, ...]
    dtype: str
    rests: Mapping[str, str]
    kept: bool = False
    tile_bytes: int | None = None
    quantised: bool = False


@dataclass(frozen=True)
class SavedValues:
    """What forward hands to backward: tensors by their names in the joint graph, with words that say which they are.

    Args:
        limit_bytes: within which they were chosen; None: nothing asked for less than takes the least time.
        hidden: tensors whose way to another tier and back costs no time; None: none may wait there.
        saved, made_again, away: handed to backward; made again there; on another tier in the meantime.
        found: stands for these three as the compiler wrote them, which tells whether they were edited.
    """

    limit_bytes: int | None = None
    hidden: tuple[str, ...] | None = None
    saved: Mapping[str, str] = field(default_factory=dict)
    made_again: Mapping[str, str] = field(default_factory=dict)
    away: Mapping[str, str] = field(default_factory=dict)
    found: str = ""

    @property
    def digest(self) -> str:
        """Stands for the three sets."""
        return digest_of([sorted(self.saved), sorted(self.made_again), sorted(self.away)])

    @property
    def edited(self) -> bool:
        """Whether somebody has changed what the compiler wrote."""
        return self.found != self.digest


@dataclass(frozen=True)
class FrameDecisions:
    """What was decided of one frame, trained or not.

    Args:
        function: that Dynamo captured, and ``reads``, the weights that it reads: which frame of the model it is.
        kind: TRAINING or INFERENCE.
        inputs: types of what the frame is given beside weights.
        graph: stands for the graph as it was captured, before anything was decided: sizes, operators, names.
        bucket_bytes: transfers of less share a bucket, in bytes of full tensors; ``bucket_why``: why, in words.
        recompute: backward may run costly operators again.
        tile_mlp, mlp_tile_bytes, tile_heads: intermediates of MLPs, and weights of heads, are done in tiles.
        distances: by phase and unit, how many units ahead of its use a gather starts.
        tiles: by phase, in how many tiles a computation is done.
        values: what forward hands to backward.
        reduce_each_micro_batch: gradients of micro-batches do not wait for each other, where that is left to the plan.
        plans_tried: to find all of this.
    """

    function: str
    reads: str
    kind: str
    inputs: tuple[str, ...]
    graph: str
    bucket_bytes: int
    bucket_why: str
    recompute: bool
    tile_mlp: bool
    mlp_tile_bytes: int | None
    tile_heads: bool
    distances: Mapping[str, Mapping[str, int]]
    tiles: Mapping[str, Mapping[str, int]]
    values: SavedValues
    reduce_each_micro_batch: bool = False
    plans_tried: int = 0

    @property
    def title(self) -> str:
        """Which frame it is, for messages."""
        return f"{self.kind} of {self.function}({', '.join(self.inputs)}), which reads {self.reads}"


@dataclass(frozen=True)
class PlanDecisions:
    """Of a whole model.

    Args:
        weights: by name; of parts that were sharded by themselves with the number of the part before it.
    """

    made_for: MadeFor
    weights: Mapping[str, WeightDecisions]
    frames: tuple[FrameDecisions, ...]

    @property
    def digest(self) -> str:
        """Stands for all of it: ranks hold to the same."""
        return digest_of(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        out: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {"version": VERSION, **out}

    @staticmethod
    def from_dict(data: object) -> PlanDecisions:
        """Inverse of :meth:`to_dict`.

        Raises:
            ConfigError: naming the field that is missing, unknown, or has a value that it cannot have.
        """
        rows = _fields("it", PlanDecisions, data, more=("version",))
        if rows["version"] != VERSION:
            raise ConfigError(f"{_FILE}: version must be {VERSION}, not {shown(rows['version'])}")
        weights = {
            name: _weight(f"weight {shown(name)}", row)
            for name, row in as_object(_FILE, "weights", rows["weights"]).items()
        }
        frames = as_list(_FILE, "frames", rows["frames"])
        return PlanDecisions(
            _made_for(rows["made_for"]),
            weights,
            tuple(_frame(f"frames[{at}]", row) for at, row in enumerate(frames)),
        )


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as a plan file names it."""
    return str(dtype).removeprefix("torch.")


def _fields(
    what: str, kind: type, data: object, more: Collection[str] = (), later: Collection[str] = ()
) -> dict[str, Any]:
    """``data`` as the fields of a class, all of which are there but those that files of ``later`` versions have."""
    known = (*more, *(f.name for f in fields(kind)))
    check_fields(_FILE, what, data, known, [name for name in known if name not in later])
    assert isinstance(data, dict)
    return data


def _bytes_or_none(what: str, data: object, least: int = 0) -> int | None:
    return None if data is None else as_whole(_FILE, f"{what}, where it is not null,", data, least)


def _made_for(data: object) -> MadeFor:
    rows = _fields("made_for", MadeFor, data)
    config = as_object(_FILE, "config of made_for", rows["config"])
    for name, value in config.items():
        if not (value is None or isinstance(value, (str, int, bool))):
            raise ConfigError(
                f"{_FILE}: {shown(name)} of config of made_for must be a text, a whole number, true, false or null, "
                f"not {shown(value)}"
            )
    counts = {
        name: as_whole(_FILE, f"{name} of made_for", rows[name], 1, _MOST)
        for name in ("world", "replicas", "tensor_ranks")
    }
    return MadeFor(
        **counts,
        config=config,
        memory_budget_bytes=_bytes_or_none("memory_budget_bytes of made_for", rows["memory_budget_bytes"]),
        torch=as_text(_FILE, "torch of made_for", rows["torch"]),
        compute=as_text(_FILE, "compute of made_for", rows["compute"]),
    )


def _weight(what: str, data: object) -> WeightDecisions:
    rows = _fields(what, WeightDecisions, data, later=("quantised",))
    sizes = as_list(_FILE, f"shape of {what}", rows["shape"])
    rests = rows["rests"]
    check_fields(_FILE, f"rests of {what}", rests, RESTING, RESTING)
    for kind, tier in rests.items():
        if not isinstance(tier, str) or tier not in TIERS:
            raise ConfigError(
                f"{_FILE}: {kind} in rests of {what} must be one of {', '.join(TIERS)}, not {shown(tier)}"
            )
    return WeightDecisions(
        tuple(as_whole(_FILE, f"a size in shape of {what}", n, 0) for n in sizes),
        as_text(_FILE, f"dtype of {what}", rows["dtype"]),
        rests,
        as_flag(_FILE, f"kept of {what}", rows["kept"]),
        _bytes_or_none(f"tile_bytes of {what}", rows["tile_bytes"], 1),
        as_flag(_FILE, f"quantised of {what}", rows.get("quantised", False)),
    )


def _frame(what: str, data: object) -> FrameDecisions:
    rows = _fields(what, FrameDecisions, data)

    def text(name: str) -> str:
        return as_text(_FILE, f"{name} of {what}", rows[name])

    def flag(name: str) -> bool:
        return as_flag(_FILE, f"{name} of {what}", rows[name])

    def counts(name: str, phases: tuple[str, ...]) -> dict[str, dict[str, int]]:
        table = rows[name]
        check_fields(_FILE, f"{name} of {what}", table, phases, phases)
        return {
            phase: {
                key: as_whole(_FILE, f"{shown(key)} in {name}.{phase} of {what}", n, 1, _MOST)
                for key, n in as_object(_FILE, f"{name}.{phase} of {what}", table[phase]).items()
            }
            for phase in phases
        }

    kind = text("kind")
    if kind not in PHASES:
        raise ConfigError(f"{_FILE}: kind of {what} must be one of {', '.join(PHASES)}, not {shown(kind)}")
    inputs = as_list(_FILE, f"inputs of {what}", rows["inputs"])
    return FrameDecisions(
        text("function"),
        text("reads"),
        kind,
        tuple(as_text(_FILE, f"one of inputs of {what}", i) for i in inputs),
        text("graph"),
        as_whole(_FILE, f"bucket_bytes of {what}", rows["bucket_bytes"], 0),
        text("bucket_why"),
        flag("recompute"),
        flag("tile_mlp"),
        _bytes_or_none(f"mlp_tile_bytes of {what}", rows["mlp_tile_bytes"]),
        flag("tile_heads"),
        counts("distances", PHASES[kind]),
        counts("tiles", PHASES[kind]),
        _values(f"values of {what}", rows["values"]),
        flag("reduce_each_micro_batch"),
        as_whole(_FILE, f"plans_tried of {what}", rows["plans_tried"], 0),
    )


def _values(what: str, data: object) -> SavedValues:
    rows = _fields(what, SavedValues, data)
    sets = {
        name: {
            key: as_text(_FILE, f"{shown(key)} in {name} of {what}", said)
            for key, said in as_object(_FILE, f"{name} of {what}", rows[name]).items()
        }
        for name in ("saved", "made_again", "away")
    }
    for one, other in (("saved", "made_again"), ("saved", "away"), ("made_again", "away")):
        for name in sets[one].keys() & sets[other].keys():
            raise ConfigError(f"{_FILE}: {shown(name)} of {what} is in {one} and in {other}; leave it in one")
    hidden = rows["hidden"]
    if hidden is not None:
        names = as_list(_FILE, f"hidden of {what}, where it is not null,", hidden)
        hidden = tuple(as_text(_FILE, f"one of hidden of {what}", n) for n in names)
    return SavedValues(
        _bytes_or_none(f"limit_bytes of {what}", rows["limit_bytes"]),
        hidden,
        **sets,
        found=as_text(_FILE, f"found of {what}", rows["found"]),
    )
