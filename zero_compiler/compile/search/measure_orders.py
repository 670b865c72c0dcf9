"""In which order measures for a budget of memory are taken: that whose plan is predicted to take the least time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ... import passes
from ...plan.activation_search import Partition, Phases
from ..frame_state import FrameState
from ..phase_lowering import Lowering
from ..plan_choice import PlanChoice
from .measures import Measures
from .overrun import Overrun
from .rank_decisions import FIRST, LAST, RECOMPUTE, RankDecisions
from .weight_tiles import WeightTiles

_NEARLY = 1.02  # a plan that takes so much longer at most is as good


@dataclass(frozen=True)
class Plan:
    """Phases, in how many tiles of tokens they are done, and the choice that they belong to."""

    graphs: Phases
    tiles: dict[str, list[int]]
    choice: PlanChoice


def tiles_in(graphs: Phases) -> dict[str, list[int]]:
    return {phase: passes.tiles_in(gm.graph) for phase, gm in graphs.items()}


@dataclass(frozen=True)
class Orders:
    """Plans of one frame with measures in several orders, as they are made.

    Args:
        before, whole: the choice that all of them begin with, and its phases.
        plans: those that were made.
        found: of those with all of their tiles, what :meth:`MeasureOrders._completed` tells.
    """

    partition: Partition
    before: PlanChoice
    whole: Phases
    budget_bytes: int
    plans: dict[str, Plan] = field(default_factory=dict)
    found: dict[str, tuple[int, float]] = field(default_factory=dict)


class MeasureOrders:
    """Plans of one frame with measures in one order or another.

    Args:
        adopt: go on from another choice.
    """

    def __init__(
        self,
        lowering: Lowering,
        overrun: Overrun,
        weight_tiles: WeightTiles,
        measures: Measures,
        decisions: RankDecisions,
        adopt: Callable[[PlanChoice], None],
    ) -> None:
        self.state: FrameState = overrun.state
        self.lowering = lowering
        self.overrun = overrun
        self.weight_tiles = weight_tiles
        self.measures = measures
        self.decisions = decisions
        self.adopt = adopt

    def fit_memory(
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
            return self.measures.weights_last(partition, planned, graphs, budget_bytes)
        key, why = self.decisions.key("order"), state.frame.bucket_why
        decided = state.settled(key)
        if decided is None:
            orders = Orders(partition, before, whole, budget_bytes)
            if self.decisions.agreed("tiles", self._needs_tiles(orders)):
                wanted = min(orders.found, key=orders.found.__getitem__, default=FIRST)
            else:
                last = self.measures.weights_last(partition, planned, whole, budget_bytes)
                orders.plans[LAST] = self._noted(last)
                wanted = self._fastest(orders)
            decided = state.loader.decide(state.first, key, wanted)
            if decided != LAST:
                state.set_bucket_bytes(before.bucket_bytes, why)
            if decided in orders.plans:
                return self._again(orders.plans[decided])
            self.adopt(before)
            state.plan_again()
        if decided == LAST:
            return self.measures.weights_last(partition, planned, whole, budget_bytes)
        return self.measures.weights_first(partition, whole, budget_bytes, decided == RECOMPUTE)

    def _needs_tiles(self, orders: Orders) -> bool:
        """Whether weights have to be in tiles, and nothing is to be gained from all other measures before that.

        Where more than all that is saved is too much, tiles of weights are tried first. What they give is taken if
        buffers of whole weights alone, with what rests, pass the budget; or if it takes hardly longer than a plan
        without one.
        """
        state, whole, budget_bytes = self.state, orders.whole, orders.budget_bytes
        over = self.overrun.over_in_small_tiles(whole, budget_bytes)
        if over <= self.overrun.held_bytes(whole) or not self.weight_tiles.undecided(whole):
            return False
        memory = state.memory(self.lowering.trials_of(whole))
        enough = self._try_orders(orders)
        self.adopt(orders.before)
        state.plan_again()
        best = min(orders.found.values())
        return best[0] == 0 and (memory.at_rest - memory.gradients > budget_bytes or best <= enough)

    def _fastest(self, orders: Orders) -> str:
        """The order of measures whose plan fits in the least predicted time, given the plan that has tiles of weights
        last."""
        found, last = orders.found, orders.plans[LAST]
        unchanged = last.graphs is orders.whole and self.state.choice == orders.before
        if unchanged and self.overrun.over(orders.whole, orders.budget_bytes) <= 0:
            return LAST  # nothing was given up but larger tiles of tokens
        found[LAST] = self._completed(last, orders.budget_bytes)
        self._try_orders(orders)
        best = min(found, key=found.__getitem__)
        over, us = found[best]
        return best if (over, _NEARLY * us) < found[LAST] else LAST

    def _try_orders(self, orders: Orders) -> tuple[int, float]:
        """Make the plans of the orders with tiles of weights first, until one takes hardly longer than a plan without a
        budget, or enough was tried.

        Returns what :meth:`_completed` would tell of a plan that is fast enough.
        """
        state, before, whole, found = self.state, orders.before, orders.whole, orders.found
        self.adopt(before)
        state.plan_again()
        passes.coarsest(gm.graph for gm in whole.values())
        enough = 0, _NEARLY * self.lowering.predicted_us(whole)
        with_whole: dict[str, float] = {}  # times, with weights whole again
        for order in (FIRST, RECOMPUTE):
            if order in found:
                continue
            made = found or with_whole
            if made and self.lowering.is_exhausted:
                break
            if min([*found.values(), *((0, us) for us in with_whole.values())], default=(1, 0.0)) <= enough:
                break
            self.adopt(before)
            state.plan_again()
            graphs = self.measures.weights_first(
                orders.partition, whole, orders.budget_bytes, order == RECOMPUTE
            )
            orders.plans[order] = self._noted(graphs)
            with_whole[order] = self.lowering.predicted_us(graphs)
        # Tiles of weights cost the one what they cost the other.
        for order in sorted(with_whole, key=with_whole.__getitem__):
            found[order] = self._completed(orders.plans[order], orders.budget_bytes)
            if found[order][0] == 0:
                break
        return enough

    def _completed(self, plan: Plan, budget_bytes: int) -> tuple[int, float]:
        """By how many bytes a plan passes the budget with weights in tiles, and the predicted time of one that fits."""
        graphs = self._again(plan)
        self.weight_tiles.fit(graphs, self.weight_tiles.undecided(graphs), budget_bytes)
        over = max(0, self.overrun.over(graphs, budget_bytes))
        # Most often this is what is run.
        return over, 0.0 if over else self.lowering.predicted_us(graphs, proves=True)

    def _noted(self, graphs: Phases) -> Plan:
        return Plan(graphs, tiles_in(graphs), self.state.choice)

    def _again(self, plan: Plan) -> Phases:
        """Go on from a plan as it was."""
        self.adopt(plan.choice)
        self.state.plan_again()
        for phase, gm in plan.graphs.items():
            passes.set_tiles(gm.graph, plan.tiles[phase])
        return plan.graphs
