"""Forward and backward within their budgets: what is saved, how weights are tiled, what stays gathered."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition

from . import budget, live, passes, schedule, tiling
from .cost import CostModel
from .errors import ConfigError
from .frame_state import FrameState
from .ir import facts, spec
from .lowering import Lowering
from .passes import run_passes
from .saving import Phases, held_bytes, within_activations, within_memory


class Fitting:
    """Cuts a frame's joint graph so that it fits what the user gave."""

    def __init__(self, state: FrameState, lowering: Lowering) -> None:
        self.state = state
        self.lowering = lowering
        self._cuts: dict[float, frozenset[str]] = {}  # what a smaller cut saves, as found before

    def _joint(self, gm: fx.GraphModule, outputs: int, activation_bytes: int | None) -> None:
        state = self.state
        context = replace(
            state.context("joint"),
            forward_outputs=outputs,
            activation_bytes=activation_bytes,
            cuts=self._cuts,
        )
        run_passes(gm.graph, passes.JOINT, context, state.trace, state.dump_dir())
        state.order_weights(gm.graph)

    def partition(self, gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Phases:
        """Rewrite the joint graph and cut it into forward and backward, within the budgets."""
        state = self.state
        activations, memory = state.config.activation_budget_bytes, state.config.memory_budget_bytes

        def cut(nbytes: int | None) -> Phases:
            """Forward and backward whose activations take at most so many bytes."""
            joint = gm if activations is None and memory is None else facts.copy_module(gm)
            self._joint(joint, kwargs["num_fwd_outputs"], nbytes)
            state.backward_params = passes.gathered_in_backward(
                joint.graph, state.params, state.bucket_bytes, state.recompute
            )
            state.reduced = spec.reduced_by(joint.graph)
            forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
            spec.verify_partition(forward.graph, kwargs["num_fwd_outputs"])
            return {"forward": forward, "backward": backward}

        graphs = cut(None)
        if activations is not None:
            graphs = within_activations(cut, graphs, activations)
        if memory is not None and state.policies:
            if not state.recompute and self._may_recompute(self._over_in_small_tiles(graphs, memory) > 0):
                state.recompute = True
                self._cuts.clear()
                graphs = cut(None)  # backward gathers more weights now
            graphs = within_memory(
                cut, graphs, functools.partial(self._over_in_small_tiles, budget_bytes=memory)
            )
        if state.config.partition_activations:
            self._partition_activations(graphs, kwargs["num_fwd_outputs"])
        if memory is not None and state.policies:
            self._spend_budget(graphs, memory)
        state.frame.held_bytes = held_bytes(graphs)
        state.frame.remade = passes.remade(graphs["backward"].graph, CostModel(state.machine), state.fused)
        return graphs

    def _over_in_small_tiles(self, graphs: Phases, budget_bytes: int) -> int:
        """By how many bytes the plan of ``graphs`` passes the budget, with tiles as small as it takes."""
        while (over := self.lowering.trial_peak(graphs) - budget_bytes) > 0 and passes.finer(
            graphs["forward"].graph
        ):
            pass
        return over

    def _may_recompute(self, wanted: bool) -> bool:
        """What was decided for all ranks, now or before."""
        state = self.state
        key = schedule.key_of("recompute", list(state.units.values()))
        decided = state.first.distances.get(key) or state.loader.decide(state.first, key, str(wanted))
        return decided == str(True)

    def _partition_activations(self, graphs: Phases, num_outputs: int) -> None:
        """Once for what budgets have chosen: how often they choose again may differ between ranks."""
        state = self.state
        policy = next((p for p in state.policies.values() if p.group.tensor is not None), None)
        if policy is None:
            raise ConfigError(
                "partition_activations=True needs tensor-parallel ranks, which save the same activations: give "
                'zero.shard a mesh with a dimension called "tp" and call parallelize_module before it, or leave it out'
            )
        peers, show = policy.group.tensor, functools.partial(state.loader.show, policy)
        cut = passes.PartitionActivations(str(peers.pg.group_name), peers.world, show)
        cut.run(graphs["forward"].graph, graphs["backward"].graph, num_outputs, state.context("joint"))

    def _spend_budget(self, graphs: Phases, budget_bytes: int) -> None:
        """Plan both phases with every weight released, and keep what fits in the room that is left.

        What does not fit even so is tried again with the largest weights in tiles. Prefetch comes next: its buffers
        serve one unit after the other, in both phases, where the bytes of a kept weight save one gather.
        """
        state = self.state
        if state.config.tile_bytes is None:
            self._tile_weights(graphs, budget_bytes)
        lowered = self.lowering.settled(graphs)
        programs = [low.emitted.program for low in lowered.values()]
        policies = list(state.policies.values())
        memory = state.memory(programs)
        budget.check(memory, budget_bytes, budget.peak_at(programs), policies[0].group.world)
        budget.keep(policies, state.params, state.backward_params or (), budget_bytes - memory.peak)
        state.plan_again()

    def _tile_weights(self, graphs: Mapping[str, fx.GraphModule], budget_bytes: int) -> None:
        """Gather the largest weights in tiles of half the bytes, and again, until the plan fits.

        Decided once for a weight, by rank 0 for all.
        """
        state = self.state
        undecided = tiling.undecided(state.policies, state.params)
        if not undecided:
            return
        while self.lowering.trial_peak(graphs) > budget_bytes:
            limit = tiling.largest_bytes([state.params[ref] for ref in undecided]) // 2
            before = state.params
            if limit < tiling.LEAST_BYTES:
                break
            tiling.note(state.policies, undecided, limit)
            state.plan_again()
            if state.params == before:
                break
        tiling.settle(state.policies, undecided)
        state.plan_again()

    def lend_gradients(self) -> None:
        """Between two backwards, let activations have the bytes of gradients where that lowers the peak."""
        state = self.state
        mine = list(state.frame.programs.values())
        policies = list(state.policies.values())
        if not policies or not mine:
            return
        others = [p for policy in policies for f in policy.frames for p in f.programs.values()]
        gradients = budget.memory_of(policies, mine, 0).gradients
        most = max(live.most(p, gradients) for p in (*mine, *others))
        idle = live.idle_bytes(mine, gradients, most)
        for program in mine:
            if program.phase != "backward":
                program.idle_bytes = idle

    def check_budget(self) -> None:
        """What was compiled fits the budget.

        Raises:
            MemoryBudgetError: it does not.
        """
        state = self.state
        if state.config.memory_budget_bytes is None or not state.policies:
            return
        policies, programs = list(state.policies.values()), list(state.frame.programs.values())
        memory = budget.memory_of(policies, programs, state.frame.kept_bytes)
        budget.check(
            memory, state.config.memory_budget_bytes, budget.peak_at(programs), policies[0].group.world
        )
