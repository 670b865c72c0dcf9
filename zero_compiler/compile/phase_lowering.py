"""From a phase's graph to its Program: the passes, when gathers start, predicted times."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from .. import passes
from ..cost.cost import CostModel, at_hints, hints
from ..cost.prefetch import PrefetchChoice
from ..cost.simulate import simulate
from ..cost.timeline import Timeline
from ..emit.emit import Emitted, emit
from ..emit.segments import SegmentCompiler
from ..ir import facts, ops
from ..ir.instructions import Compute
from ..ir.program import Program
from ..passes import Context, PassOptions, run_passes
from ..plan import schedule
from .frame_state import FrameState
from .segment_codegen import count_compiled

log = logging.getLogger("zero_compiler")
SAY_EVERY_S = 20.0
# When so many phases were lowered on trial, no other order of measures is tried beside the first: equal on any machine.
MOST_TRIALS = 200


@dataclass(frozen=True)
class Lowered:
    """A scheduled graph and its Program."""

    gm: fx.GraphModule
    emitted: Emitted


@dataclass(frozen=True)
class _Tried:
    """A Program that a phase was lowered to on trial, and all that it follows from beside the graph."""

    asked: tuple[Context, PassOptions]
    tiles: list[int]
    offsets: dict[str, dict[str, int]]  # of kept weights
    program: Program


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
        self.trials, self._began, self._say_at_s = 0, time.monotonic(), SAY_EVERY_S
        self._tried: weakref.WeakKeyDictionary[fx.GraphModule, list[_Tried]] = weakref.WeakKeyDictionary()

    @property
    def is_exhausted(self) -> bool:
        """Whether so much was tried that only what is needed for a plan is tried from here on."""
        return self.trials >= MOST_TRIALS

    def phase(self, gm: fx.GraphModule, phase: str) -> Lowered:
        """Lower ``gm`` itself, with distances that are decided here where they are not known yet."""
        return (
            self._lowered(gm, phase) if self._is_decided(phase) else self.with_distances({phase: gm})[phase]
        )

    def trial_peak(self, graphs: Mapping[str, fx.GraphModule]) -> int:
        """Predicted peak of the phases as they are, in bytes."""
        return self.state.peak(self.trials_of(graphs))

    def trials_of(self, graphs: Mapping[str, fx.GraphModule]) -> list[Program]:
        """Programs of the phases as they are, on trial: with few of many tiles."""
        return [self._trial(gm, phase) for phase, gm in graphs.items()]

    def predicted_us(self, graphs: Mapping[str, fx.GraphModule]) -> float:
        """Predicted time of the phases as they are, one after the other."""
        lowered = [self._lowered(facts.copy_module(gm), phase) for phase, gm in graphs.items()]
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
            asked, tiles, offsets = self._asked(phase), passes.tiles_in(gm.graph), self._offsets()
            emitted, _ = count_compiled(self._lowered(facts.copy_module(gm), phase).emitted, compiler, phase)
            if self._offsets() == offsets:
                self._tried.setdefault(gm, []).insert(0, _Tried(asked, tiles, offsets, emitted.program))

    def least_peak(self, graphs: Mapping[str, fx.GraphModule]) -> int:
        """The same if no segment took more inside than it leaves: no compiler makes it less."""
        return self.state.peak([_bare(program) for program in self.trials_of(graphs)])

    def forget(self, graphs: Mapping[str, fx.GraphModule]) -> None:
        """These were rewritten: what trials found of them is no longer so."""
        for gm in graphs.values():
            self._tried.pop(gm, None)

    def _trial(self, gm: fx.GraphModule, phase: str) -> Program:
        """The Program of a phase, on trial. What was tried before is not lowered again: of two phases a search often
        changes one, and asks for the same plan at several places."""
        asked, tiles, offsets = self._asked(phase), passes.tiles_in(gm.graph), self._offsets()
        tried = self._tried.setdefault(gm, [])
        for t in tried:
            if t.tiles == tiles and t.offsets == offsets and t.asked == asked:
                return t.program
        program = self._lowered(facts.copy_module(gm), phase, trial=True).emitted.program
        self._say_that_it_goes_on()
        if self._offsets() == offsets:  # else a weight got its place just now, which is to be noted again
            tried.append(_Tried(asked, tiles, offsets, program))
        return program

    def _say_that_it_goes_on(self) -> None:
        """Now and then, of a search that takes long: what decides is what was tried, and never the time."""
        self.trials += 1
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
        return self._lowered(facts.copy_module(gm), phase, trial=True).gm

    def _lowered(
        self, gm: fx.GraphModule, phase: str, segment_us: list[float] | None = None, trial: bool = False
    ) -> Lowered:
        """Run the passes of a phase on its graph, and emit its Program with the predicted time of every segment.

        Of a trial only bytes are asked, which times change where chunks are copied to a device.
        """
        state = self.state
        context, options = self._asked(phase)
        pipeline = passes.phase_passes(replace(options, bytes_only=trial and not self._timed(gm)))
        run_passes(gm.graph, pipeline, context, state.trace, state.dump_dir(), trial)
        emitted = self._emitted(gm, phase, trial=trial)
        if trial and not any(g.hops for g in emitted.program.gathers):
            return Lowered(gm, emitted)
        if segment_us is None:
            cost, fused = CostModel(state.machine), state.fused
            known = hints(gm.graph)
            segment_us = [at_hints(cost.region_us(seg.graph, fused), known) for seg in emitted.segments]
        emitted = replace(emitted, program=replace(emitted.program, segment_us=segment_us))
        return Lowered(gm, self._with_hops(gm, phase, emitted))

    def _emitted(
        self, gm: fx.GraphModule, phase: str, ahead: Sequence[Sequence[int]] = (), trial: bool = False
    ) -> Emitted:
        state = self.state
        emitted = emit(gm, state.params, phase, state.loader.kept_offsets(), ahead, trial)
        return replace(emitted, program=state.beside_others(emitted.program))

    def _timed(self, gm: fx.GraphModule) -> bool:
        """Whether times decide where something stands: what waits on another tier, or chunks copied to a device."""
        away = any(gm.graph.find_nodes(op="call_function", target=op) for op in (ops.offload, ops.restore))
        return away or any("host" in plan.path for plan in self.state.params.values())

    def _with_hops(self, gm: fx.GraphModule, phase: str, emitted: Emitted) -> Emitted:
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
                emitted = self._emitted(gm, phase, ahead)
                emitted = replace(emitted, program=replace(emitted.program, segment_us=times))

    def _is_decided(self, phase: str) -> bool:
        """Whether the distances of a phase are known: nothing was to decide, or it was decided before."""
        state = self.state
        if phase not in state.choice.prefetch:
            why = schedule.nothing_to_decide(state.params, phase, state.machine, state.world)
            units = list(state.choice.units.values())
            if why is not None:
                self._choose({phase: PrefetchChoice(why)})
            elif (text := state.first.agreed.distances.get(schedule.key_of(phase, units))) is not None:
                distances = schedule.from_text(text, units)
                self._choose({phase: PrefetchChoice("decided when first compiled", distances)})
        return phase in state.choice.prefetch

    def _choose(self, found: Mapping[str, PrefetchChoice]) -> None:
        choice = self.state.choice
        self.state.choice = replace(choice, prefetch={**choice.prefetch, **found})

    def with_distances(self, graphs: Mapping[str, fx.GraphModule]) -> dict[str, Lowered]:
        """Lower copies of phases, with distances that are decided here where they are not known yet."""
        state = self.state
        decided = {phase: self._is_decided(phase) for phase in graphs}
        low = {phase: self._lowered(facts.copy_module(gm), phase) for phase, gm in graphs.items()}
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
            return self._lowered(facts.copy_module(graphs[phase]), phase, times)

        def over(found: Mapping[str, Mapping[str, int]]) -> int:
            self._choose({phase: PrefetchChoice("", chosen) for phase, chosen in found.items()})
            return self.trial_peak(graphs) - (state.config.memory_budget_bytes or 0)

        found = schedule.choose(looks, spare, over)
        for phase, seen in looks.items():
            key = schedule.key_of(phase, units)
            text = state.loader.decide(state.first, key, schedule.to_text(found[phase], units), spare)
            chosen = schedule.from_text(text, units)
            why = seen.explained(chosen, schedule.room_text(seen, spare))
            self._choose({phase: PrefetchChoice(why, chosen)})
            if state.choice.prefetch[phase].ahead:
                low[phase] = again(phase)
        return low
