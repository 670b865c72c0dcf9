"""What is decided of the calls of a compiled Program: which gradients wait, and whether a call fits the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..emit.no_sync_program import accumulating
from ..ir.program import Need, Program
from ..memory.arena_extents import Ends, ends_by_owner
from ..memory.verify import verify_accumulating
from ..plan import call_admission
from ..plan.cross_frame_memory import beside_now, frames_of, related, saved_before
from ..report.frame import Frame
from ..runtime.model import ModelRuntime
from ..sharded.sharded_model import ShardedModel


class CallDecisions:
    """See :class:`~zero_compiler.runtime.session.Decisions`.

    Args:
        runtimes: runtime of each owner that the Program names; ``first`` is the one that agrees with other ranks.
        frame: the frame of which the Program is a phase.
    """

    def __init__(
        self, program: Program, runtimes: Mapping[str, ModelRuntime], first: ModelRuntime | None, frame: Frame
    ) -> None:
        self._program, self._runtimes, self._first, self._frame = program, runtimes, first, frame
        self._ends = ends_by_owner(program)
        self._around: tuple[object, list[ModelRuntime]] | None = None

    def extents(self, owner: str) -> tuple[int, int]:
        """Bytes of the slots and of the own staging that transfers of an owner's parameters need."""
        ends = self._ends.get(owner, Ends())
        return ends.slots, ends.own

    def accumulating(self, owners: frozenset[str]) -> Program:
        """The Program that keeps the gradients of ``owners``, on the same segments, transfers and arenas."""
        program = accumulating(self._program, owners)
        worlds = {owner: r.sharded_model.group.world for owner, r in self._runtimes.items()}
        verify_accumulating(program, self._program, owners, worlds)
        return program

    def need(self, program: Program, values: Sequence[object], talks: bool) -> Need:
        """What a call takes at its sizes and beside gradients that are kept, on a rank whose peers hear of it."""
        program = beside_now(program, self._frame)
        if self._first is None or (not talks and self._first.sharded_model.group.everyone.world > 1):
            return Need(0, program.idle_bytes)
        sharded_models = [r.sharded_model for r in self._runtimes.values()]
        planned, sized = self._planned(self._first, sharded_models), getattr(self._frame, "sized", None)
        at, phase = None, program.phase
        if planned is not None and sized is not None:
            before = (
                0 if phase == "inference" else saved_before(self._frame, frames_of(related(sharded_models)))
            )
            at = sized.call(phase, values, before, planned, self._frame.programs)
        if planned is not None:
            sharded_models = related(sharded_models)
        everyone = self._first.sharded_model.group.everyone
        who = everyone.name_of(everyone.rank)
        if (
            phase == "forward"
            and sized is not None
            and self._frame.config.activation_budget_bytes is not None
        ):
            more, sizes = sized.more_saved(values)
            refused = call_admission.saves_too_much(self._frame, more, sizes, who)
            if refused is not None:
                return refused
        return call_admission.need_of(program, sharded_models, planned, who, at)

    def beside(self) -> list[ModelRuntime]:
        """Those of all that the models of this call are parts of: what waits there waits beside it."""
        scopes = dict.fromkeys(r.sharded_model.scope for r in self._runtimes.values())
        now = tuple((scope, scope.changes) for scope in scopes)
        if self._around is None or self._around[0] != now:
            relatives = related(r.sharded_model for r in self._runtimes.values())
            self._around = now, [p.runtime for p in relatives if p.runtime is not None]
        return self._around[1]

    def _planned(
        self, first: ModelRuntime, sharded_models: Sequence[ShardedModel]
    ) -> call_admission.PlannedMemory | None:
        """Of the frames compiled so far, and for the optimizers that there are."""
        state = tuple(
            (len(p.frames), len(p.optimizers), p.taken, p.scope, p.scope.changes) for p in sharded_models
        )
        if first.planned is None or first.planned[0] != state:
            first.planned = (state, call_admission.planned_for(sharded_models))
        known: call_admission.PlannedMemory | None = first.planned[1]
        return known
