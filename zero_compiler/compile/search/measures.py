"""What is done for phases that pass a budget: each measure, and those that are taken one after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from ... import passes
from ...errors import MemoryBudgetError
from ...plan import tiling
from ...plan.activation_search import Partition, Phases, within_activations, within_memory
from ..frame_state import FrameState
from ..plan_choice import PlanChoice
from .overrun import Overrun
from .rank_decisions import RankDecisions
from .weight_tiles import WeightTiles

_PARTS = 8  # before fewer activations are saved, the largest weight is gathered in so many tiles at least
_SHARE = 4  # of what activations may take, an MLP's intermediate takes one part in so many at first


class Measures:
    """Measures for one frame.

    Args:
        adopt: go on from another choice.
    """

    def __init__(
        self,
        state: FrameState,
        overrun: Overrun,
        weight_tiles: WeightTiles,
        decisions: RankDecisions,
        adopt: Callable[[PlanChoice], None],
    ) -> None:
        self.state = state
        self.overrun = overrun
        self.weight_tiles = weight_tiles
        self.decisions = decisions
        self.adopt = adopt

    def fit_buckets(
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
        first, key = state.choice.bucket_bytes, self.decisions.key(what)
        text = state.settled(key)
        if text is None:
            best, least = first, self.overrun.over_in_small_tiles(graphs, budget_bytes)
            for size in sizes:
                if least <= 0:
                    break
                try:
                    graphs = self._in_buckets(size, planned)
                except MemoryBudgetError:
                    continue  # in these more must be saved than activation_budget_bytes allows
                over = self.overrun.over_in_small_tiles(graphs, budget_bytes)
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
        self.adopt(replace(before, bucket_bytes=nbytes))
        try:
            return planned()
        except MemoryBudgetError:
            self.adopt(before)
            raise

    def within_activations(self, partition: Partition, graphs: Phases, budget_bytes: int) -> Phases:
        """Phases whose activations fit; with MLPs in tiles where rank 0 finds no others.

        Raises:
            MemoryBudgetError: there are none.
        """
        refused: MemoryBudgetError | None = None
        if not self.state.choice.tile_mlp:
            try:
                graphs = within_activations(partition, graphs, budget_bytes, self.overrun.held_bytes)
            except MemoryBudgetError as error:
                refused = error
            if not self.decisions.agreed("mlp-activations", refused is not None):
                if refused is not None:
                    raise refused
                return graphs
        # Bytes of a tile; in the end as few as can be, and without files: what is read from them in time is held, too.
        for nbytes, files in ((budget_bytes // _SHARE, True), (0, True), (0, False)):
            self.tile_mlps(True, nbytes)
            if not files:
                self.state.choice = replace(self.state.choice, away=None)
            try:
                return within_activations(partition, partition(None), budget_bytes, self.overrun.held_bytes)
            except MemoryBudgetError as error:
                refused = error
        assert refused is not None
        raise refused

    def _within_memory(self, partition: Partition, graphs: Phases, budget_bytes: int) -> Phases:
        """Phases that fit, or those that come nearest; with MLPs in tiles where that serves rank 0 best.

        Tiles of weights come later, and MLPs in tiles of tokens exclude them: so what those would bring is tried.
        """
        state = self.state
        over = functools.partial(self.overrun.over_in_small_tiles, budget_bytes=budget_bytes)
        whole = within_memory(partition, graphs, over, self.overrun.held_bytes)
        if state.choice.tile_mlp:
            return whole
        if self.decisions.decided("mlp-memory") is None and self.overrun.over(whole, budget_bytes) > 0:
            least = self.weight_tiles.least_peak(whole, budget_bytes)
            before = state.choice
            self.tile_mlps(True)
            tiled = within_memory(partition, partition(None), over, self.overrun.held_bytes)
            wanted = self.overrun.over(tiled, budget_bytes) <= 0
            if not wanted and not self.overrun.held_over(tiled):
                wanted = budget_bytes < least > self.weight_tiles.least_peak(tiled, budget_bytes)
            tried = state.choice
            self.adopt(before)  # ranks that try nothing ask from here
            if not self.decisions.agreed("mlp-memory", wanted):
                return whole
            self.adopt(tried)
            return tiled
        if not self.decisions.agreed("mlp-memory", False):
            return whole
        self.tile_mlps(True)
        return within_memory(partition, partition(None), over, self.overrun.held_bytes)

    def _within_heads(self, partition: Partition, graphs: Phases, budget_bytes: int) -> Phases:
        """Phases in which weights of heads can be gathered in tiles, where rank 0 finds that nothing else fits.

        Backward then makes logits again, where forward makes their gradient otherwise.
        """
        state = self.state
        if state.choice.tile_heads or state.config.tile_bytes is not None:
            return graphs
        over = functools.partial(self.overrun.over_in_small_tiles, budget_bytes=budget_bytes)
        tiled, wanted = None, False
        before = tried = state.choice
        if (
            self.decisions.decided("heads") is None
            and (least := self.weight_tiles.least_peak(graphs, budget_bytes)) > budget_bytes
        ):
            self.tile_heads(True)
            tiled = within_memory(partition, partition(None), over, self.overrun.held_bytes)
            wanted = (
                not self.overrun.held_over(tiled)
                and self.weight_tiles.least_peak(tiled, budget_bytes) < least
            )
            tried = state.choice
            self.adopt(before)  # ranks that try nothing ask from here
        if not self.decisions.agreed("heads", wanted):
            return graphs
        if tiled is not None:
            self.adopt(tried)
            return tiled
        self.tile_heads(True)
        return within_memory(partition, partition(None), over, self.overrun.held_bytes)

    def tile_heads(self, tiled: bool) -> None:
        self.adopt(replace(self.state.choice, tile_heads=tiled))

    def tile_mlps(self, tiled: bool, nbytes: int | None = None) -> None:
        self.adopt(replace(self.state.choice, tile_mlp=tiled, mlp_bytes=nbytes))

    def weights_first(
        self, partition: Partition, graphs: Phases, budget_bytes: int, recompute: bool
    ) -> Phases:
        """Phases that fit with weights in tiles, of as many bytes as suit the link: with as many activations as that
        leaves room for.

        Args:
            recompute: backward may run costly operators again.
        """
        state = self.state
        if recompute and not state.choice.recompute:
            self.adopt(replace(state.choice, recompute=True))
            graphs = partition(None)  # backward gathers more weights now
        passes.coarsest(gm.graph for gm in graphs.values())
        if undecided := self.weight_tiles.undecided(graphs):
            largest = tiling.largest_bytes([state.params[ref] for ref in undecided])
            limit = max(tiling.LEAST_BYTES, min(state.choice.bucket_bytes, largest // _PARTS))
            state.try_tiles(dict.fromkeys(undecided, limit))
        over = functools.partial(self.overrun.over_in_small_tiles, budget_bytes=budget_bytes)
        graphs = within_memory(partition, graphs, over, self.overrun.held_bytes)
        state.try_tiles({})
        return graphs

    def weights_last(
        self, partition: Partition, planned: Callable[[], Phases], graphs: Phases, budget_bytes: int
    ) -> Phases:
        """Phases that fit, or come nearest, with all measures but tiles of weights, from what costs least."""
        state = self.state
        graphs = self.fit_buckets("buckets", planned, graphs, budget_bytes)
        over = self.overrun.over_in_small_tiles(graphs, budget_bytes) > 0
        if not state.choice.recompute and self.decisions.agreed("recompute", over):
            self.adopt(replace(state.choice, recompute=True))
            graphs = partition(None)  # backward gathers more weights now
        graphs = self._within_memory(partition, graphs, budget_bytes)
        over_by = functools.partial(self.overrun.over_in_small_tiles, budget_bytes=budget_bytes)
        if state.choice.away is not None and over_by(graphs) > 0:
            # On a CPU what files are read to is memory too: it may take more than they free.
            self.adopt(replace(state.choice, away=None))
            graphs = min(
                graphs,
                within_memory(partition, partition(None), over_by, self.overrun.held_bytes),
                key=over_by,
            )
        return self._within_heads(partition, graphs, budget_bytes)
