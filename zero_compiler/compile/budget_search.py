"""Forward and backward of a frame, cut from its joint graph so that they fit its budgets."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition

from .. import passes
from ..cost.cost import CostModel
from ..emit.segments import SegmentCompiler
from ..errors import ConfigError
from ..ir import facts, ops, spec
from ..ir.decisions import INFERENCE, TRAINING
from ..ir.facts import ParamRef
from ..memory import live
from ..passes import Context, PassOptions, run_passes, run_split
from ..plan import budget
from ..plan.activation_search import Phases, check_held
from . import stored_plans
from .found_decisions import partitioned
from .frame_state import FrameState
from .given_partition import hold_to_the_rest, inference_as_given, partition_as_given, values_of
from .phase_lowering import Lowering
from .plan_choice import PlanChoice
from .search.measure_orders import MeasureOrders, Plan, tiles_in
from .search.measures import Measures
from .search.overrun import Overrun
from .search.rank_decisions import RankDecisions
from .search.weight_tiles import WeightTiles


@dataclass(frozen=True)
class _Known(Plan):
    """Partitioned phases, and all that they follow from beside the joint graph."""

    asked: tuple[int, Context, PassOptions]


class Fitting:
    """Cuts a frame's joint graph so that it fits what the user gave."""

    def __init__(self, state: FrameState, lowering: Lowering, segments: SegmentCompiler) -> None:
        self.state = state
        self.lowering = lowering
        self.decisions = RankDecisions(state)
        self.overrun = Overrun(state, lowering, segments)
        self.weight_tiles = WeightTiles(state, lowering, self.overrun)
        self.measures = Measures(state, self.overrun, self.weight_tiles, self.decisions, self._adopt)
        self.orders = MeasureOrders(
            lowering, self.overrun, self.weight_tiles, self.measures, self.decisions, self._adopt
        )
        self._min_cuts: dict[
            float, frozenset[str]
        ] = {}  # what a partition saves that keeps less, as found before
        self._known: list[_Known] = []
        # By forward, within how many bytes it was partitioned, and what was known then to cost nothing elsewhere.
        self._limits: weakref.WeakKeyDictionary[fx.GraphModule, tuple[int | None, frozenset[str] | None]] = (
            weakref.WeakKeyDictionary()
        )

    def _joint(self, gm: fx.GraphModule, outputs: int, activation_bytes: int | None) -> None:
        state = self.state
        context = replace(state.context("joint"), forward_outputs=outputs)
        options = replace(state.options("joint"), activation_bytes=activation_bytes)
        run_passes(
            gm.graph, passes.joint_passes(options, self._min_cuts), context, state.trace, state.dump_dir()
        )
        state.order_weights(gm.graph)

    # Long: what is tried for a budget, in order, from what costs least to what costs most.
    def partition(self, gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Phases:
        """Rewrite the joint graph and partition it into forward and backward, within the budgets."""
        state = self.state
        state.begin(gm.graph, TRAINING)
        stored_plans.take(state)
        activations, memory = state.config.activation_budget_bytes, state.config.memory_budget_bytes
        # Where no budget chooses, what waits elsewhere is chosen once, and what ranks save alike is in parts by then.
        parts_first = state.config.partition_activations and activations is None and memory is None

        def partition(nbytes: int | None) -> Phases:
            """Forward and backward whose activations take at most so many bytes."""
            if nbytes is not None:
                return partition_anew(nbytes)
            return self._partition_once(gm.graph, partition_anew)

        def partition_anew(nbytes: int | None = None) -> Phases:
            once = activations is None and memory is None and not state.is_given
            joint, hidden = gm if once else facts.copy_module(gm), state.choice.away
            self._joint(joint, kwargs["num_fwd_outputs"], nbytes)
            choice = state.choice
            gathered = passes.gathered_in_backward(
                joint.graph, state.params, choice.bucket_bytes, choice.recompute
            )
            state.choice = replace(choice, backward_params=gathered, reduced=spec.reduced_by(joint.graph))
            forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
            spec.verify_partition(forward.graph, kwargs["num_fwd_outputs"], backward.graph)
            second = passes.second_sharded(forward.graph, backward.graph, gathered, state.params)
            state.choice = replace(state.choice, second=second)
            if not parts_first:
                self._offload(forward, backward, kwargs["num_fwd_outputs"], nbytes)
            facts.set_returned(forward.graph, backward.graph, kwargs["num_fwd_outputs"])
            self._limits[forward] = nbytes, hidden
            return {"forward": forward, "backward": backward}

        def planned() -> Phases:
            graphs = partition(None)
            if activations is None:
                return graphs
            return self.measures.within_activations(partition, graphs, activations)

        if state.is_given:
            graphs = partition_as_given(
                state, self._adopt, partition_anew, self.overrun.held_bytes, parts_first
            )
        else:
            self._check_least(gm.graph)
            graphs = partition(None)
            if self._reduces_each(graphs):
                graphs = partition(None)  # in tiles of the size that it is to begin with
            if self.decisions.decided("mlp-activations") or self.decisions.is_held_to("mlp-memory"):
                self.measures.tile_mlps(True)
                graphs = partition(None)
            if self.decisions.is_held_to("heads"):
                self.measures.tile_heads(True)
                graphs = partition(None)
            if activations is not None:
                graphs = self.measures.within_activations(partition, graphs, activations)
            if memory is not None and state.sharded_models:
                self.overrun.count_compiled(graphs, memory)
                graphs = self.orders.fit_memory(partition, planned, graphs, memory)
                if activations is not None:
                    check_held(self.overrun.held_bytes(graphs), activations)
        values = values_of(state, graphs)
        if state.config.partition_activations:
            self._partition_activations(graphs, kwargs["num_fwd_outputs"])
        if parts_first:
            self._offload(graphs["forward"], graphs["backward"], kwargs["num_fwd_outputs"], None)
        facts.set_returned(graphs["forward"].graph, graphs["backward"].graph, kwargs["num_fwd_outputs"])
        if memory is not None and state.sharded_models:
            self._spend_budget(graphs, memory)
            state.frame.plans_tried, state.frame.search_ended = self.lowering.trials, self.lowering.ended
        if state.is_given:
            hold_to_the_rest(state)
        self._known.clear()
        self._report(graphs, kwargs["num_fwd_outputs"])
        state.partitioned = partitioned(graphs, values, *self._limits[graphs["forward"]])
        return graphs

    def _report(self, graphs: Phases, num_outputs: int) -> None:
        """What the frame tells of its phases."""
        frame, backward = self.state.frame, graphs["backward"].graph
        frame.held_bytes = self.overrun.held_bytes(graphs)
        frame.num_outputs = num_outputs
        frame.saved_bytes = facts.saved_bytes(backward)
        frame.offloaded = passes.offloaded(backward)
        frame.remade = passes.remade(backward, CostModel(self.state.machine), self.state.fused)

    def _reduces_each(self, graphs: Phases) -> bool:
        """Whether, where a library accumulates, the gradients of every micro-batch are reduced from here on.

        Whole gradients wait where they fit beside ``graphs``, for which nothing was given up. Else they are reduced
        each time, which costs their bytes on the link, and less than to make activations again or to tile weights.
        Decided once, by rank 0 for all, before anything else is.
        """
        state = self.state
        sharded_models = [p for p in state.sharded_models.values() if p.may_reduce_each and not p.sync]
        if not sharded_models:
            return False
        budget_bytes, found = state.config.memory_budget_bytes, False
        if budget_bytes is not None and state.accumulates:
            over = self.overrun.over_in_small_tiles(graphs, budget_bytes)
            found = self.decisions.agreed("reduces-each", over > 0)
            for sharded_model in sharded_models:
                sharded_model.agreed.reduces_each |= found
        state.frame.accumulation = budget.accumulation_text(state.memory([]), budget_bytes, state.accumulates)
        return found

    def inference(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Rewrite the graph of a forward without gradients, within the budget of memory where that can be."""
        self.state.begin(gm.graph, INFERENCE)
        stored_plans.take(self.state)
        as_given = self.state.is_given
        gm = inference_as_given(self.state, self._inferred(gm)) if as_given else self._fitting_inference(gm)
        self.state.partitioned = partitioned({"inference": gm})
        return gm

    def _fitting_inference(self, gm: fx.GraphModule) -> fx.GraphModule:
        state = self.state
        budget_bytes = state.config.memory_budget_bytes
        if budget_bytes is None or not state.sharded_models:
            return self._inferred(gm)
        self._check_least(gm.graph)

        def planned() -> Phases:
            return {"inference": self._inferred(facts.copy_module(gm))}

        first = planned()
        if self.decisions.is_held_to("heads"):
            self.measures.tile_heads(True)
            first = planned()
        self.overrun.count_compiled(first, budget_bytes)
        fitted = self.measures.fit_buckets("buckets-inference", planned, first, budget_bytes)
        if self.overrun.over_in_small_tiles(fitted, budget_bytes) <= 0:
            return fitted["inference"]
        # What is gathered stays the same: no other rank need know of it.
        state.choice = replace(state.choice, tile_mlp=True)
        tiled = self._inferred(gm)
        self.overrun.over_in_small_tiles({"inference": tiled}, budget_bytes)
        return tiled

    def _inferred(self, gm: fx.GraphModule) -> fx.GraphModule:
        state = self.state
        pipeline = passes.inference_passes(state.options("joint"))
        run_passes(gm.graph, pipeline, state.context("joint"), state.trace, state.dump_dir())
        state.order_weights(gm.graph)
        return gm

    def _partition_once(self, joint: fx.Graph, anew: Callable[[], Phases]) -> Phases:
        """Phases without a limit, made ``anew`` unless they were: buckets of another size change only what is sent
        together, as long as the same weights are smaller than a bucket."""
        state = self.state
        marks = joint.find_nodes(op="call_function", target=ops.unshard)
        small = sum(facts.bytes_of(facts.value(m)) < state.choice.bucket_bytes for m in marks)
        options = replace(state.options("joint"), bucket_bytes=0)
        asked = small, replace(state.context("joint"), units={}), options
        for known in self._known:
            if known.asked == asked:
                then = known.choice
                state.choice = replace(
                    state.choice,
                    order=then.order,
                    away=then.away,
                    backward_params=then.backward_params,
                    reduced=then.reduced,
                    second=then.second,
                )
                for phase, gm in known.graphs.items():
                    passes.set_tiles(gm.graph, known.tiles[phase])
                state.plan_again()  # units follow the size of buckets
                return known.graphs
        graphs = anew()
        self._known.append(_Known(graphs, tiles_in(graphs), state.choice, asked))
        return graphs

    def _offload(
        self,
        forward: fx.GraphModule,
        backward: fx.GraphModule,
        num_outputs: int,
        activation_bytes: int | None,
    ) -> None:
        """What waits on another tier between the two; and, where nothing binds, what costs no time there."""
        state = self.state
        if state.choice.away is None:
            return
        busy_us = tuple(self._fetched_us(tier) for tier in state.tiers)
        named = state.choice.named is not None
        offload = passes.OffloadActivations(busy_us, state.choice.away, state.tiers, activation_bytes, named)
        graphs = forward.graph, backward.graph
        run_split(offload, *graphs, num_outputs, state.context("joint"), state.trace, state.dump_dir())
        if activation_bytes is None:
            away = frozenset(a.name for a in passes.offloaded(backward.graph))
            state.choice = replace(state.choice, away=away)

    def _fetched_us(self, tier: str) -> float:
        """Time in which the lane of a tier brings the parameters that rest behind it."""
        link, _ = self.state.machine.links(tier)
        far = [p for p in self.state.params.values() if tier in p.path]
        return sum(link.us(p.gather_bytes // p.world) for p in far)

    def _adopt(self, choice: PlanChoice) -> None:
        """Go on from another choice: what a partition saves that keeps less is found anew."""
        self._min_cuts.clear()
        self.state.choice = choice

    def _check_least(self, graph: fx.Graph) -> None:
        """What every plan of a graph takes fits the budget of memory: else nothing need be tried.

        Raises:
            MemoryBudgetError: it does not.
        """
        state = self.state
        budget_bytes = state.config.memory_budget_bytes
        if budget_bytes is not None and state.sharded_models:
            budget.check_least(state.memory([]), graph, budget_bytes, state.relatives)

    def _partition_activations(self, graphs: Phases, num_outputs: int) -> None:
        """Once for what budgets have chosen: how often they choose again may differ between ranks."""
        state = self.state
        sharded_model = next((p for p in state.sharded_models.values() if p.group.tensor is not None), None)
        if sharded_model is None or (peers := sharded_model.group.tensor) is None:
            raise ConfigError(
                "partition_activations=True needs tensor-parallel ranks, which save the same activations: give "
                'zero.shard a mesh with a dimension called "tp" and call parallelize_module before it, or leave it out'
            )
        show = functools.partial(state.loader.show, sharded_model)
        partition = passes.PartitionActivations(str(peers.pg.group_name), peers.world, show)
        both = graphs["forward"].graph, graphs["backward"].graph
        run_split(partition, *both, num_outputs, state.context("joint"), state.trace, state.dump_dir())
        self.lowering.forget(graphs)

    def _spend_budget(self, graphs: Phases, budget_bytes: int) -> None:
        """Plan both phases with every weight released, and keep what fits in the room that is left.

        What does not fit even so is tried again with the largest weights in tiles. Prefetch comes next: its buffers
        serve one unit after the other, in both phases, where the bytes of a kept weight save one gather. Between graph
        breaks no weight is kept: the room may be needed by frames that are not known yet.
        """
        state = self.state
        if state.config.tile_bytes is None and not state.is_given:
            self.weight_tiles.decide(graphs, budget_bytes)
        if not state.is_given and self.lowering.least_peak(graphs) > budget_bytes:
            self.overrun.check_planned(self.lowering.trials_of(graphs), budget_bytes)
        lowered = self.lowering.with_distances(graphs)
        programs = [low.emitted.program for low in lowered.values()]
        state.planned = {p.phase: p for p in programs}
        sharded_models = list(state.sharded_models.values())
        memory = state.memory(programs)
        if not state.fused:  # else it may take less than its operators one by one: its code decides then
            self.overrun.check_planned(programs, budget_bytes)
        if state.is_given:
            return
        # A forward before zero_grad() has the last step's gradients beside it: weights are not kept at its expense.
        gradients = max(
            memory.at_rest + live.most(p, memory.gradients) for p in programs if p.phase == "forward"
        )
        room = max(0, budget_bytes - max(gradients, state.peak(programs))) if state.is_whole_forward else 0

        def over_bytes(kept: Mapping[ParamRef, bool]) -> int:
            tables = state.loader.kept_offsets()
            before = {key: dict(table) for key, table in tables.items()}
            state.try_kept(kept)
            over = self.lowering.trial_peak(graphs) - budget_bytes
            for key, table in tables.items():  # it was only tried: nothing has a place yet
                table.clear()
                table.update(before.get(key, {}))
            return over

        gathered = state.choice.backward_params or ()
        budget.keep(sharded_models, state.params, gathered, room, state.loader.tightest, over_bytes)
        state.try_kept({})
