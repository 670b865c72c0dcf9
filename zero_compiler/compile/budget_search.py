"""Forward and backward within their budgets: what is saved, how weights are tiled, what stays gathered."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition

from .. import passes
from ..cost.cost import CostModel
from ..emit.segments import SegmentCompiler
from ..errors import ConfigError, MemoryBudgetError
from ..ir import facts, ops, spec
from ..ir.facts import ParamRef
from ..ir.program import Program
from ..memory import live
from ..memory.verify import verify_program
from ..passes import Context, PassOptions, run_passes, run_split
from ..plan import budget, cross_frame_memory, schedule, tiling
from ..plan.activation_search import Partition, Phases, check_held, within_activations, within_memory
from .frame_state import FrameState
from .phase_lowering import Lowering
from .plan_choice import PlanChoice

# Orders of measures for a budget of memory: tiles of weights after all others; before fewer activations are saved; or
# that, and backward may run costly operators again.
_LAST, _FIRST, _RECOMPUTE = "last", "first", "recompute"
_PARTS = 8  # before fewer activations are saved, the largest weight is gathered in so many tiles at least
_NEARLY = 1.02  # a plan that takes so much longer at most is as good
_SHARE = 4  # of what activations may take, an MLP's intermediate takes one part in so many at first


@dataclass(frozen=True)
class _Plan:
    """Phases, in how many tiles of tokens they are done, and the choice that they belong to."""

    graphs: Phases
    tiles: dict[str, list[int]]
    choice: PlanChoice


@dataclass(frozen=True)
class _Known(_Plan):
    """Partitioned phases, and all that they follow from beside the joint graph."""

    asked: tuple[int, Context, PassOptions]


def _tiles_in(graphs: Phases) -> dict[str, list[int]]:
    return {phase: passes.tiles_in(gm.graph) for phase, gm in graphs.items()}


class Fitting:
    """Cuts a frame's joint graph so that it fits what the user gave."""

    def __init__(self, state: FrameState, lowering: Lowering, segments: SegmentCompiler) -> None:
        self.state = state
        self.lowering = lowering
        self.segments = segments
        self._min_cuts: dict[
            float, frozenset[str]
        ] = {}  # what a partition saves that keeps less, as found before
        self._known: list[_Known] = []

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
        activations, memory = state.config.activation_budget_bytes, state.config.memory_budget_bytes
        # Where no budget chooses, what waits elsewhere is chosen once, and what ranks save alike is in parts by then.
        parts_first = state.config.partition_activations and activations is None and memory is None

        def partition(nbytes: int | None) -> Phases:
            """Forward and backward whose activations take at most so many bytes."""
            return (
                partition_anew(nbytes)
                if nbytes is not None
                else self._partition_once(gm.graph, partition_anew)
            )

        def partition_anew(nbytes: int | None = None) -> Phases:
            joint = gm if activations is None and memory is None else facts.copy_module(gm)
            self._joint(joint, kwargs["num_fwd_outputs"], nbytes)
            choice = state.choice
            gathered = passes.gathered_in_backward(
                joint.graph, state.params, choice.bucket_bytes, choice.recompute
            )
            state.choice = replace(choice, backward_params=gathered, reduced=spec.reduced_by(joint.graph))
            forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
            spec.verify_partition(forward.graph, kwargs["num_fwd_outputs"], backward.graph)
            if not parts_first:
                self._offload(forward, backward, kwargs["num_fwd_outputs"], nbytes)
            facts.set_returned(forward.graph, backward.graph, kwargs["num_fwd_outputs"])
            return {"forward": forward, "backward": backward}

        def planned() -> Phases:
            graphs = partition(None)
            return graphs if activations is None else self._within_activations(partition, graphs, activations)

        self._check_least(gm.graph)
        graphs = partition(None)
        if self._reduces_each(graphs):
            graphs = partition(None)  # in tiles of the size that it is to begin with
        if self._decided("mlp-activations") or self._is_held_to("mlp-memory"):
            self._tile_mlps(True)
            graphs = partition(None)
        if self._is_held_to("heads"):
            self._tile_heads(True)
            graphs = partition(None)
        if activations is not None:
            graphs = self._within_activations(partition, graphs, activations)
        if memory is not None and state.sharded_models:
            self._count_compiled(graphs, memory)
            graphs = self._fit_memory(partition, planned, graphs, memory)
            if activations is not None:
                check_held(self._held_bytes(graphs), activations)
        if state.config.partition_activations:
            self._partition_activations(graphs, kwargs["num_fwd_outputs"])
        if parts_first:
            self._offload(graphs["forward"], graphs["backward"], kwargs["num_fwd_outputs"], None)
        facts.set_returned(graphs["forward"].graph, graphs["backward"].graph, kwargs["num_fwd_outputs"])
        if memory is not None and state.sharded_models:
            self._spend_budget(graphs, memory)
            state.frame.plans_tried = self.lowering.trials
        self._known.clear()
        state.frame.held_bytes = self._held_bytes(graphs)
        state.frame.saved_bytes = facts.saved_bytes(graphs["backward"].graph)
        state.frame.offloaded = passes.offloaded(graphs["backward"].graph)
        state.frame.remade = passes.remade(graphs["backward"].graph, CostModel(state.machine), state.fused)
        return graphs

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
            over = self._over_in_small_tiles(graphs, budget_bytes)
            found = self._agreed("reduces-each", over > 0)
            for sharded_model in sharded_models:
                sharded_model.agreed.reduces_each |= found
        state.frame.accumulation = budget.accumulation_text(state.memory([]), budget_bytes, state.accumulates)
        return found

    def _fit_memory(
        self, partition: Partition, planned: Callable[[], Phases], graphs: Phases, budget_bytes: int
    ) -> Phases:
        """Phases that fit the budget of memory once weights are in tiles, with measures in the order that is predicted
        to take the least time: rank 0 decides for all.

        Tiles of weights cost latencies. Where a budget is tight because of weights they alone may do, and all that is
        done before them costs time for nothing; where it is activations that do not fit, it is the other way round.

        Args:
            planned: phases in buckets of the size that the state has.
        """
        state = self.state
        before, whole = state.choice, graphs
        if state.config.tile_bytes is not None:
            return self._weights_last(partition, planned, graphs, budget_bytes)
        key, why = self._key("order"), state.frame.bucket_why
        decided = state.first.agreed.distances.get(key)
        if decided is None:
            plans = {_LAST: self._noted(self._weights_last(partition, planned, whole, budget_bytes))}
            wanted = self._fastest(partition, plans, before, whole, budget_bytes)
            decided = state.loader.decide(state.first, key, wanted)
            if decided != _LAST:
                state.set_bucket_bytes(before.bucket_bytes, why)
            if decided in plans:
                return self._again(plans[decided])
            self._adopt(before)
            state.plan_again()
        if decided == _LAST:
            return self._weights_last(partition, planned, whole, budget_bytes)
        return self._weights_first(partition, whole, budget_bytes, decided == _RECOMPUTE)

    def _fastest(
        self,
        partition: Partition,
        plans: dict[str, _Plan],
        before: PlanChoice,
        whole: Phases,
        budget_bytes: int,
    ) -> str:
        """The order of measures whose plan fits in the least predicted time.

        Args:
            plans: with the one that has tiles of weights last; the others are added as they are made.
            before, whole: the choice that they begin with, and its phases.
        """
        state = self.state
        last = plans[_LAST].graphs
        if last is whole and state.choice == before and self._over(whole, budget_bytes) <= 0:
            return _LAST  # nothing was given up but larger tiles of tokens
        found = {_LAST: self._completed(plans[_LAST], budget_bytes)}
        self._adopt(before)
        state.plan_again()
        passes.coarsest(gm.graph for gm in whole.values())
        enough = 0, _NEARLY * self.lowering.predicted_us(whole)
        for order in (_FIRST, _RECOMPUTE):
            if min(found.values()) <= enough or self.lowering.is_exhausted:
                break
            self._adopt(before)
            state.plan_again()
            plans[order] = self._noted(
                self._weights_first(partition, whole, budget_bytes, order == _RECOMPUTE)
            )
            found[order] = self._completed(plans[order], budget_bytes)
        best = min(found, key=found.__getitem__)
        over, us = found[best]
        return best if (over, _NEARLY * us) < found[_LAST] else _LAST

    def _completed(self, plan: _Plan, budget_bytes: int) -> tuple[int, float]:
        """By how many bytes a plan passes the budget with weights in tiles, and the predicted time of one that fits."""
        graphs = self._again(plan)
        self._tiles_of_weights(graphs, self._undecided(graphs), budget_bytes)
        over = max(0, self._over(graphs, budget_bytes))
        return over, 0.0 if over else self.lowering.predicted_us(graphs)

    def _noted(self, graphs: Phases) -> _Plan:
        return _Plan(graphs, _tiles_in(graphs), self.state.choice)

    def _again(self, plan: _Plan) -> Phases:
        """Go on from a plan as it was."""
        self._adopt(plan.choice)
        self.state.plan_again()
        for phase, gm in plan.graphs.items():
            passes.set_tiles(gm.graph, plan.tiles[phase])
        return plan.graphs

    def _weights_first(
        self, partition: Partition, graphs: Phases, budget_bytes: int, recompute: bool
    ) -> Phases:
        """Phases that fit with weights in tiles, of as many bytes as suit the link: with as many activations as that
        leaves room for.

        Args:
            recompute: backward may run costly operators again.
        """
        state = self.state
        if recompute and not state.choice.recompute:
            self._adopt(replace(state.choice, recompute=True))
            graphs = partition(None)  # backward gathers more weights now
        passes.coarsest(gm.graph for gm in graphs.values())
        if undecided := self._undecided(graphs):
            largest = tiling.largest_bytes([state.params[ref] for ref in undecided])
            limit = max(tiling.LEAST_BYTES, min(state.choice.bucket_bytes, largest // _PARTS))
            state.try_tiles(dict.fromkeys(undecided, limit))
        over = functools.partial(self._over_in_small_tiles, budget_bytes=budget_bytes)
        graphs = within_memory(partition, graphs, over, self._held_bytes)
        state.try_tiles({})
        return graphs

    def _weights_last(
        self, partition: Partition, planned: Callable[[], Phases], graphs: Phases, budget_bytes: int
    ) -> Phases:
        """Phases that fit, or come nearest, with all measures but tiles of weights, from what costs least."""
        state = self.state
        graphs = self._fit_buckets("buckets", planned, graphs, budget_bytes)
        over = self._over_in_small_tiles(graphs, budget_bytes) > 0
        if not state.choice.recompute and self._agreed("recompute", over):
            self._adopt(replace(state.choice, recompute=True))
            graphs = partition(None)  # backward gathers more weights now
        graphs = self._within_memory(partition, graphs, budget_bytes)
        over_by = functools.partial(self._over_in_small_tiles, budget_bytes=budget_bytes)
        if state.choice.away is not None and over_by(graphs) > 0:
            # On a CPU what files are read to is memory too: it may take more than they free.
            self._adopt(replace(state.choice, away=None))
            graphs = min(
                graphs, within_memory(partition, partition(None), over_by, self._held_bytes), key=over_by
            )
        return self._within_heads(partition, graphs, budget_bytes)

    def inference(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Rewrite the graph of a forward without gradients, within the budget of memory where that can be."""
        state = self.state
        budget_bytes = state.config.memory_budget_bytes
        if budget_bytes is None or not state.sharded_models:
            return self._inferred(gm)
        self._check_least(gm.graph)

        def planned() -> Phases:
            return {"inference": self._inferred(facts.copy_module(gm))}

        first = planned()
        if self._is_held_to("heads"):
            self._tile_heads(True)
            first = planned()
        self._count_compiled(first, budget_bytes)
        fitted = self._fit_buckets("buckets-inference", planned, first, budget_bytes)
        if self._over_in_small_tiles(fitted, budget_bytes) <= 0:
            return fitted["inference"]
        # What is gathered stays the same: no other rank need know of it.
        state.choice = replace(state.choice, tile_mlp=True)
        tiled = self._inferred(gm)
        self._over_in_small_tiles({"inference": tiled}, budget_bytes)
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
                )
                for phase, gm in known.graphs.items():
                    passes.set_tiles(gm.graph, known.tiles[phase])
                state.plan_again()  # units follow the size of buckets
                return known.graphs
        graphs = anew()
        self._known.append(_Known(graphs, _tiles_in(graphs), state.choice, asked))
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
        offload = passes.OffloadActivations(busy_us, state.choice.away, state.tiers, activation_bytes)
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

    def _held_bytes(self, graphs: Phases) -> int:
        """Most bytes that backward holds at once of what forward made, or of what it makes again.

        With what is read from files before it is wanted: where that begins stands in the schedule.
        """
        backward = graphs["backward"]
        if passes.offloaded(backward.graph):
            backward = self.lowering.scheduled(backward, "backward")
        return passes.held_bytes(backward.graph)

    def _fit_buckets(
        self, what: str, planned: Callable[[], Phases], graphs: Phases, budget_bytes: int
    ) -> Phases:
        """Phases with buckets as large as the budget allows, at most as large as suits the link; where none fit, with
        those of the least peak.

        This comes behind tiles of logits and before what costs more. A bucket in two costs one latency, at most as long
        as its bytes take; what is made again costs its operators, weights in tiles a latency for every tile, MLPs in
        tiles the reading of their weights for each. Where smaller buckets are not enough, those find what is left.
        Decided once, by rank 0 for all.

        Args:
            planned: phases in buckets of the size that the state has.
        """
        state = self.state
        sizes = state.smaller_buckets()
        if not sizes:
            return graphs
        first, key = state.choice.bucket_bytes, self._key(what)
        text = state.first.agreed.distances.get(key)
        if text is None:
            best, least = first, self._over_in_small_tiles(graphs, budget_bytes)
            for size in sizes:
                if least <= 0:
                    break
                try:
                    graphs = self._in_buckets(size, planned)
                except MemoryBudgetError:
                    continue  # in these more must be saved than activation_budget_bytes allows
                over = self._over_in_small_tiles(graphs, budget_bytes)
                if over < least:
                    best, least = size, over
            text = state.loader.decide(state.first, key, str(best))
        size = int(text)
        if size != state.choice.bucket_bytes:
            graphs = self._in_buckets(size, planned)
        if size != first:
            state.set_bucket_bytes(
                size, f"the memory budget asks for less than {first:,}, which suits the link best"
            )
        return graphs

    def _in_buckets(self, nbytes: int, planned: Callable[[], Phases]) -> Phases:
        """Phases in buckets of so many bytes.

        Raises:
            MemoryBudgetError: there are none; the state is that of the phases before.
        """
        before = self.state.choice
        self._adopt(replace(before, bucket_bytes=nbytes))
        try:
            return planned()
        except MemoryBudgetError:
            self._adopt(before)
            raise

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

    def _over_in_small_tiles(self, graphs: Phases, budget_bytes: int) -> int:
        """By how many bytes the plan of ``graphs`` passes the budget, with tiles as small as it takes.

        The smallest tiles take the least: where they do not fit none do, and else what just fits lies between.
        """
        over, every = self._over(graphs, budget_bytes), [gm.graph for gm in graphs.values()]
        if over <= 0:
            return over
        sizes = [[passes.tiles_in(graph) for graph in every]]
        while passes.finer(every):
            sizes.append([passes.tiles_in(graph) for graph in every])

        def over_in(size: int) -> int:
            for graph, tiles in zip(every, sizes[size], strict=True):
                passes.set_tiles(graph, tiles)
            return self._over(graphs, budget_bytes)

        large, small = 0, len(sizes) - 1
        if small == 0 or (over := over_in(small)) > 0:
            return over
        while small - large > 1:
            middle = (large + small) // 2
            large, small = (large, middle) if over_in(middle) <= 0 else (middle, small)
        return over_in(small)

    def _count_compiled(self, graphs: Phases, budget_bytes: int) -> None:
        """Compile phases that a budget asks less of than their operators take one by one, where their code may fit.

        What fits so is left as it is. What is tried instead is counted by operators, as it is not compiled.
        """
        if self.state.fused and self._over(graphs, budget_bytes) > 0:
            if self.lowering.least_peak(graphs) <= budget_bytes and not self._held_over(graphs):
                self.lowering.count_compiled(graphs, self.segments)

    def _over(self, graphs: Phases, budget_bytes: int) -> int:
        """By how many bytes a plan passes the budget of memory, or that of activations where both are given."""
        return max(self.lowering.trial_peak(graphs) - budget_bytes, self._held_over(graphs))

    def _held_over(self, graphs: Phases) -> int:
        """By how many bytes backward passes the budget of activations; 0 where there is none."""
        allowed = self.state.config.activation_budget_bytes
        if allowed is None or "backward" not in graphs:
            return 0
        return max(0, self._held_bytes(graphs) - allowed)

    def _within_activations(self, partition: Partition, graphs: Phases, budget_bytes: int) -> Phases:
        """Phases whose activations fit; with MLPs in tiles where rank 0 finds no others.

        Raises:
            MemoryBudgetError: there are none.
        """
        refused: MemoryBudgetError | None = None
        if not self.state.choice.tile_mlp:
            try:
                graphs = within_activations(partition, graphs, budget_bytes, self._held_bytes)
            except MemoryBudgetError as error:
                refused = error
            if not self._agreed("mlp-activations", refused is not None):
                if refused is not None:
                    raise refused
                return graphs
        # Bytes of a tile; in the end as few as can be, and without files: what is read from them in time is held, too.
        for nbytes, files in ((budget_bytes // _SHARE, True), (0, True), (0, False)):
            self._tile_mlps(True, nbytes)
            if not files:
                self.state.choice = replace(self.state.choice, away=None)
            try:
                return within_activations(partition, partition(None), budget_bytes, self._held_bytes)
            except MemoryBudgetError as error:
                refused = error
        assert refused is not None
        raise refused

    def _within_memory(self, partition: Partition, graphs: Phases, budget_bytes: int) -> Phases:
        """Phases that fit, or those that come nearest; with MLPs in tiles where that serves rank 0 best.

        Tiles of weights come later, and MLPs in tiles of tokens exclude them: so what those would bring is tried.
        """
        state = self.state
        over = functools.partial(self._over_in_small_tiles, budget_bytes=budget_bytes)
        whole = within_memory(partition, graphs, over, self._held_bytes)
        if state.choice.tile_mlp:
            return whole
        if self._decided("mlp-memory") is None and self._over(whole, budget_bytes) > 0:
            least = self._least_peak(whole, budget_bytes)
            before = state.choice
            self._tile_mlps(True)
            tiled = within_memory(partition, partition(None), over, self._held_bytes)
            wanted = self._over(tiled, budget_bytes) <= 0 or (
                not self._held_over(tiled) and budget_bytes < least > self._least_peak(tiled, budget_bytes)
            )
            tried = state.choice
            self._adopt(before)  # ranks that try nothing ask from here
            if not self._agreed("mlp-memory", wanted):
                return whole
            self._adopt(tried)
            return tiled
        if not self._agreed("mlp-memory", False):
            return whole
        self._tile_mlps(True)
        return within_memory(partition, partition(None), over, self._held_bytes)

    def _within_heads(self, partition: Partition, graphs: Phases, budget_bytes: int) -> Phases:
        """Phases in which weights of heads can be gathered in tiles, where rank 0 finds that nothing else fits.

        Backward then makes logits again, where forward makes their gradient otherwise.
        """
        state = self.state
        if state.choice.tile_heads or state.config.tile_bytes is not None:
            return graphs
        over = functools.partial(self._over_in_small_tiles, budget_bytes=budget_bytes)
        tiled, wanted = None, False
        before = tried = state.choice
        if (
            self._decided("heads") is None
            and (least := self._least_peak(graphs, budget_bytes)) > budget_bytes
        ):
            self._tile_heads(True)
            tiled = within_memory(partition, partition(None), over, self._held_bytes)
            wanted = not self._held_over(tiled) and self._least_peak(tiled, budget_bytes) < least
            tried = state.choice
            self._adopt(before)  # ranks that try nothing ask from here
        if not self._agreed("heads", wanted):
            return graphs
        if tiled is not None:
            self._adopt(tried)
            return tiled
        self._tile_heads(True)
        return within_memory(partition, partition(None), over, self._held_bytes)

    def _tile_heads(self, tiled: bool) -> None:
        self._adopt(replace(self.state.choice, tile_heads=tiled))

    def _tile_mlps(self, tiled: bool, nbytes: int | None = None) -> None:
        self._adopt(replace(self.state.choice, tile_mlp=tiled, mlp_bytes=nbytes))

    def _least_peak(self, graphs: Phases, budget_bytes: int) -> int:
        """Predicted peak with weights in tiles, as small as the budget asks for."""
        peak = self._shrink_tiles(graphs, self._undecided(graphs), budget_bytes)
        self.state.try_tiles({})
        return peak

    def _decided(self, what: str) -> bool | None:
        """What was decided for all ranks before, if anything was."""
        first = self.state.first
        text = first.agreed.distances.get(self._key(what)) if first is not None else None
        return None if text is None else text == str(True)

    def _is_held_to(self, what: str) -> bool:
        """Whether it was decided for all ranks to do so, and not found later that another order of measures, which does
        without, takes less time."""
        first = self.state.first
        order = first.agreed.distances.get(self._key("order")) if first is not None else None
        return bool(self._decided(what)) and order in (None, _LAST)

    def _agreed(self, what: str, wanted: bool) -> bool:
        """What was decided for all ranks, now by rank 0 or before."""
        state = self.state
        if state.first is None:
            return wanted
        before = self._decided(what)
        if before is not None:
            return before
        return bool(state.loader.decide(state.first, self._key(what), str(wanted)) == str(True))

    def _key(self, what: str) -> str:
        """By weights and not by units, which change when weights are tiled: what was decided before that is found by a
        rank that compiles again, alone."""
        return schedule.key_of(what, [f"{ref.owner}:{ref.name}" for ref in self.state.choice.order])

    def _partition_activations(self, graphs: Phases, num_outputs: int) -> None:
        """Once for what budgets have chosen: how often they choose again may differ between ranks."""
        state = self.state
        sharded_model = next((p for p in state.sharded_models.values() if p.group.tensor is not None), None)
        if sharded_model is None:
            raise ConfigError(
                "partition_activations=True needs tensor-parallel ranks, which save the same activations: give "
                'zero.shard a mesh with a dimension called "tp" and call parallelize_module before it, or leave it out'
            )
        peers, show = sharded_model.group.tensor, functools.partial(state.loader.show, sharded_model)
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
        if state.config.tile_bytes is None:
            self._tile_weights(graphs, budget_bytes)
        if self.lowering.least_peak(graphs) > budget_bytes:
            # To write out all of the tiles that were too large even so would take longer than the search.
            self._check_planned(self.lowering.trials_of(graphs), budget_bytes)
        lowered = self.lowering.with_distances(graphs)
        programs = [low.emitted.program for low in lowered.values()]
        state.planned = {p.phase: p for p in programs}
        sharded_models = list(state.sharded_models.values())
        memory = state.memory(programs)
        if not state.fused:  # else it may take less than its operators one by one: its code decides then
            self._check_planned(programs, budget_bytes)
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

    def _check_planned(self, programs: Sequence[Program], budget_bytes: int) -> None:
        """Programs fit the budget of memory.

        Raises:
            MemoryBudgetError: they do not.
        """
        state = self.state
        memory = state.memory(programs)
        where = budget.peak_at([*programs, *state.waiting], memory.gradients)
        budget.check(memory, budget_bytes, where, list(state.sharded_models.values()))

    def _tile_weights(self, graphs: Phases, budget_bytes: int) -> None:
        """Gather the largest weights in tiles of half the bytes, and again, until the plan fits; then as few tiles as
        the budget needs.

        Decided once for a weight, for all ranks by the one with the least room. Weights of MLPs that are done in tiles
        of tokens stay whole. Between graph breaks tiles stay small: the room may be needed by frames that are not known
        yet.
        """
        state = self.state
        every, undecided = tiling.undecided(state.sharded_models, state.params), self._undecided(graphs)
        tiling.set_tile_rows(state.sharded_models, [ref for ref in every if ref not in undecided], None)
        if not undecided:
            return
        room = budget_bytes - self.lowering.trial_peak(graphs)
        chosen = self._tiles_of_weights(graphs, undecided, budget_bytes)
        tiling.agree_on_rows(state.sharded_models, undecided, chosen, room, state.loader.tightest)
        state.try_tiles({})
        # Those of another rank may be larger than what was tried here: tiles of tokens make up for it.
        self._over_in_small_tiles(graphs, budget_bytes)

    def _tiles_of_weights(
        self, graphs: Phases, undecided: Sequence[ParamRef], budget_bytes: int
    ) -> Mapping[ParamRef, int | None]:
        """Try tiles of weights that fit the budget, and those of tokens too, as large as they may be."""
        state = self.state
        peak = self._shrink_tiles(graphs, undecided, budget_bytes)
        chosen = state.choice.tile_bytes
        limit = chosen.get(undecided[0]) if undecided else None  # one for all so far
        if limit is None or peak > budget_bytes or not state.is_whole_forward:
            return chosen
        # Tiles of tokens were made as small as can be where nothing else had been found to fit.
        passes.coarsest(gm.graph for gm in graphs.values())
        self._over_in_small_tiles(graphs, budget_bytes)

        def fits(tile_bytes: Mapping[ParamRef, int | None]) -> bool:
            if self.lowering.is_exhausted:
                return False
            state.try_tiles(tile_bytes)
            return self.lowering.trial_peak(graphs) <= budget_bytes

        chosen = tiling.coarsen({ref: state.params[ref] for ref in undecided}, limit, fits)
        state.try_tiles(chosen)
        return chosen

    def _undecided(self, graphs: Phases) -> list[ParamRef]:
        """Weights of which tiles may be made for a budget."""
        state = self.state
        if state.config.tile_bytes is not None:
            return []
        tiled = [passes.read_by_tiles(gm.graph) for gm in graphs.values()] if state.choice.tile_mlp else []
        whole = frozenset().union(*tiled)
        return [ref for ref in tiling.undecided(state.sharded_models, state.params) if ref not in whole]

    def _shrink_tiles(self, graphs: Phases, undecided: Sequence[ParamRef], budget_bytes: int) -> int:
        """Make tiles of weights as small as the budget asks for; the peak that is left."""
        state = self.state
        while (peak := self.lowering.trial_peak(graphs)) > budget_bytes and undecided:
            limit = tiling.largest_bytes([state.params[ref] for ref in undecided]) // 2
            before = state.params
            if limit < tiling.LEAST_BYTES:
                break
            state.try_tiles(dict.fromkeys(undecided, limit))
            if state.params == before:
                break
        return peak

    def lend_gradients(self) -> None:
        """Between two backwards, let activations have the bytes of gradients where that lowers the peak."""
        state = self.state
        mine = list(state.frame.programs.values())
        sharded_models = state.relatives
        if not sharded_models or not mine:
            return
        others = [
            p for sharded_model in sharded_models for f in sharded_model.frames for p in f.programs.values()
        ]
        gradients = budget.memory_of(sharded_models, mine, 0).gradients
        most = max(live.most(p, gradients) for p in (*mine, *others))
        idle = live.idle_bytes(mine, gradients, most)
        for phase, program in state.frame.programs.items():
            if phase != "backward":
                state.frame.programs[phase] = replace(program, idle_bytes=idle)

    def check_budget(self) -> None:
        """What was compiled fits the budget, by the plan and by the verifier's own count; and so does it together with
        frames before it, which may find more there than was known of them.

        Raises:
            MemoryBudgetError: it does not.
        """
        state = self.state
        cross_frame_memory.link_backwards(state.frame, state.others, state.due.values())
        budget_bytes = state.config.memory_budget_bytes
        if budget_bytes is None or not state.sharded_models:
            return
        sharded_models, programs = state.relatives, list(state.frame.programs.values())
        every = [*programs, *state.waiting]
        memory = budget.memory_of(sharded_models, every, state.frame.kept_bytes)
        budget.check(memory, budget_bytes, budget.peak_at(every, memory.gradients), sharded_models)
        worlds = {ref.owner: plan.world for ref, plan in state.params.items()}
        room = budget_bytes - memory.at_rest + memory.gradients
        for program in programs:
            verify_program(program, worlds, room - program.beside_bytes, memory.gradients)
