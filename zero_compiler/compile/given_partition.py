"""Phases of the very graph that a plan file was made for: cut as it says, and searched for no more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import fx

from .. import passes
from ..cost.cost import CostModel
from ..errors import PassRefused
from ..ir.decisions import SavedValues
from ..plan import budget
from ..plan.activation_search import Held, Partition, Phases, check_held
from .found_decisions import named_values
from .frame_state import FrameState
from .plan_choice import PlanChoice


def values_of(state: FrameState, graphs: Phases) -> SavedValues:
    """What forward hands to backward, where nothing of it is in parts yet."""
    backward = graphs["backward"].graph
    remade = passes.remade(backward, CostModel(state.machine), state.fused)
    return named_values(graphs, remade, passes.offloaded(backward))


def partition_as_given(
    state: FrameState,
    adopt: Callable[[PlanChoice], None],
    partition: Partition,
    held_bytes: Held,
    parts_first: bool,
) -> Phases:
    """Phases as a plan file says.

    The values that it has are those that its limit gives, unless it was edited, or the machine is another one: then
    they are named to the partitioner.

    Args:
        adopt: goes on from another choice.
        parts_first: nothing is sent to another tier before some of it is in parts.

    Raises:
        ConfigError: it says what cannot be.
        MemoryBudgetError: these are more activations than a budget for them allows.
    """
    given, activations = state.given, state.config.activation_budget_bytes
    assert given is not None
    wanted = given.values
    _reduce_as_given(state)
    allowed = wanted.hidden is not None and bool(state.tiers)
    adopt(replace(state.choice, away=frozenset(wanted.hidden or ()) if allowed else None))
    graphs = partition(wanted.limit_bytes)
    found = values_of(state, graphs)
    if not given.are_these(found, parts_first):
        adopt(replace(state.choice, named=given.named(found, state.tiers, parts_first)))
        try:
            graphs = partition(wanted.limit_bytes)
        except PassRefused as refused:
            raise given.plan.refuse(str(refused)) from None
        given.check_values(values_of(state, graphs))
    given.set_tiles(graphs)
    if activations is not None:
        check_held(held_bytes(graphs), activations)
    return graphs


def _reduce_as_given(state: FrameState) -> None:
    """How often the gradients of a library's micro-batches are reduced."""
    assert state.given is not None
    assert state.given.frame is not None
    sharded_models = [p for p in state.sharded_models.values() if p.may_reduce_each and not p.sync]
    for sharded_model in sharded_models:
        sharded_model.agreed.reduces_each |= state.given.frame.reduce_each_micro_batch
    if sharded_models:
        memory, budget_bytes = state.memory([]), state.config.memory_budget_bytes
        state.frame.accumulation = budget.accumulation_text(memory, budget_bytes, state.accumulates)


def hold_to_the_rest(state: FrameState) -> None:
    """Weights stay gathered as a plan file says: behind distances, which are explained as if none did."""
    assert state.given is not None
    assert state.given.frame is not None
    state.given.hold_kept(state.params, state.given.frame.kind)
    state.plan_again()
    state.frame.plans_tried = state.given.frame.plans_tried


def inference_as_given(state: FrameState, gm: fx.GraphModule) -> fx.GraphModule:
    """A forward without gradients as a plan file says."""
    assert state.given is not None
    state.given.set_tiles({"inference": gm})
    hold_to_the_rest(state)
    return gm
