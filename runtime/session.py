"""Runs a Program: walks its instructions, owns the lifetimes of values, decides nothing."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from zero_compiler.errors import MemoryBudgetError, ShardError, StorageError, TransferError, ZeroError
from zero_compiler.ir.instructions import (
    Compute,
    Fetch,
    Gather,
    Instruction,
    Keep,
    KeepPart,
    Reduce,
    Release,
    Store,
    WaitFetch,
    WaitGather,
    WaitReduce,
)
from zero_compiler.ir.program import Need, Program, last_reads, outputs_of
from zero_compiler.ranges import Range, profiled, ranged
from zero_compiler.ranks.call_handshake import laid_text, lay_text, meet, short_digest
from zero_compiler.ranks.failing import noticed
from zero_compiler.ranks.failure_broadcast import broke_off, cannot_begin
from zero_compiler.ranks.group import Group
from zero_compiler.ranks.peer_waits import explained
from zero_compiler.torch_cpp import SegmentCall, Values

from . import peer_watchdog
from .gathers import Gathers
from .model import ModelRuntime
from .pools import forsake, in_turn, join
from .recorded_segments import RecordedSegments
from .reductions import Reductions, load

_NEED_BYTES = 8  # of a header: what a rank needs of memory
_REASON_BYTES = 8  # behind it: where the reason lies

_Step = Callable[[list[object]], None]  # what an instruction does, given the values of a call


class Decisions(Protocol):
    """What is decided of the calls of a Program where it is compiled (`call_decisions.py`)."""

    def extents(self, owner: str) -> tuple[int, int]:
        """Bytes of the slots and of the own staging that transfers of an owner's parameters need."""

    def accumulating(self, owners: frozenset[str]) -> Program:
        """The Program that keeps the gradients of ``owners``, on the same segments, transfers and arenas."""

    def need(self, program: Program, values: Sequence[object], talks: bool) -> Need:
        """What a call with these ``values`` takes. ``talks``: peers hear of it."""

    def beside(self) -> list[ModelRuntime]:
        """Those of all that the models of a call are parts of: what waits there waits beside it."""


class Session:
    """One loaded Program.

    Args:
        program: what to run.
        segments: callable of each ``Compute.segment``; takes a list that it may empty.
        runtimes: runtime of each owner that the Program names; ``first`` is the one that agrees with other ranks.
        decisions: what is decided of its calls.
        frame: number of the frame of which the Program is a phase.
        recorded: what makes graphs of the device of the segments; None: nothing.
    """

    def __init__(
        self,
        program: Program,
        segments: Sequence[Callable[[list[object]], Sequence[object]]],
        runtimes: dict[str, ModelRuntime],
        first: ModelRuntime | None,
        decisions: Decisions,
        frame: int = 0,
        recorded: RecordedSegments | None = None,
    ) -> None:
        self._decisions = decisions
        self._frame = frame
        self._recorded = recorded
        self.segments = list(segments) if recorded is None else recorded.of(segments)
        self.runtimes = runtimes
        self.first = first
        # Nothing runs in the memory that is made larger here.
        in_turn(runtimes.values(), lambda: self._load(program))
        sends = bool(program.gathers or program.reduces)
        self._talks = first is not None and first.sharded_model.group.everyone.world > 1 and sends
        self._run_from_here(program)

    def _load(self, program: Program) -> None:
        runtimes, first = self.runtimes, self.first
        self._devices = join(runtimes.values())
        self._make_room(program)
        for owner, runtime in runtimes.items():
            if runtime.shared:
                slots, own = self._decisions.extents(owner)
                runtime.engine.grow_arena(runtime.slots, slots)
                runtime.engine.grow_arena(runtime.own, own)
        self._gathers = Gathers(program, runtimes)
        self._known_reduces = {r: load(runtimes[r.owner], r) for r in program.reduces}
        self._moves = first.moves(program) if first is not None and program.offloads else None
        self._copies = (
            program.device_bytes > 0
            or any(r.copied for r in program.reduces)
            or any(o.staged for o in program.offloads)
        )
        self._empty: list[object] = [None] * (program.num_values - program.num_inputs)

    def _make_room(self, program: Program) -> None:
        """In pools that other models may have joined, or left, since it ran last."""
        for runtime in self._devices:
            runtime.pools.grow(program)

    def _run_from_here(self, program: Program) -> None:
        """Run ``program`` from here on, whose transfers are known."""
        self.program = program
        self._sequence = program.collectives()
        self._digest: bytes | None = None
        self._reductions = Reductions(program, self._known_reduces, self.runtimes)
        self._last_read = last_reads(program)
        self._code = [step for at, i in enumerate(program.instrs) if (step := self._step(at, i)) is not None]
        self._title = program.title_in(self._frame)
        self._named: list[tuple[str, str]] = []  # what each step does and starts, made for the first profile
        self._accumulating: dict[frozenset[str], Session] = {}

    def _keeping(self, owners: frozenset[str]) -> Session:
        """This backward with the gradients of ``owners`` kept: a Program of its own, on the same segments, transfers
        and arenas."""
        found = self._accumulating.get(owners)
        if found is None:
            program = self._decisions.accumulating(owners)
            found = self._accumulating[owners] = copy.copy(self)
            found._recorded = None  # values die at other instructions
            found._run_from_here(program)
        return found

    def _step(self, at: int, instr: Instruction) -> _Step | None:
        """What instruction ``at`` does; None where it is nothing. It refers to what it works on and not to the session,
        which is to go with the last reference to it."""
        if instr.idle(self.program):
            return None
        if instr.table == "offloads":
            assert self._moves is not None
            return self._moves.step(instr)
        return _STEPS[type(instr)](self, at, instr)

    def _fetch(self, at: int, instr: Fetch) -> _Step:
        hops, index, hop = self._gathers.hops, instr.index, instr.hop
        return lambda env: hops.start(index, hop)

    def _wait_fetch(self, at: int, instr: WaitFetch) -> _Step:
        hops, index, hop = self._gathers.hops, instr.index, instr.hop
        return lambda env: hops.wait(index, hop)

    def _gather(self, at: int, instr: Gather) -> _Step:
        gathers, index = self._gathers, instr.index
        return lambda env: gathers.start(index)

    def _wait_gather(self, at: int, instr: WaitGather) -> _Step:
        gathers, index, outs = self._gathers, instr.index, Values(instr.outs)
        if self.program.gathers[index].home:
            views = gathers.views(index)
            return lambda env: outs.put(env, views)
        return lambda env: outs.put(env, gathers.wait(index))

    def _keep_part(self, at: int, instr: KeepPart) -> _Step:
        gathers, index = self._gathers, instr.index
        return lambda env: gathers.keep_part(index)

    def _release(self, at: int, instr: Release) -> _Step:
        gathers, index, values = self._gathers, instr.index, Values(instr.values)

        def release(env: list[object]) -> None:
            values.drop(env)
            gathers.release(index)

        return release

    def _compute(self, at: int, instr: Compute) -> _Step:
        return SegmentCall(self.segments[instr.segment], instr.ins, instr.outs, instr.free)

    def _reduce(self, at: int, instr: Reduce) -> _Step:
        reductions, index, ins, free = self._reductions, instr.index, Values(instr.ins), Values(instr.free)

        def reduce(env: list[object]) -> None:
            reductions.start(index, ins.take(env))
            free.drop(env)

        return reduce

    def _store(self, at: int, instr: Store) -> _Step:
        reductions, index = self._reductions, instr.index
        return lambda env: reductions.store(env, index)

    def _wait_reduce(self, at: int, instr: WaitReduce) -> _Step:
        reductions, index, outs = self._reductions, instr.index, Values(instr.outs)
        r, read = self.program.reduces[index], self._reductions.reads(instr.outs)
        # For each gradient, whether nothing reads its weight from here on.
        final = tuple(self._last_read.get((r.owner, name), -1) < at for name in r.names)
        return lambda env: reductions.wait(env, index, outs, final, read)

    def _keep(self, at: int, instr: Keep) -> _Step:
        reductions, index, ins, free = self._reductions, instr.index, Values(instr.ins), Values(instr.free)

        def keep(env: list[object]) -> None:
            reductions.keep(index, ins.take(env))
            free.drop(env)

        return keep

    @property
    def _group(self) -> Group:
        """The ranks of this call, where it talks to any."""
        assert self.first is not None
        group: Group = self.first.sharded_model.group
        return group

    # Agreement ---------------------------------------------------------------------------------------------

    def _agree(self, need: Need) -> None:
        """Before the first collective of a call: every rank is about to run the same sequence.

        What may differ is which kept weights a rank found changed: then all gather anew. And what it needs of memory,
        where that is more than its budget allows: then no rank begins, and all say why one cannot.
        """
        first = self.first
        assert first is not None
        for runtime in self.runtimes.values():
            runtime.sharded_model.protocol.check_whole()
        if self._digest is None:
            self._digest = short_digest(self._text())
        what = f"call of the model ({self.program.phase})"
        group = first.sharded_model.group
        with self._together():
            # What peers read from here on is in place before they are told that this rank is in the call.
            self._gathers.bring_home()
            rest = (
                lay_text(group, need.refusal, _REASON_BYTES)
                if need.nbytes
                else self._gathers.stale_kept(self.program.phase)
            )
        told = meet(
            group, self._digest, self._told_text, what, need.nbytes.to_bytes(_NEED_BYTES, "little") + rest
        )
        needs = [int.from_bytes(t[:_NEED_BYTES], "little") for t in told]
        if any(needs):
            most = needs.index(max(needs))
            reason = laid_text(group, told[most][_NEED_BYTES : _NEED_BYTES + _REASON_BYTES])
            who = group.everyone.name_of(most)
            raise MemoryBudgetError(
                reason
                or f"{who} needs {max(needs):,} bytes for this call, more than its memory_budget_bytes allows"
            )
        stale = [t[_NEED_BYTES:] for t in told]
        if any(s != stale[0] for s in stale):
            for runtime in self.runtimes.values():
                runtime.fresh.clear()

    def _text(self) -> str:
        """What this call is: the first line in which it differs from a peer's is what a message shows."""
        sharded_models = [r.sharded_model for r in self.runtimes.values()]
        title = ", ".join(p.identity.title() for p in sharded_models)
        head = f"phase {self.program.title}"
        return "\n".join([head, title, *(p.protocol.describe() for p in sharded_models), self._sequence])

    def _told_text(self) -> str:
        """The same for ranks that are in another call, with what the user was told of why."""
        assert self.first is not None
        text: str = self.first.sharded_model.scope.told(self._text())
        return text

    # Running -----------------------------------------------------------------------------------------------

    def run(self, inputs: list[object]) -> list[object]:
        """Run once. ``inputs`` is emptied, so that values die as early as the Program says."""
        if any(r.sharded_model.defers for r in self._reductions.owners.values()):
            quiet = frozenset(owner for owner, r in self._reductions.owners.items() if r.sharded_model.defers)
            return self._keeping(quiet).run(inputs)
        with ranged(self._title):
            return in_turn(self._devices, lambda: self._run(inputs), self._ended)

    def _run(self, inputs: list[object]) -> list[object]:
        env = inputs + self._empty
        inputs.clear()
        call = (
            peer_watchdog.WatchedCall(self._group, [e for r in self.runtimes.values() for e in r.engines])
            if self._talks
            else None
        )
        try:
            need = self._begin(env)
        except Exception:
            raise  # on every rank: none has begun
        except BaseException as error:
            # Ctrl-C comes when the ranks have met, not while they wait for each other: peers may have begun.
            self._break_off(error)
            raise
        try:  # with nothing before it where Ctrl-C could come, and peers would not be told
            if call is not None:
                peer_watchdog.begin(call)
            beside = self._decisions.beside()
            for runtime in beside:
                runtime.engine.trim(need.idle_bytes // len(beside))  # of -1 that is -1
            if self._recorded is not None:
                self._recorded.began(env)
            self._walk(env)
            self._finish_copies()
            if self._moves is not None:
                self._moves.end()
            if self._talks:
                self._leave()
            outputs = outputs_of(self.program, env.__getitem__)
            return outputs if self._recorded is None else self._recorded.outputs(outputs)
        except BaseException as error:
            told = self._told(error)
            self._break_off(told or error)
            if told is not None:
                raise told from error
            raise
        finally:
            if self._recorded is not None:
                self._recorded.ended()
            if call is not None:
                peer_watchdog.end(call)

    def _told(self, error: BaseException) -> ZeroError | None:
        """What a peer has said that failed in this call, where this ``error`` comes of that."""
        lost = self._talks and isinstance(error, TransferError) and not isinstance(error, StorageError)
        told = noticed(self._group) if lost else None
        # Of a peer that is gone every rank has an error of its own, which says as much.
        if told is not None and type(told) is not TransferError:
            return told
        return explained(self._group, f"call of the model ({self.program.phase})", error) if lost else None

    def _break_off(self, error: BaseException) -> None:
        """Tell peers; and end what is in flight, which holds buffers of the arena, before anything else uses it. On a
        device copies may stand behind what a peer does not send any more."""
        try:
            if self._talks:
                broke_off(
                    self._group, error, [r.sharded_model.identity.title() for r in self.runtimes.values()]
                )
        finally:
            self._gathers.forget()
            self._gathers.hops.end()
            if self._moves is not None:
                self._moves.end()
            self._reductions.forget()
        for runtime in self.runtimes.values():
            for engine in runtime.engines:
                engine.abandon(f"{type(error).__name__}: {error}")
            runtime.sharded_model.protocol.break_off(f"{type(error).__name__}: {error}")
            runtime.fresh.clear()
        if self._talks:
            forsake(self.runtimes.values())

    def _begin(self, env: Sequence[object]) -> Need:
        """What this call takes, with which all ranks begin."""
        with self._together():
            if any(r.pools.recorded() for r in self._devices):
                raise ShardError(
                    "a compiled call of a sharded model cannot be recorded into a graph of the device: a replay would "
                    "write to memory that other calls use, and ranks would not meet; call it outside of that"
                )
            self._reductions.check_unhooked()
            self._make_room(self.program)
            need = self._decisions.need(self.program, env, self._talks)
        if self._talks:
            self._agree(need)
        elif need.nbytes:
            raise MemoryBudgetError(need.refusal)
        return need

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Before ranks meet: an error on one of them ends the call on all."""
        try:
            yield
        except Exception as error:
            self._ended(error)
            raise

    def _ended(self, error: Exception) -> None:
        if self._talks:
            cannot_begin(self._group, error)

    def _leave(self) -> None:
        """The end of a call: no peer reads this rank's memory any more, so the caller may write to it."""
        for runtime in self.runtimes.values():
            if runtime.shared:
                runtime.engine.leave()

    def _finish_copies(self) -> None:
        """The end of a call: shards on the host may be written again, and gradients there be read."""
        for runtime in self.runtimes.values() if self._copies else ():
            runtime.aside.finish()

    def _walk(self, env: list[object]) -> None:
        if profiled():
            if not self._named:
                self._named = [
                    (i.name(self.program), moved.label if (moved := i.transfer(self.program)) else "")
                    for i in self.program.instrs
                    if not i.idle(self.program)
                ]
            for (what, starts), step in zip(self._named, self._code, strict=True):
                with Range(what, starts):
                    step(env)
        else:
            for step in self._code:
                step(env)
        self._reductions.finish_sums(env)


_STEPS: dict[type, Callable[[Session, int, Any], _Step]] = {
    Fetch: Session._fetch,
    WaitFetch: Session._wait_fetch,
    Gather: Session._gather,
    WaitGather: Session._wait_gather,
    KeepPart: Session._keep_part,
    Release: Session._release,
    Compute: Session._compute,
    Reduce: Session._reduce,
    Store: Session._store,
    WaitReduce: Session._wait_reduce,
    Keep: Session._keep,
}
