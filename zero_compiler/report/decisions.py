"""The decisions of a plan, put together from a model and its frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..config import Config
from ..ir.decisions import RESTING, MadeFor, PlanDecisions, WeightDecisions, dtype_name
from ..ir.facts import ParamRef
from ..passes.base import ParamPlan
from ..sharded.gather_wire import wire_of
from ..sharded.sharded_model import ShardedModel
from .frame import Frame

# Fields of Config without which a plan is another one. The others are decisions themselves, or change no plan, or say
# how much there may be of something, which is checked again.
BOUND = (
    "stage",
    "param_dtype",
    "gather_dtype",
    "second_shard",
    "reduce_dtype",
    "reduce_between_hosts_dtype",
    "tile_bytes",
    "offload_activations",
    "partition_activations",
)


def part_prefixes(sharded_models: Sequence[ShardedModel]) -> dict[str, str]:
    """What names of weights begin with in a plan, by the key of their part of the model: its number, where several
    parts were sharded by themselves, in the order in which they were made."""
    parts = sorted(sharded_models, key=lambda m: m.identity.made)
    return {m.key: "" if len(parts) == 1 else f"{at}:" for at, m in enumerate(parts)}


def made_for(sharded_models: Sequence[ShardedModel], config: Config) -> MadeFor:
    """What a plan of a model holds for.

    Args:
        config: of one of its frames.
    """
    first, fields = sharded_models[0], config.to_dict()
    tensor = first.group.tensor
    return MadeFor(
        first.group.world,
        first.group.copies,
        1 if tensor is None else tensor.world,
        {name: fields[name] for name in BOUND},
        config.memory_budget_bytes,
        torch.__version__,
        config.compute,
    )


def decisions_of(sharded_models: Sequence[ShardedModel], frames: Sequence[Frame]) -> PlanDecisions | None:
    """What was decided of a model; None where no frame of it is planned."""
    found = tuple(f.decisions for f in frames if f.decisions is not None)
    if not found:
        return None
    prefixes, plans = part_prefixes(sharded_models), dict[ParamRef, ParamPlan]()
    for frame in frames:
        plans.update(frame.params)
    weights = {
        f"{prefixes[m.key]}{name}": WeightDecisions(
            tuple(info.shape),
            dtype_name(info.layout.dtype),
            {kind: m.tiers.tier(kind, name) for kind in RESTING},
            *_gathered(plans, ParamRef(m.key, name)),
            quantised=wire_of(m, name) is not None,  # also of what eager code alone gathers
        )
        for m in sharded_models
        for name, info in m.params.items()
    }
    return PlanDecisions(made_for(sharded_models, frames[0].config), weights, found)


def _gathered(plans: Mapping[ParamRef, ParamPlan], ref: ParamRef) -> tuple[bool, int | None]:
    """Whether a weight stays gathered, and how many bytes of it are gathered at a time where it is in tiles."""
    plan = plans.get(ref)
    if plan is None or not plan.sharded:
        return False, None
    row_bytes = plan.world * (plan.numel // plan.shape[0]) * plan.gather_dtype.itemsize
    tile_bytes = plan.tile_rows * row_bytes if plan.tile_rows else None
    return plan.stage == 3 and plan.kept, tile_bytes
