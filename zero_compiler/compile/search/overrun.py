"""By how many bytes phases pass their budgets, as they are or with tiles of tokens as small as it takes."""

from __future__ import annotations

from collections.abc import Sequence

from ... import passes
from ...emit.segments import SegmentCompiler
from ...ir.program import Program
from ...plan import budget
from ...plan.activation_search import Phases
from ..frame_state import FrameState
from ..phase_lowering import Lowering


class Overrun:
    """What phases take beside what they may."""

    def __init__(self, state: FrameState, lowering: Lowering, segments: SegmentCompiler) -> None:
        self.state = state
        self.lowering = lowering
        self.segments = segments

    def over(self, graphs: Phases, budget_bytes: int) -> int:
        """By how many bytes a plan passes the budget of memory, or that of activations where both are given."""
        return max(self.lowering.trial_peak(graphs) - budget_bytes, self.held_over(graphs))

    def held_over(self, graphs: Phases) -> int:
        """By how many bytes backward passes the budget of activations; 0 where there is none."""
        allowed = self.state.config.activation_budget_bytes
        if allowed is None or "backward" not in graphs:
            return 0
        return max(0, self.held_bytes(graphs) - allowed)

    def held_bytes(self, graphs: Phases) -> int:
        """Most bytes that backward holds at once of what forward made, or of what it makes again.

        With what is read from files before it is wanted: where that begins stands in the schedule.
        """
        backward = graphs["backward"]
        if passes.offloaded(backward.graph):
            backward = self.lowering.scheduled(backward, "backward")
        return passes.held_bytes(backward.graph)

    def over_in_small_tiles(self, graphs: Phases, budget_bytes: int) -> int:
        """By how many bytes the plan of ``graphs`` passes the budget, with tiles as small as it takes.

        The smallest tiles take the least: where they do not fit none do, and else what just fits lies between.
        """
        over, every = self.over(graphs, budget_bytes), [gm.graph for gm in graphs.values()]
        if over <= 0:
            return over
        sizes = [[passes.tiles_in(graph) for graph in every]]
        while passes.finer(every):
            sizes.append([passes.tiles_in(graph) for graph in every])

        def over_in(size: int) -> int:
            for graph, tiles in zip(every, sizes[size], strict=True):
                passes.set_tiles(graph, tiles)
            return self.over(graphs, budget_bytes)

        large, small = 0, len(sizes) - 1
        if small == 0 or (over := over_in(small)) > 0:
            return over
        while small - large > 1:
            middle = (large + small) // 2
            large, small = (large, middle) if over_in(middle) <= 0 else (middle, small)
        return over_in(small)

    def count_compiled(self, graphs: Phases, budget_bytes: int) -> None:
        """Compile phases that a budget asks less of than their operators take one by one, where their code may fit.

        What fits so is left as it is. What is tried instead is counted by operators, as it is not compiled.
        """
        if self.state.fused and self.over(graphs, budget_bytes) > 0:
            if self.lowering.least_peak(graphs) <= budget_bytes and not self.held_over(graphs):
                self.lowering.count_compiled(graphs, self.segments)

    def check_planned(self, programs: Sequence[Program], budget_bytes: int) -> None:
        """Programs fit the budget of memory.

        Raises:
            MemoryBudgetError: they do not.
        """
        state = self.state
        memory = state.memory(programs)
        where = budget.peak_at([*programs, *state.waiting], memory.gradients)
        budget.check(memory, budget_bytes, where, list(state.sharded_models.values()))
