"""Runs a Program: walks its instructions, owns the lifetimes of values, decides nothing."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from zero_compiler.emit.no_sync_program import accumulating
from zero_compiler.errors import MemoryBudgetError, ShardError, StorageError, TransferError, ZeroError
from zero_compiler.ir.program import (
    Compute,
    Fetch,
    Gather,
    GatherDesc,
    Keep,
    Program,
    Reduce,
    Release,
    Store,
    WaitFetch,
    WaitGather,
    last_reads,
    outputs_of,
)
from zero_compiler.memory.arena_extents import Ends, ends_by_owner
from zero_compiler.memory.verify import verify_accumulating
from zero_compiler.plan import call_admission
from zero_compiler.plan.cross_frame_memory import beside_now, frames_of, related, saved_before
from zero_compiler.ranks.call_handshake import (
    broke_off,
    cannot_begin,
    laid_text,
    lay_text,
    meet,
    short_digest,
)
from zero_compiler.ranks.failing import noticed
from zero_compiler.ranks.group import Group
from zero_compiler.ranks.peer_waits import explained
from zero_compiler.sharded.sharded_model import ShardedModel

from . import activation_offload, peer_watchdog
from .model import ModelRuntime
from .pools import forsake, in_turn, join
from .reductions import Reductions, load
from .tier_copies import Hops

_GATHER, _WAIT_GATHER, _RELEASE, _COMPUTE, _REDUCE, _WAIT_REDUCE = range(6)
_READ_HOME, _FETCH, _WAIT_FETCH, _MOVE, _KEEP, _STORE = range(6, 12)
_NEED_BYTES = 8  # of a header: what a rank needs of memory
_REASON_BYTES = 8  # behind it: where the reason lies
_BLOCK = 1 << 22  # elements of kept weights that a device compares at a time


_Pair = tuple[torch.Tensor, torch.Tensor]


def _equal(pairs: Sequence[_Pair | None]) -> list[bool]:
    """Of each pair whether the second, cast to the dtype of the first, equals it; not where there is none."""
    there = [pair for pair in pairs if pair is not None]
    if not there or there[0][0].device.type == "cpu":
        return [pair is not None and _equal_here(*pair) for pair in pairs]
    # A device is asked once: each answer waits for all that it has been told to compute.
    flags = torch.stack([_differ(*pair) for pair in there]).tolist()
    differ = iter(flags)
    return [pair is not None and not next(differ) for pair in pairs]


def _equal_here(kept: torch.Tensor, local: torch.Tensor) -> bool:
    """After an optimizer's step the first block tells."""
    kept, local = kept.reshape(-1), local.reshape(-1)
    at, size = 0, 1 << 12
    while at < local.numel():
        if not torch.equal(kept[at : at + size], local[at : at + size].to(kept.dtype)):
            return False
        at, size = at + size, 1 << 18
    return True


def _differ(kept: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """In blocks, so that what is cast takes little room."""
    blocks = zip(kept.reshape(-1).split(_BLOCK), local.reshape(-1).split(_BLOCK), strict=True)
    differ = torch.zeros((), dtype=torch.bool, device=kept.device)
    for here, there in blocks:
        differ |= (here != there.to(here.dtype)).any()
    return differ


def _rows(runtime: ModelRuntime, name: str, view: torch.Tensor | None) -> _Pair | None:
    """This rank's rows inside the kept copy, and as they rest; None where these are not there to compare."""
    if view is None:
        return None
    group = runtime.policy.group
    layout = runtime.policy.params[name].layout
    rows = layout.rows(group.rank)
    local = runtime.policy.param(name)._local_tensor.detach()
    if local.shape[:1] != (rows,):
        return None
    return view.narrow(0, layout.start(group.rank), rows), local


class Session:
    """One loaded Program.

    Args:
        program: what to run.
        segments: callable of each ``Compute.segment``; takes a list that it may empty.
        runtimes: runtime of each owner that the Program names; ``first`` is the one that agrees with other ranks.
        frame: the frame of which the Program is a phase.
    """

    def __init__(
        self,
        program: Program,
        segments: Sequence[Any],
        runtimes: dict[str, ModelRuntime],
        first: ModelRuntime | None,
        frame: Any = None,
    ) -> None:
        self.frame = frame
        self.segments = list(segments)
        self.runtimes = runtimes
        self.first = first
        # Nothing runs in the memory that is made larger here.
        in_turn(runtimes.values(), lambda: self._load(program))
        sends = bool(program.gathers or program.reduces)
        self._talks = first is not None and first.policy.group.everyone.world > 1 and sends
        self._take(program)

    def _load(self, program: Program) -> None:
        runtimes, first = self.runtimes, self.first
        self._devices = join(runtimes.values())
        self._make_room(program)
        ends = ends_by_owner(program)
        for owner, runtime in runtimes.items():
            if runtime.shared:
                at = ends.get(owner, Ends())
                runtime.engine.grow_arena(runtime.slots, at.slots)
                runtime.engine.grow_arena(runtime.own, at.own)
        self._gathers = [self._add_gather(g) for g in program.gathers]
        self._whole = [self._is_whole(g) for g in program.gathers]
        self._known_reduces = {r: load(runtimes[r.owner], r) for r in program.reduces}
        self._moves = first.moves(program) if first is not None and program.offloads else None
        self._at_home: dict[ModelRuntime, list[str]] = {}
        for g in program.gathers:
            if g.home:
                self._at_home.setdefault(self.runtimes[g.owner], []).extend(g.names)
        self._hops = Hops([(self.runtimes[g.owner], g) for g in program.gathers])
        self._copies = (
            program.device_bytes > 0
            or any(r.copied for r in program.reduces)
            or any(o.staged for o in program.offloads)
        )
        self._empty: list[Any] = [None] * (program.num_values - program.num_inputs)

    def _make_room(self, program: Program) -> None:
        """In pools that other models may have joined, or left, since it ran last."""
        for runtime in self._devices:
            runtime.pools.grow(program)

    def _take(self, program: Program) -> None:
        """Run ``program`` from here on, whose transfers are known."""
        self.program = program
        self._sequence = program.collectives()
        self._digest: bytes | None = None
        self._reductions = Reductions(program, self._known_reduces, self.runtimes)
        self._last_read = last_reads(program)
        self._code = [self._encode(at, i) for at, i in enumerate(program.instrs) if not self._at_rest(i)]
        self._accumulating: dict[frozenset[str], Session] = {}
        self._around: tuple[Any, list[Any]] | None = None

    def _keeping(self, owners: frozenset[str]) -> Session:
        """This backward with the gradients of ``owners`` kept: a Program of its own, on the same segments, transfers
        and arenas."""
        found = self._accumulating.get(owners)
        if found is None:
            program = accumulating(self.program, owners)
            worlds = {owner: r.policy.group.world for owner, r in self.runtimes.items()}
            verify_accumulating(program, self.program, owners, worlds)
            found = self._accumulating[owners] = copy.copy(self)
            found._take(program)
        return found

    # Loading -----------------------------------------------------------------------------------------------

    def _add_gather(self, g: GatherDesc) -> tuple[ModelRuntime, int, GatherDesc, list[Any]]:
        runtime = self.runtimes[g.owner]
        if g.home:
            return runtime, -1, g, runtime.home_views(g.names)
        arena = runtime.kept if g.kept else runtime.slots if g.shared else runtime.transient
        if g.kept:
            item = runtime.policy.group.world * getattr(torch, g.dtype).itemsize
            runtime.make_room_for_kept(
                max(o + c * item for o, c in zip(g.offsets, g.chunk_numels, strict=True))
            )

        params = list(zip(g.chunk_numels, map(list, g.shapes), g.offsets, strict=True))
        index = runtime.engine.add_gather(
            arena, getattr(torch, g.dtype), g.label, params, g.staging, staging_arena=runtime.transient
        )
        views = runtime.kept_views((g.names, g.dtype, g.offsets)) if g.kept else []
        return runtime, index, g, views

    def _is_whole(self, g: GatherDesc) -> bool:
        """Whether full weights are what lies at rest on the only rank, so that their views serve from call to call."""
        policy = self.runtimes[g.owner].policy
        own = all(policy.params[n].layout.dtype is getattr(torch, g.dtype) for n in g.names)
        return policy.group.world == 1 and own and not (g.home or g.hops or g.tile)

    def _at_rest(self, instr: Any) -> bool:
        """Nothing to do: a weight that is read where it lies at rest is neither fetched nor let go of."""
        return isinstance(instr, (Gather, Release)) and self.program.gathers[instr.index].home

    def _encode(self, at: int, instr: Any) -> tuple[int, Any, Any, Any, Any]:
        # A tuple with a small number in front is what the loop below reads fastest.
        if isinstance(instr, Fetch):
            return (_FETCH, instr.index, instr.hop, None, None)
        if isinstance(instr, WaitFetch):
            return (_WAIT_FETCH, instr.index, instr.hop, None, None)
        if isinstance(instr, Store):
            return (_STORE, instr.index, None, None, None)
        if isinstance(instr, activation_offload.INSTRUCTIONS):
            assert self._moves is not None
            return (_MOVE, self._moves.step(instr), None, None, None)
        if isinstance(instr, Gather):
            return (_GATHER, instr.index, None, None, None)
        if isinstance(instr, WaitGather):
            if self.program.gathers[instr.index].home:
                return (_READ_HOME, self._gathers[instr.index][3], instr.outs, None, None)
            return (_WAIT_GATHER, instr.index, instr.outs, None, None)
        if isinstance(instr, Release):
            return (_RELEASE, instr.index, instr.values, None, None)
        if isinstance(instr, Compute):
            return (_COMPUTE, self.segments[instr.segment], instr.ins, instr.outs, instr.free)
        if isinstance(instr, Reduce):
            return (_REDUCE, instr.index, instr.ins, instr.free, None)
        if isinstance(instr, Keep):
            return (_KEEP, instr.index, instr.ins, instr.free, None)
        # For each gradient, whether nothing reads its weight from here on.
        r = self.program.reduces[instr.index]
        final = tuple(self._last_read.get((r.owner, name), -1) < at for name in r.names)
        return (_WAIT_REDUCE, instr.index, instr.outs, final, None)

    @property
    def _group(self) -> Group:
        """The ranks of this call, where it talks to any."""
        assert self.first is not None
        group: Group = self.first.policy.group
        return group

    # Agreement ---------------------------------------------------------------------------------------------

    def _agree(self, need: call_admission.Need) -> None:
        """Before the first collective of a call: every rank is about to run the same sequence.

        What may differ is which kept weights a rank found changed: then all gather anew. And what it needs of memory,
        where that is more than its budget allows: then no rank begins, and all say why one cannot.
        """
        first = self.first
        assert first is not None
        for runtime in self.runtimes.values():
            runtime.policy.protocol.check_whole()
        if self._digest is None:
            self._digest = short_digest(self._text())
        what = f"call of the model ({self.program.phase})"
        group = first.policy.group
        with self._together():
            # What peers read from here on is in place before they are told that this rank is in the call.
            for runtime, names in self._at_home.items():
                runtime.bring_home(names)
            rest = lay_text(group, need.refusal, _REASON_BYTES) if need.nbytes else self._stale_kept()
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
        policies = [r.policy for r in self.runtimes.values()]
        title = ", ".join(p.identity.title() for p in policies)
        head = f"phase {self.program.title}"
        return "\n".join([head, title, *(p.protocol.describe() for p in policies), self._sequence])

    def _told_text(self) -> str:
        """The same for ranks that are in another call, with what the user was told of why."""
        assert self.first is not None
        text: str = self.first.policy.scope.told(self._text())
        return text

    def _stale_kept(self) -> bytes:
        """Forget kept weights whose shards have changed; a digest of what is left to gather.

        Shards are written outside the runtime (optimizers, ``load_state_dict``, averages through ``.data``), and
        no counter sees all of that; this rank's rows inside the kept copy do.
        """
        seen = hashlib.blake2b(digest_size=8)
        kept = [
            (runtime, name, view)
            for runtime, _, g, views in self._gathers
            if g.kept and not g.home
            for name, view in zip(g.names, views or [None] * len(g.names), strict=True)
        ]
        if self.program.phase != "backward":
            asked = [at for at in kept if at[1] in at[0].fresh]
            for (runtime, name, _), same in zip(asked, _equal([_rows(*at) for at in asked]), strict=True):
                if not same:
                    runtime.fresh.discard(name)
        for runtime, name, view in kept:
            seen.update(b"\1" if view is not None and name in runtime.fresh else b"\0")
        return seen.digest()

    # Running -----------------------------------------------------------------------------------------------

    def run(self, inputs: list[Any]) -> list[Any]:
        """Run once. ``inputs`` is emptied, so that values die as early as the Program says."""
        if not all(r.policy.sync for r in self._reductions.owners.values()):
            quiet = frozenset(owner for owner, r in self._reductions.owners.items() if not r.policy.sync)
            return self._keeping(quiet).run(inputs)
        return in_turn(self._devices, lambda: self._run(inputs), self._ended)

    def _run(self, inputs: list[Any]) -> list[Any]:
        env = inputs + self._empty
        inputs.clear()
        call = (
            peer_watchdog.WatchedCall(self._group, [r.engine for r in self.runtimes.values()])
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
            engines = self._beside()
            for engine in engines:
                engine.trim(need.idle_bytes // len(engines))  # of -1 that is -1
            self._walk(env)
            self._finish_copies()
            if self._moves is not None:
                self._moves.end()
            if self._talks:
                self._leave()
        except BaseException as error:
            told = self._told(error)
            self._break_off(told or error)
            if told is not None:
                raise told from error
            raise
        finally:
            if call is not None:
                peer_watchdog.end(call)
        return outputs_of(self.program, env.__getitem__)

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
                broke_off(self._group, error, [r.policy.identity.title() for r in self.runtimes.values()])
        finally:
            self._hops.end()
            if self._moves is not None:
                self._moves.end()
            self._reductions.forget()
        for runtime in self.runtimes.values():
            runtime.engine.abandon(f"{type(error).__name__}: {error}")
            runtime.policy.protocol.break_off(f"{type(error).__name__}: {error}")
            runtime.fresh.clear()
        if self._talks:
            forsake(self.runtimes.values())

    def _begin(self, env: Sequence[Any]) -> call_admission.Need:
        """What this call takes, with which all ranks begin."""
        with self._together():
            if any(r.pools.recorded() for r in self._devices):
                raise ShardError(
                    "a compiled call of a sharded model cannot be recorded into a graph of the device: a replay would "
                    "write to memory that other calls use, and ranks would not meet; call it outside of that"
                )
            self._reductions.check_unhooked()
            self._make_room(self.program)
            need = self._need(env)
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

    def _need(self, env: Sequence[Any]) -> call_admission.Need:
        """What this call takes at its sizes and beside gradients that are kept, on a rank whose peers hear of it."""
        self.program = beside_now(self.program, self.frame)
        if self.first is None or (not self._talks and self.first.policy.group.everyone.world > 1):
            return call_admission.Need(0, self.program.idle_bytes)
        policies = [r.policy for r in self.runtimes.values()]
        planned, sized = self._planned(policies), getattr(self.frame, "sized", None)
        at, phase = None, self.program.phase
        if planned is not None and sized is not None:
            before = 0 if phase == "inference" else saved_before(self.frame, frames_of(related(policies)))
            at = sized.call(phase, env, before, planned, self.frame.programs)
        if planned is not None:
            policies = related(policies)
        everyone = self.first.policy.group.everyone
        who = everyone.name_of(everyone.rank)
        if phase == "forward" and sized is not None and self.frame.config.activation_budget_bytes is not None:
            more, sizes = sized.more_saved(env)
            refused = call_admission.saves_too_much(self.frame, more, sizes, who)
            if refused is not None:
                return refused
        return call_admission.need_of(self.program, policies, planned, who, at)

    def _beside(self) -> list[Any]:
        """The engines of all that the models of this call are parts of: what waits there waits beside it."""
        scopes = dict.fromkeys(r.policy.scope for r in self.runtimes.values())
        now = tuple((scope, scope.changes) for scope in scopes)
        if self._around is None or self._around[0] != now:
            relatives = related(r.policy for r in self.runtimes.values())
            self._around = now, [p.runtime for p in relatives if p.runtime is not None]
        return [r.engine for r in self._around[1]]

    def _planned(self, policies: Sequence[ShardedModel]) -> call_admission.Planned | None:
        """Of the frames compiled so far, and for the optimizers that there are."""
        assert self.first is not None
        state = tuple((len(p.frames), len(p.optimizers), p.taken, p.scope, p.scope.changes) for p in policies)
        if self.first.planned is None or self.first.planned[0] != state:
            self.first.planned = (state, call_admission.planned_for(policies))
        known: call_admission.Planned | None = self.first.planned[1]
        return known

    def _leave(self) -> None:
        """The end of a call: no peer reads this rank's memory any more, so the caller may write to it."""
        for runtime in self.runtimes.values():
            if runtime.shared:
                runtime.engine.leave()

    def _finish_copies(self) -> None:
        """The end of a call: shards on the host may be written again, and gradients there be read."""
        for runtime in self.runtimes.values() if self._copies else ():
            runtime.aside.finish()

    def _walk(self, env: list[Any]) -> None:
        reductions = self._reductions
        for op, a, b, c, d in self._code:
            if op == _COMPUTE:
                args = [env[i] for i in b]
                for i in d:
                    env[i] = None
                _put(env, c, a(args))
            elif op == _FETCH:
                self._hops.start(a, b)
            elif op == _WAIT_FETCH:
                self._hops.wait(a, b)
            elif op == _GATHER:
                self._gather(a)
            elif op == _WAIT_GATHER:
                _put(env, b, self._wait_gather(a))
            elif op == _RELEASE:
                for i in b:
                    env[i] = None
                if not self._whole[a]:
                    runtime, index, _, _ = self._gathers[a]
                    runtime.engine.release(index)
            elif op == _READ_HOME:
                _put(env, b, a)
            elif op == _MOVE:
                a(env)
            elif op == _REDUCE:
                reductions.start(a, [env[i] for i in b])
                for i in c:
                    env[i] = None
            elif op == _WAIT_REDUCE:
                reductions.wait(env, a, b, c)
            elif op == _STORE:
                reductions.store(env, a)
            else:
                reductions.keep(a, [env[i] for i in b])
                for i in c:
                    env[i] = None
        reductions.land_sums(env)

    def _gather(self, which: int) -> None:
        runtime, index, g, views = self._gathers[which]
        if g.kept and views and runtime.fresh.issuperset(g.names) and runtime.policy.group.world > 1:
            return
        if g.kept:
            runtime.fresh.difference_update(g.names)
        chunks = self._hops.chunks(which)
        if not self._whole[which]:
            runtime.engine.gather_start(index, chunks)
            return
        held = runtime.whole.get(g.names)
        if held is None or not all(map(operator.is_, held[0], chunks)):
            runtime.engine.gather_start(index, chunks)
            runtime.whole[g.names] = (chunks, runtime.engine.gather_wait(index))
            runtime.engine.release(index)

    def _wait_gather(self, which: int) -> Sequence[torch.Tensor]:
        runtime, index, g, views = self._gathers[which]
        if self._whole[which]:
            return runtime.whole[g.names][1]
        if not g.kept:
            return runtime.engine.gather_wait(index)
        if views and runtime.fresh.issuperset(g.names) and runtime.policy.group.world > 1:
            return views
        views[:] = runtime.engine.gather_wait(index)
        runtime.engine.release(index)
        runtime.fresh.update(g.names)
        return views


def _put(env: list[Any], at: Sequence[int], values: Sequence[Any]) -> None:
    """Store ``values`` at their numbers. A function of its own: no name of the walk's may keep a value alive that the
    Program has given up (the last one of a segment, say, for as long as the next segment runs)."""
    for i, value in zip(at, values, strict=True):
        if i >= 0:
            env[i] = value
