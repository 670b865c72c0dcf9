"""Memory in which Programs run: the arena of gathers and staging, and what chunks from other tiers pass through."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol, TypeVar

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from zero_compiler.errors import ShardError
from zero_compiler.ir.program import Program
from zero_compiler.runtime import _C

from ..storage.aio import buffer
from .tier_copies import Aside

T = TypeVar("T")


class PoolUser(Protocol):
    """The runtime of a sharded model (`model.py`), as far as the pools that it uses need it."""

    pools: Pools

    def place_arena(self, arena: object) -> None: ...


U = TypeVar("U", bound=PoolUser)
# Far longer than one call takes.
_LONGEST_S = 600.0
# A thread that has not looked for so long, though it waits, may be no more (Ctrl-C): the next may go before it.
_SEEN_S = 1.0


class Pools:
    """Pools of one device: of one sharded model, or of several of which a Program has parameters.

    A plan has one arena for all of its transfers, whoever's parameters they move. So the engines of such models use the
    same memory: of two of their Programs, one runs at a time (:func:`in_turn`), and it is not exchanged meanwhile. On
    an accelerator the streams of the user order what they have queued.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.arena = _C.Arena(0, device)
        # Into which files are read, on the host; and to which chunks are copied from there, on the device.
        self.host = buffer(0)
        self.near: torch.Tensor | None = None
        self.forsaken = False  # of calls that broke off: nobody joins them
        # Runtimes by id. A plain dict, as a model may be dropped in any thread while another one looks through it.
        self._users: dict[int, weakref.ref[PoolUser]] = {}
        self.turn = threading.Lock()  # of whoever runs a Program in them, or changes them
        self.thread: int | None = None  # where that is
        self.turns = 0  # how many there were
        self.waiting: dict[object, float] = {}  # threads in their order, and when each looked last

    @functools.cached_property
    def stream(self) -> torch.Stream | None:
        """That of all copies between the device and the host; None where the device has no streams."""
        return None if self.device.type == "cpu" else torch.Stream(self.device)

    @functools.cached_property
    def aside(self) -> Aside:
        """What makes these copies, and knows which bytes of the pool on the host they still read."""
        return Aside(self.device, self.stream)

    def recorded(self) -> bool:
        """Whether what is given to the device now is recorded into a graph, to be replayed."""
        return self.device.type != "cpu" and bool(
            getattr(torch.get_device_module(self.device), "is_current_stream_capturing", bool)()
        )

    def join(self, runtime: PoolUser) -> None:
        """Let a runtime use these. What it has used before stays with those that it has shared it with."""
        # First: Ctrl-C may come between any two lines.
        runtime.place_arena(self.arena)
        self._users[id(runtime)] = weakref.ref(runtime)
        runtime.pools = self

    def users(self) -> list[PoolUser]:
        """The runtimes that use these."""
        return [user for ref in list(self._users.values()) if (user := ref()) is not None]

    def grow(self, program: Program) -> None:
        """Make room for a Program, where there is less; nothing is under way."""
        if program.transient_bytes > self.arena.nbytes:
            arena = _C.Arena(program.transient_bytes, self.device)
            for runtime in self.users():
                runtime.place_arena(arena)
            self.arena = arena  # last: what broke off before is done again
        # Training writes to what an evaluation has made room for, and a call may be compiled meanwhile.
        with torch.inference_mode(False), unset_fake_temporarily():
            if program.host_bytes > self.host.numel():
                self._finish()
                self.host = buffer(0)  # not both at once
                self.host = buffer(program.host_bytes)
            if program.device_bytes > (0 if self.near is None else self.near.numel()):
                self._finish()
                self.near = None
                self.near = torch.empty(program.device_bytes, dtype=torch.uint8, device=self.device)

    def leave(self, runtime: object) -> None:
        """A runtime is at its end; with the last one the memory is.

        Of others that go on nothing is waited for: this may be any thread, in no turn.
        """
        self._users.pop(id(runtime), None)
        if not self.users():
            self._empty()

    def absorb(self, other: Pools) -> None:
        """Take over the runtimes of other pools of the same device; a Program of theirs makes room when it runs."""
        other._finish()
        for runtime in other.users():
            self.join(runtime)
        other._users.clear()
        other._empty()

    def keep(self, broken: Collection[PoolUser]) -> None:
        """Keep these runtimes alone, for good; the others take other memory."""
        self.forsaken = True
        rest = [u for u in self.users() if u not in broken]
        if rest:
            other = Pools(self.device)
            other.__dict__["stream"] = self.stream  # copies of their activations may be under way there
            for runtime in rest:
                self._users.pop(id(runtime), None)
                other.join(runtime)

    def _finish(self) -> None:
        """Wait until nothing is copied any more."""
        if "aside" in self.__dict__:
            self.aside.finish()
        if "stream" in self.__dict__ and self.stream is not None:
            self.stream.synchronize()  # activations are copied there too

    def _empty(self) -> None:
        self._finish()
        self.arena, self.host, self.near = _C.Arena(0, self.device), buffer(0), None


def in_turn(
    runtimes: Iterable[PoolUser], do: Callable[[], T], refused: Callable[[ShardError], None] = lambda _: None
) -> T:
    """``do`` with the pools of these to this thread alone: waits for Programs of other threads.

    Args:
        refused: called with the error before it is raised.

    Raises:
        ShardError: this thread runs a Program in them already, or one of another thread does not end.
    """
    runtimes = list(runtimes)
    out: list[T] = []

    def once(pools: list[Pools]) -> None:
        if _pools_of(runtimes) == pools:  # else they were exchanged for others while this thread waited
            out.append(do())

    while not out:
        pools = _pools_of(runtimes)
        try:
            _check_unnested(pools)
            for one in pools:
                _wait(one)
        except ShardError as error:
            refused(error)
            raise
        _nested(pools, functools.partial(once, pools))
    return out[0]


def _pools_of(runtimes: Iterable[PoolUser]) -> list[Pools]:
    """In one order for all threads."""
    return sorted({r.pools for r in runtimes}, key=id)


def _check_unnested(pools: Iterable[Pools]) -> None:
    if any(one.thread == threading.get_ident() for one in pools):
        raise _passing(
            "began while another one runs that waits for it (in a custom operator or a hook of a gradient, say), and "
            "both use the same memory: call it before or after that"
        )


def _wait(pools: Pools) -> None:
    """Wait until the turn seems free, behind those that came before, and not without an end.

    Between this and the lock another thread may take it; then this one waits as any lock does.
    """
    if not pools.turn.locked() and not pools.waiting:
        return
    mine, turns, ends = object(), -1, 0.0
    try:
        while True:
            now = pools.waiting[mine] = time.monotonic()
            if not pools.turn.locked() and _is_first(pools, mine, now):
                return
            if pools.turns != turns:
                ends, turns = now + _LONGEST_S, pools.turns  # of this one
            if now > ends:
                raise _passing(
                    f"waited {_LONGEST_S:.0f} s for another one, of another thread, to end, since both use the same "
                    "memory: that one may wait for this thread, or for another rank; end it, and call this again"
                )
            time.sleep(1e-4)
    finally:
        pools.waiting.pop(mine, None)


def _is_first(pools: Pools, mine: object, now: float) -> bool:
    for other, seen in pools.waiting.copy().items():
        if other is mine or now - seen < _SEEN_S:
            return other is mine
    return True


def _passing(what: str) -> ShardError:
    error = ShardError(f"a compiled call of a sharded model, or of a part of it, {what}")
    error.passing = True
    return error


def _nested(pools: Sequence[Pools], do: Callable[[], None]) -> None:
    if not pools:
        do()
        return
    # A lock of C in a `with`: nowhere in between can Ctrl-C leave it taken.
    with pools[0].turn:
        pools[0].thread = threading.get_ident()
        pools[0].turns += 1
        try:
            _nested(pools[1:], do)
        finally:
            pools[0].thread = None


def joined(runtimes: Iterable[U]) -> list[U]:
    """Let models use the same pools from here on. Of each device one of them, whose pools these are; none of those that
    broke off."""
    runtimes = list(runtimes)
    return in_turn(runtimes, lambda: join(runtimes))


def join(runtimes: Iterable[U]) -> list[U]:
    """The same in a turn that this thread has."""
    by_device: dict[torch.device, U] = {}
    for runtime in runtimes:
        if runtime.pools.forsaken:
            continue
        first = by_device.setdefault(runtime.pools.device, runtime)
        if first.pools is not runtime.pools:
            first.pools.absorb(runtime.pools)
    return list(by_device.values())


def forsake(runtimes: Collection[PoolUser]) -> None:
    """A call of these models broke off among its collectives. What peers still send may come to their memory, at any
    time: nobody else goes on in it."""
    for pools in {id(r.pools): r.pools for r in runtimes}.values():
        pools.keep(runtimes)
