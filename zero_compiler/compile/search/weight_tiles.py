"""Tiles of weights within a budget of memory: as small as it asks for, and then as large as it leaves room for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ... import passes
from ...ir.facts import ParamRef
from ...ir.program import Program
from ...plan import tiling
from ...plan.activation_search import Phases
from ..frame_state import FrameState
from ..phase_lowering import Lowering
from .overrun import Overrun

_FITS = 4  # a plan is fitted again at most so often, after all of its tiles of weights were counted
_MOST_WRITTEN = 2_000  # tiles of weights of a plan that is refused, to be counted one by one


class WeightTiles:
    """In how many tiles the weights of a frame are gathered."""

    def __init__(self, state: FrameState, lowering: Lowering, overrun: Overrun) -> None:
        self.state = state
        self.lowering = lowering
        self.overrun = overrun

    def undecided(self, graphs: Phases) -> list[ParamRef]:
        """Weights of which tiles may be made for a budget."""
        state = self.state
        if state.config.tile_bytes is not None:
            return []
        tiled = [passes.read_by_tiles(gm.graph) for gm in graphs.values()] if state.choice.tile_mlp else []
        whole = frozenset().union(*tiled)
        return [ref for ref in tiling.undecided(state.sharded_models, state.params) if ref not in whole]

    def _shrink_tiles(self, graphs: Phases, undecided: Sequence[ParamRef], budget_bytes: int) -> int:
        """Make tiles of weights as small as the budget asks for, by halving; the peak that is left.

        Smaller tiles take less, as a rule: so ever more sizes are left out until one fits, and the largest that does is
        found between the last two. Where some of many tiles do not stand for all of them, smaller ones are more work,
        and no size is left out; nor is one where the smallest is not the one that takes least.
        """
        state = self.state
        peak = self.lowering.trial_peak(graphs)
        limits = self._halved(undecided) if peak > budget_bytes else []
        if not limits:
            return peak
        leaves_out = self.lowering.counts_some_tiles(graphs)  # the state has the smallest
        peaks: dict[int, int] = {}

        def fits(size: int) -> bool:
            state.try_tiles(dict.fromkeys(undecided, limits[size]))
            peaks[size] = self.lowering.trial_peak(graphs)
            return peaks[size] <= budget_bytes

        large, small, last = -1, 0, len(limits) - 1
        while not fits(small) and small < last:
            large, small = small, min(2 * small + 1, last) if leaves_out else small + 1
        if peaks[small] > budget_bytes:
            untried = [size for size in range(last) if size not in peaks]
            found = min(peaks.values()) < peaks[last] and any(fits(size) for size in untried)
            return self.lowering.trial_peak(graphs) if found or fits(last) else peaks[last]
        while small - large > 1:
            middle = (large + small) // 2
            large, small = (large, middle) if fits(middle) else (middle, small)
        fits(small)
        return peaks[small]

    def _halved(self, undecided: Sequence[ParamRef]) -> list[int]:
        """Bytes of tiles of these weights that are worth a trial, from half of the largest weight on. The state is left
        with the smallest."""
        state = self.state
        limits: list[int] = []
        while undecided:
            limit = tiling.largest_bytes([state.params[ref] for ref in undecided]) // 2
            before = state.params
            if limit < tiling.LEAST_BYTES:
                break
            state.try_tiles(dict.fromkeys(undecided, limit))
            if state.params == before:
                break
            limits.append(limit)
        return limits

    def least_peak(self, graphs: Phases, budget_bytes: int) -> int:
        """Predicted peak with weights in tiles, as small as the budget asks for."""
        peak = self._shrink_tiles(graphs, self.undecided(graphs), budget_bytes)
        self.state.try_tiles({})
        return peak

    def fit(
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
        self.overrun.over_in_small_tiles(graphs, budget_bytes)

        def fits(tile_bytes: Mapping[ParamRef, int | None]) -> bool:
            if self.lowering.is_exhausted:
                return False
            state.try_tiles(tile_bytes)
            return self.lowering.trial_peak(graphs) <= budget_bytes

        chosen = tiling.coarsen({ref: state.params[ref] for ref in undecided}, limit, fits)
        state.try_tiles(chosen)
        return chosen

    def _fit_every_tile(self, graphs: Phases, budget_bytes: int, fit: Callable[[int], object]) -> None:
        """``fit`` phases to the budget, by a few of their tiles of weights; and to less of it where all of these turn
        out to take more."""
        limit_bytes = budget_bytes
        for _ in range(_FITS):
            fit(limit_bytes)
            if not self.lowering.counts_some_tiles(graphs) or self.lowering.trial_peak(graphs) > limit_bytes:
                return  # all were counted, or nothing fits
            over = self.lowering.peak_in_full(graphs) - budget_bytes
            if over <= 0:
                return
            limit_bytes -= over

    def _refused(self, graphs: Phases, budget_bytes: int) -> list[Program]:
        """Programs that do not fit, of some of the tiles of their weights, where to write out all of them would take
        longer than the search; else none."""
        many = sum(plan.tile_count for plan in self.state.params.values()) > _MOST_WRITTEN
        over = (
            many and self.lowering.counts_some_tiles(graphs) and self.overrun.over(graphs, budget_bytes) > 0
        )
        return self.lowering.trials_of(graphs) if over else []

    def decide(self, graphs: Phases, budget_bytes: int) -> None:
        """Gather the largest weights in tiles of half the bytes, and again, until the plan fits; then as few tiles as
        the budget needs.

        Decided once for a weight, for all ranks by the one with the least room. Weights of MLPs that are done in tiles
        of tokens stay whole. Between graph breaks tiles stay small: the room may be needed by frames that are not known
        yet.
        """
        state = self.state
        every, undecided = tiling.undecided(state.sharded_models, state.params), self.undecided(graphs)
        tiling.set_tile_rows(state.sharded_models, [ref for ref in every if ref not in undecided], None)
        if not undecided:
            return
        room = budget_bytes - self.lowering.trial_peak(graphs)

        def choose(limit_bytes: int) -> None:
            state.try_tiles({})
            self.fit(graphs, undecided, limit_bytes)

        self._fit_every_tile(graphs, budget_bytes, choose)
        refused = self._refused(graphs, budget_bytes)
        chosen = state.choice.tile_bytes
        tiling.agree_on_rows(state.sharded_models, undecided, chosen, room, state.loader.tightest)
        state.try_tiles({})
        if refused:
            self.overrun.check_planned(refused, budget_bytes)
        # Those of another rank may be larger than what was tried here: tiles of tokens make up for it.
        self.overrun.over_in_small_tiles(graphs, budget_bytes)
