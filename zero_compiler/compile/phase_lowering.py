"""From a phase's graph to its Program: the passes, when gathers start, predicted times."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from .. import passes
from ..cost.cost import CostModel, at_hints, hints
from ..cost.prefetch import PrefetchChoice
from ..cost.simulate import simulate
from ..cost.timeline import Timeline
from ..emit.emit import Emitted, emit
from ..emit.segments import SegmentCompiler
from ..ir import facts, ops
from ..ir.facts import ParamRef
from ..ir.instructions import Compute
from ..ir.program import Program
from ..passes import Context, PassOptions, run_passes
from ..plan import gather_precision, schedule
from .frame_state import FrameState
from .segment_codegen import count_compiled

log = logging.getLogger("zero_compiler")
SAY_EVERY_S = 20.0
# When so many phases were lowered on trial, or to so many operators together, no other order of measures is tried
# beside the first, and tiles are enlarged no more: a limit that is equal on any machine.
MOST_TRIALS = 120
MOST_OPERATORS = 300_000


@dataclass(frozen=True)
class Lowered:
    """A scheduled graph and its Program; ``proved``: both were verified, as what is run has to be."""

    gm: fx.GraphModule
    emitted: Emitted
    proved: bool


@dataclass(frozen=True)
class _Tried:
    """A Program that a phase was lowered to on trial, and all that it follows from beside the graph."""

    asked: tuple[Context, PassOptions]
    tiles: list[int]
    offsets: dict[str, dict[str, int]]  # of kept weights
    program: Program
    some: bool  # of the tiles of weights were written out


@dataclass(frozen=True)
class _LoweredFrom:
    """All that the lowering of a phase follows from."""

    asked: tuple[Context, PassOptions]
    tiles: list[int]
    offsets: dict[str, dict[str, int]]
    calls: list[tuple[object, ...]]  # of the graph: AOTAutograd compiles a copy of it


def _calls(graph: fx.Graph) -> list[tuple[object, ...]]:
    """What a graph calls, and what it is given."""
    calls: list[tuple[object, ...]] = [(n.name, n.target, str(n.args), str(n.kwargs)) for n in graph.nodes]
    given = [facts.value(n) for n in graph.find_nodes(op="placeholder")]
    return calls + [(v.dtype, str(v.shape), str(v.stride())) for v in given if isinstance(v, torch.Tensor)]


def _bare(program: Program) -> Program:
    inside = iter(program.inside)
    live = [
        nbytes - (next(inside) if isinstance(instr, Compute) else 0)
        for instr, nbytes in zip(program.instrs, program.live, strict=True)
    ]
    return replace(program, live=live, inside=[0] * len(program.inside))


class Lowering:
    """Lowers phases of one frame, on trial or for good."""

    def __init__(self, state: FrameState) -> None:
        self.state = state
        self.trials, self._operators = 0, 0
        self.ended = ""  # why no more is tried than is needed for a plan
        self._began, self._say_at_s = time.monotonic(), SAY_EVERY_S
        self._tried: weakref.WeakKeyDictionary[fx.GraphModule, list[_Tried]] = weakref.WeakKeyDictionary()
        self._last: dict[str, tuple[_LoweredFrom, Lowered]] = {}  # what was lowered in full, by phase
        self._results: facts.Results = {}
        # Of phases that were lowered on trial: copies behind the passes of which nothing is chosen.
        self._without_markers: weakref.WeakKeyDictionary[fx.GraphModule, fx.GraphModule] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def is_exhausted(self) -> bool:
        """Whether so much was tried, or for so long as the user has said, that only what is needed for a plan is tried
        from here on. Ranks may find this at different moments: rank 0, or the one with the least room, decides for all
        what collectives depend on."""
        if not self.ended:
            seconds = self.state.config.plan_seconds
            if seconds is not None and time.monotonic() - self._began >= seconds:
                self.ended = f"plan_seconds={seconds:g}"
            elif self.trials >= MOST_TRIALS:
                self.ended = f"the limit of {MOST_TRIALS} trials"
            elif self._operators >= MOST_OPERATORS:
                self.ended = f"the limit of {MOST_OPERATORS:,} operators on trial"
        return bool(self.ended)

    def phase(self, gm: fx.GraphModule, phase: str) -> Lowered:
        """Lower ``gm`` for the last time, with distances that are decided here where they are not known yet."""
        decided = self._is_decided(phase)
        lowered = None if decided else self.with_distances({phase: gm})[phase]
        if lowered is None or not lowered.proved:
            lowered = self._in_full(gm, phase, needs_proof=True)
        self._last.pop(phase, None)
        return lowered

    def _in_full(
        self,
        gm: fx.GraphModule,
        phase: str,
        segment_us: list[float] | None = None,
        *,
        proves: bool = True,
        needs_proof: bool = False,
    ) -> Lowered:
        """A copy of ``gm`` lowered as :meth:`_lowered` does. The same is asked for to predict its time, to choose
        distances, and to compile it: what was lowered last is not lowered again.

        Args:
            proves: verify it, where it is lowered now: it may be what is run.
            needs_proof: what was lowered last serves only where it was verified.
        """
        lowered = self._known(gm, phase)
        if lowered is not None and (lowered.proved or not needs_proof):
            return lowered
        self._last.pop(phase, None)
        known = _LoweredFrom(self._asked(phase), passes.tiles_in(gm.graph), self._offsets(), _calls(gm.graph))
        lowered = self._lowered(gm, phase, segment_us, proves=proves)
        if self._offsets() == known.offsets:
            self._last[phase] = known, lowered
        return lowered

    def _known(self, gm: fx.GraphModule, phase: str) -> Lowered | None:
        """What was lowered in full last, if it is this."""
        known, lowered = self._last.get(phase, (None, None))
        if known is None or (known.tiles, known.offsets) != (passes.tiles_in(gm.graph), self._offsets()):
            return None
        return lowered if known.asked == self._asked(phase) and known.calls == _calls(gm.graph) else None

    def trial_peak(self, graphs: Mapping[str, fx.GraphModule]) -> int:
        """Predicted peak of the phases as they are, in bytes; see :meth:`trials_of`."""
        return self.state.peak(self.trials_of(graphs))

    def peak_in_full(self, graphs: Mapping[str, fx.GraphModule]) -> int:
        """The same of the phases lowered as they are for good."""
        lowered = [self._in_full(gm, phase, proves=False) for phase, gm in graphs.items()]
        return self.state.peak([low.emitted.program for low in lowered])

    def counts_some_tiles(self, graphs: Mapping[str, fx.GraphModule]) -> bool:
        """Whether a trial of a phase writes out some tiles of a weight for all of them."""
        return any(self._tiles_are_alike(gm, phase) for phase, gm in graphs.items())

    def trials_of(self, graphs: Mapping[str, fx.GraphModule]) -> list[Program]:
        """Programs of the phases as they are, on trial: with few of many tiles.

        Of tiles of weights that are only tried some are written out. What they tell differs from what all take by how
        buffers are packed.
        """
        return [self._trial(gm, phase) for phase, gm in graphs.items()]

    def predicted_us(self, graphs: Mapping[str, fx.GraphModule]) -> float:
        """Predicted time of the phases as they are, one after the other."""
        lowered = [self._in_full(gm, phase, proves=False) for phase, gm in graphs.items()]
        return sum(self.simulated(low.emitted.program).total_us for low in lowered)

    def simulated(self, program: Program) -> Timeline:
        """One run of a Program on the machine that plans are made for."""
        state = self.state
        sums, params = state.config.nvme_checksums, len(state.params)
        budget = None if state.first is None else state.first.tiers.files_budget
        return simulate(
            program, state.machine, state.world, checksums=sums, params=params, files_budget=budget
        )

    def count_compiled(self, graphs: Mapping[str, fx.GraphModule], compiler: SegmentCompiler) -> None:
        """Compile the segments of phases as they are: trials of these count from here on what their code takes."""
        for phase, gm in graphs.items():
            self._last.pop(phase, None)
            asked, tiles, offsets = self._asked(phase), passes.tiles_in(gm.graph), self._offsets()
            emitted, _ = count_compiled(self._lowered(gm, phase).emitted, compiler, phase)
            if self._offsets() == offsets:
                tried = _Tried(asked, tiles, offsets, emitted.program, some=False)
                self._tried.setdefault(gm, []).insert(0, tried)

    def least_peak(self, graphs: Mapping[str, fx.GraphModule]) -> int:
        """The same if no segment took more inside than it leaves: no compiler makes it less."""
        return self.state.peak([_bare(program) for program in self.trials_of(graphs)])

    def forget(self, graphs: Mapping[str, fx.GraphModule]) -> None:
        """These were rewritten: what trials found of them is no longer so."""
        self._last.clear()
        for gm in graphs.values():
            self._tried.pop(gm, None)
            self._without_markers.pop(gm, None)

    def _trial(self, gm: fx.GraphModule, phase: str) -> Program:
        """The Program of a phase, on trial. What was tried before is not lowered again: of two phases a search often
        changes one, and asks for the same plan at several places."""
        asked, tiles, offsets = self._asked(phase), passes.tiles_in(gm.graph), self._offsets()
        tried = self._tried.setdefault(gm, [])
        some = self._tiles_are_alike(gm, phase)
        for t in tried:
            if t.tiles == tiles and t.offsets == offsets and t.some <= some and t.asked == asked:
                return t.program
        known = None if some else self._known(gm, phase)
        if known is not None:
            return known.emitted.program
        lowered = self._lowered(gm, phase, trial=True, some_tiles=some)
        program = lowered.emitted.program
        self.trials += 1
        self._operators += len(lowered.gm.graph.nodes)
        self._say_that_it_goes_on()
        if self._offsets() == offsets:  # else a weight got its place just now, which is to be noted again
            tried.append(_Tried(asked, tiles, offsets, program, some))
        return program

    def _tiles_are_alike(self, gm: fx.GraphModule, phase: str) -> bool:
        """Whether a few tiles of a weight tell nearly what all of them take, and that is enough: they are only tried,
        there are more, they are under way one after the other, and no whole gradients wait for each other."""
        state = self.state
        far = max(state.options(phase).distances.values(), default=1)
        many = any(plan.tile_count > passes.MOST_ALIKE for plan in state.params.values())
        return (
            bool(state.choice.tile_bytes)
            and many
            and far <= 1
            and not state.accumulates
            and not self._timed(gm)
        )

    def _say_that_it_goes_on(self) -> None:
        """Now and then, of a search that takes long: what decides is what was tried, and never the time."""
        seconds = time.monotonic() - self._began
        if seconds >= self._say_at_s and self.state.first is not None and self.state.first.group.rank == 0:
            self._say_at_s = seconds + SAY_EVERY_S
            log.warning(
                "frame %d: still looking for a plan within the budget, %d tried in %.0f s; Ctrl-C ends it",
                self.state.index,
                self.trials,
                seconds,
            )

    def _asked(self, phase: str) -> tuple[Context, PassOptions]:
        return self.state.context(phase), self.state.options(phase)

    def _offsets(self) -> dict[str, dict[str, int]]:
        return {owner: dict(table) for owner, table in self.state.loader.kept_offsets().items()}

    def scheduled(self, gm: fx.GraphModule, phase: str) -> fx.GraphModule:
        """A copy of the graph after the passes of its phase, to be looked at."""
        return self._lowered(gm, phase, trial=True).gm

    def _lowered(
        self,
        gm: fx.GraphModule,
        phase: str,
        segment_us: list[float] | None = None,
        trial: bool = False,
        some_tiles: bool = False,
        proves: bool = True,
    ) -> Lowered:
        """Run the passes of a phase on a copy of its graph, and emit its Program with the predicted time of every
        segment.

        Of a trial only bytes are asked, which times change where chunks are copied to a device.

        Args:
            some_tiles: of weights that have many are written out.
            proves: verify the graph after every pass, and the Program; a trial is never verified.
        """
        proves = proves and not trial
        state = self.state
        context, options = self._asked(phase)
        some = trial and not self._timed(gm)
        options = replace(options, bytes_only=some, some_tiles=some and some_tiles)
        if proves:
            gm, pipeline = facts.copy_module(gm), passes.phase_passes(options)
        else:
            gm, pipeline = self._copy_without_markers(gm, context), passes.schedule_passes(options)
        run_passes(gm.graph, pipeline, context, state.trace, state.dump_dir(), trial=not proves)
        emitted = self._emitted(gm, phase, trial=not proves)
        if trial and not any(g.hops for g in emitted.program.gathers):
            return Lowered(gm, emitted, proves)
        if segment_us is None:
            cost, fused = CostModel(state.machine), state.fused
            known = hints(gm.graph)
            segment_us = [
                at_hints(cost.region_us(seg.body, seg.outs, fused), known) for seg in emitted.segments
            ]
        emitted = replace(emitted, program=replace(emitted.program, segment_us=segment_us))
        return Lowered(gm, self._with_hops(gm, phase, emitted, trial=not proves), proves)

    def _copy_without_markers(self, gm: fx.GraphModule, context: Context) -> fx.GraphModule:
        """A copy of a phase behind the passes that do to it the same in every trial, with its tiles as they are now."""
        known = self._without_markers.get(gm)
        if known is None:
            known = self._without_markers[gm] = facts.copy_module(gm)
            facts.share_results(known.graph, self._results)
            run_passes(known.graph, passes.marker_passes(), context, self.state.trace, trial=True)
        copy = facts.copy_module(known)
        passes.set_tiles(copy.graph, passes.tiles_in(gm.graph))
        facts.share_results(copy.graph, self._results)
        return copy

    def _emitted(
        self, gm: fx.GraphModule, phase: str, ahead: Sequence[Sequence[int]] = (), trial: bool = False
    ) -> Emitted:
        state = self.state
        emitted = emit(gm, state.params, phase, state.loader.kept_offsets(), ahead, trial)
        emitted = replace(emitted, program=state.beside_others(emitted.program))
        return state.with_recorded_bytes(emitted, phase)

    def _timed(self, gm: fx.GraphModule) -> bool:
        """Whether times decide where something stands: what waits on another tier, or chunks copied to a device."""
        away = any(gm.graph.find_nodes(op="call_function", target=op) for op in (ops.offload, ops.restore))
        return away or any("host" in plan.path for plan in self.state.params.values())

    def _with_hops(self, gm: fx.GraphModule, phase: str, emitted: Emitted, trial: bool) -> Emitted:
        """The same with every hop of chunks from other tiers as late as hides it."""
        state, ahead = self.state, list[list[int]]()
        budgeted = state.config.memory_budget_bytes is not None
        while True:
            found = schedule.hop_distances(
                emitted.program,
                len(ahead) + 1,
                state.machine,
                state.world,
                budgeted,
                state.config.nvme_checksums,
            )
            if found is None:
                lanes = zip(("copied to the device", "read from files"), ahead, strict=False)
                far = [(lane, max(distances, default=1)) for lane, distances in lanes]
                notes = [f"chunks are {lane} up to {most} units ahead" for lane, most in far if most > 1]
                program = emitted.program
                return replace(emitted, program=replace(program, notes=[*program.notes, *notes]))
            ahead.append(found)
            if any(d > 1 for d in found):
                times = emitted.program.segment_us
                emitted = self._emitted(gm, phase, ahead, trial)
                emitted = replace(emitted, program=replace(emitted.program, segment_us=times))

    def _is_decided(self, phase: str) -> bool:
        """Whether the distances of a phase are known: nothing was to decide, or it was decided before."""
        state = self.state
        if phase not in state.choice.prefetch:
            why = schedule.nothing_to_decide(state.params, phase, state.machine, state.world)
            units, given = list(state.choice.units.values()), state.given_distances(phase)
            if why is not None and max((given or {}).values(), default=1) == 1:
                self._choose({phase: PrefetchChoice(why)})
            elif (
                given is None
                and (text := state.first.agreed.decided.get(schedule.key_of(phase, units))) is not None
            ):
                distances = schedule.from_text(text, units)
                self._choose({phase: PrefetchChoice("decided when first compiled", distances)})
        return phase in state.choice.prefetch

    def _choose(self, found: Mapping[str, PrefetchChoice]) -> None:
        choice = self.state.choice
        self.state.choice = replace(choice, prefetch={**choice.prefetch, **found})

    def choose_precision(self, graphs: Mapping[str, fx.GraphModule]) -> None:
        """Decide which weights travel whole after all, since their gathers are hidden so, too; of those that may travel
        in 8 bits and of which nothing is decided yet. For all ranks: times depend on the sizes of a batch."""
        state, models = self.state, self.state.sharded_models
        refs = gather_precision.undecided(models, state.params)
        timed = [
            phase
            for phase in graphs
            if schedule.nothing_to_decide(state.params, phase, state.machine, state.world) is None
        ]
        if not refs or not timed:
            return
        budget = state.config.memory_budget_bytes
        spare = None if budget is None else budget - self.peak_in_full(graphs)
        programs = [self._in_full(graphs[phase], phase, proves=False).emitted.program for phase in timed]
        whole = gather_precision.hidden(programs, state.machine, state.world)
        if whole and budget is not None and not self._fits_whole(graphs, whole, budget):
            whole = frozenset()
        key = schedule.key_of("precision", [f"{ref.owner}:{ref.name}" for ref in refs])
        text = state.loader.decide(state.first, key, gather_precision.to_text(refs, whole), spare)
        gather_precision.decide(models, gather_precision.from_text(text, refs))
        state.plan_again()

    def _fits_whole(
        self, graphs: Mapping[str, fx.GraphModule], whole: frozenset[ParamRef], budget_bytes: int
    ) -> bool:
        """Whether phases fit a budget with these weights on their way whole, which takes other buffers."""
        models = self.state.sharded_models
        gather_precision.decide(models, dict.fromkeys(whole, False))
        self.state.plan_again()
        fits = self.peak_in_full(graphs) <= budget_bytes
        gather_precision.forget(models, whole)
        self.state.plan_again()
        return fits

    def with_distances(self, graphs: Mapping[str, fx.GraphModule]) -> dict[str, Lowered]:
        """Lower copies of phases, with distances that are decided here where they are not known yet."""
        state = self.state
        self.choose_precision(graphs)
        decided = {phase: self._is_decided(phase) for phase in graphs}
        low = {phase: self._in_full(gm, phase) for phase, gm in graphs.items()}
        looks = {
            phase: schedule.look(low[phase].emitted.program, state.machine, state.world)
            for phase in graphs
            if not decided[phase]
        }
        if not looks:
            return low
        spare = state.config.memory_budget_bytes
        if spare is not None:
            spare -= state.peak([x.emitted.program for x in low.values()])
            spare = spare if state.is_whole_forward else min(spare, 0)
        units = list(state.choice.units.values())

        def again(phase: str) -> Lowered:
            times = low[phase].emitted.program.segment_us  # starts stand where segments end anyway
            return self._in_full(graphs[phase], phase, times)

        def over(found: Mapping[str, Mapping[str, int]]) -> int:
            for phase, chosen in found.items():
                told = schedule.from_text(schedule.to_text(chosen, units), units)  # but for tiles of weights
                self._choose({phase: PrefetchChoice("", told)})
            programs = {phase: x.emitted.program for phase, x in low.items()}
            ahead = [phase for phase in found if state.choice.prefetch[phase].ahead]
            if ahead and not any(plan.tile_rows for plan in state.params.values()):
                return self.trial_peak(graphs) - (state.config.memory_budget_bytes or 0)
            # With all tiles of weights a trial takes as long as what is made of it afterwards.
            programs |= {phase: again(phase).emitted.program for phase in ahead}
            return state.peak(list(programs.values())) - (state.config.memory_budget_bytes or 0)

        given = {phase: known for phase in looks if (known := state.given_distances(phase)) is not None}
        found = given or schedule.choose(looks, spare, over)
        for phase, seen in looks.items():
            key, text = schedule.key_of(phase, units), schedule.to_text(found[phase], units)
            if not given:
                text = state.loader.decide(state.first, key, text, spare)
            chosen = schedule.from_text(text, units)
            why = seen.explained(chosen, schedule.room_text(seen, spare))
            self._choose({phase: PrefetchChoice(why, chosen)})
            if state.choice.prefetch[phase].ahead:
                low[phase] = again(phase)
        return low
