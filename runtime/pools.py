"""Memory in which Programs run: the arena of gathers and staging, and what chunks from other tiers pass through."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from zero_compiler.program import Program
from zero_compiler.runtime import _C

from .aio import buffer
from .hops import Aside


class Pools:
    """Pools of one device: of one sharded model, or of several of which a Program has parameters.

    A plan has one arena for all of its transfers, whoever's parameters they move. So the engines of such models use the
    same memory: of two of their Programs, one runs at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.arena = _C.Arena(0, device)
        # Into which files are read, on the host; and to which chunks are copied from there, on the device.
        self.host = buffer(0)
        self.near: torch.Tensor | None = None
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()  # runtimes

    @functools.cached_property
    def stream(self) -> torch.Stream | None:
        """That of all copies between the device and the host; None where the device has no streams."""
        return None if self.device.type == "cpu" else torch.Stream(self.device)

    @functools.cached_property
    def aside(self) -> Aside:
        """What makes these copies, and knows which bytes of the pool on the host they still read."""
        return Aside(self.device, self.stream)

    def join(self, runtime: Any) -> None:
        """Let a runtime use these. What it has used before stays with those that it has shared it with."""
        self._users.add(runtime)
        runtime.pools = self
        runtime.engine.place_arena(runtime.transient, self.arena)

    def grow(self, program: Program) -> None:
        """Make room for a Program, while nothing is under way."""
        self._make(program.transient_bytes, program.host_bytes, program.device_bytes)

    def leave(self, runtime: Any) -> None:
        """A runtime is at its end; with the last one the memory is."""
        self._finish()
        self._users.discard(runtime)
        if not self._users:
            self._empty()

    def keep(self, broken: Collection[Any]) -> None:
        """Keep these runtimes alone; the others take other memory, of the same sizes."""
        rest = [u for u in self._users if u not in broken]
        if rest:
            self._finish()
            other = Pools(self.device)
            for runtime in rest:
                self._users.discard(runtime)
                other.join(runtime)
            other._make(self.arena.nbytes, self.host.numel(), self._near_bytes())

    def absorb(self, other: Pools) -> None:
        """Take over the runtimes of other pools of the same device."""
        sizes = other.arena.nbytes, other.host.numel(), other._near_bytes()
        other._finish()
        for runtime in list(other._users):
            self.join(runtime)
        other._users.clear()
        other._empty()
        self._make(*sizes)

    def _make(self, arena: int, host: int, near: int) -> None:
        if arena > self.arena.nbytes:
            self.arena = _C.Arena(arena, self.device)
            for runtime in list(self._users):
                runtime.engine.place_arena(runtime.transient, self.arena)
        if host > self.host.numel() or near > self._near_bytes():
            self._finish()
        if host > self.host.numel():
            self.host = buffer(host)
        if near > self._near_bytes():
            with unset_fake_temporarily():  # while a call is compiled
                self.near = torch.empty(near, dtype=torch.uint8, device=self.device)

    def _near_bytes(self) -> int:
        return 0 if self.near is None else self.near.numel()

    def _finish(self) -> None:
        """Wait until nothing is copied any more."""
        if "aside" in self.__dict__:
            self.aside.finish()
        if "stream" in self.__dict__ and self.stream is not None:
            self.stream.synchronize()  # activations are copied there too

    def _empty(self) -> None:
        self._finish()
        self.arena, self.host, self.near = _C.Arena(0, self.device), buffer(0), None


def joined(runtimes: Iterable[Any]) -> list[Pools]:
    """The pools of the models of one Program, which are the same from here on: one for each device."""
    by_device: dict[torch.device, Pools] = {}
    for runtime in runtimes:
        pools = by_device.setdefault(runtime.pools.device, runtime.pools)
        if pools is not runtime.pools:
            pools.absorb(runtime.pools)
    return list(by_device.values())


def forsake(runtimes: Collection[Any]) -> None:
    """A call of these models broke off among its collectives. What peers still send may come to their memory, at any
    time: nobody else goes on in it."""
    for pools in {id(r.pools): r.pools for r in runtimes}.values():
        pools.keep(runtimes)
