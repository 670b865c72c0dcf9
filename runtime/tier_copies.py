"""Chunks and gradients on their way between tiers: from files and the host to the compute device, and back."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from zero_compiler.ir.transfers import GatherDesc

from ..storage.aio import Engine, Request
from ..storage.stores import Checked, Region, merged, settle


class Aside:
    """Copies between an accelerator and its host, on a stream of their own, in order.

    Without a stream, where a CPU stands in the accelerator's place, they are done at once.

    Args:
        device: that computes.
    """

    def __init__(self, device: torch.device, stream: torch.Stream | None) -> None:
        self._device, self._stream = device, stream
        self._last: torch.Event | None = None
        # Of copies from the pool on the host: their events, and the bytes that they read there.
        self._reading: list[tuple[torch.Event, int, int]] = []

    def to_device(self, into: Sequence[torch.Tensor], of: Sequence[torch.Tensor]) -> torch.Event | None:
        """Start to copy each tensor of ``of``, on the host, to that of ``into``; the event of the end, None where that
        has come."""
        return self._start(into, of)

    def to_host(self, of: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Event | None]:
        """Start to copy tensors to the host, in pinned memory; what they become there, and the event of the end. They
        are held until that has been waited for."""
        pin = self._device.type != "cpu"
        there = [torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=pin) for t in of]
        return there, self.to_places(there, of)

    def to_places(self, into: Sequence[torch.Tensor], of: Sequence[torch.Tensor]) -> torch.Event | None:
        """The same to memory of the host that is there; the event of the end."""
        return self._start(into, of)

    def _start(self, into: Iterable[torch.Tensor], of: Iterable[torch.Tensor]) -> torch.Event | None:
        """Behind what the device has been told to compute so far."""
        if self._stream is None:
            for there, here in zip(into, of, strict=True):
                there.copy_(here)
            return None
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            for there, here in zip(into, of, strict=True):
                there.copy_(here, non_blocking=True)
            self._last = self._stream.record_event()
        return self._last

    def wait(self, event: torch.Event | None) -> None:
        """What the device computes from here on finds the copy done."""
        if event is not None:
            torch.accelerator.current_stream(self._device).wait_event(event)

    def await_copy(self, event: torch.Event | None) -> None:
        """Wait until a copy is done: the host may read what came to it, and what it was copied from may go."""
        if event is not None:
            event.synchronize()

    def finish(self) -> None:
        """Wait until all copies are done: the host may read what came to it, and write what has left it."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None
        self._reading.clear()

    def reads(self, event: torch.Event | None, spans: Iterable[tuple[int, int]]) -> None:
        """Until ``event``, copies read these bytes of the pool on the host."""
        if event is not None:
            self._reading += [(event, begin, end) for begin, end in spans]

    def spare(self, begin: int, end: int) -> None:
        """Wait until no copy reads these bytes of the pool: they are to be written by the host."""
        for event, first, last in self._reading:
            if first < end and begin < last:
                event.synchronize()
        self._reading = [r for r in self._reading if not r[0].query()]


class _ChunkPools(Protocol):
    """Where chunks arrive: on the host, and on the device."""

    host: torch.Tensor
    near: torch.Tensor | None


class _Runtime(Protocol):
    """The runtime of a sharded model (`model.py`), as far as copies of its chunks need it."""

    @property
    def aside(self) -> Aside: ...

    @property
    def pools(self) -> _ChunkPools: ...

    def region(self, name: str) -> Region | None: ...

    def flat_chunks(self, names: Sequence[str]) -> list[torch.Tensor]: ...


class Hops:
    """This rank's chunks of the gathers of one Program, on their way to the compute device.

    Args:
        gathers: runtime and description of each.
    """

    def __init__(self, gathers: Sequence[tuple[_Runtime, GatherDesc]]) -> None:
        self._gathers = list(gathers)
        self._reads: dict[int, list[Request | Checked]] = {}
        self._engines: weakref.WeakSet[Engine] = weakref.WeakSet()  # that read them
        self._copies: dict[int, torch.Event | None] = {}

    def start(self, which: int, hop: int) -> None:
        """Start one hop of the chunks of a gather."""
        runtime, g = self._gathers[which]
        if g.hops[hop].tier == "nvme":
            self._reads[which] = self._read(runtime, g, hop)
            return
        sources = self._arrived(runtime, g, hop - 1) if hop else _at_rest(runtime, g, g.names)
        event = runtime.aside.to_device(self._arrived(runtime, g, hop), sources)
        self._copies[which] = event
        if hop:
            sizes = [n * c.element_size() for n, c in zip(g.chunk_numels, sources, strict=True)]
            runtime.aside.reads(
                event, [(at, at + size) for at, size in zip(g.hops[hop - 1].offsets, sizes, strict=True)]
            )

    def wait(self, which: int, hop: int) -> None:
        """Wait for it.

        Raises:
            StorageError: a file could not be read.
        """
        runtime, g = self._gathers[which]
        if g.hops[hop].tier == "nvme":
            for request in self._reads[which]:
                request.wait()
            del self._reads[which]
        else:
            runtime.aside.wait(self._copies.pop(which))

    def chunks(self, which: int) -> list[torch.Tensor]:
        """What is gathered: flat chunks where they have arrived, or where they rest."""
        runtime, g = self._gathers[which]
        return self._arrived(runtime, g, len(g.hops) - 1) if g.hops else _at_rest(runtime, g, g.names)

    def end(self) -> None:
        """After an error or Ctrl-C: nothing is read into a pool any more. Copies end in order."""
        settle(list(self._engines))
        self._reads.clear()
        self._copies.clear()

    def _read(self, runtime: _Runtime, g: GatherDesc, hop: int) -> list[Request | Checked]:
        spans = []
        for name, at in zip(g.names, g.hops[hop].offsets, strict=True):
            region = runtime.region(name)
            if region is not None:
                item = region.tensor.element_size()
                nbytes = g.chunk_numels[0] * item if g.tile else region.nbytes
                spans.append(region.span(g.begin * item, nbytes, at))
                runtime.aside.spare(at, at + spans[-1].nbytes)
        self._engines.update(s.store.engine for s in spans)
        return [s.store.read(s, runtime.pools.host) for s in merged(spans)]

    def _arrived(self, runtime: _Runtime, g: GatherDesc, hop: int) -> list[torch.Tensor]:
        """Chunks in the pool to which a hop has brought them; what was put into memory meanwhile comes from there."""
        step, dtype = g.hops[hop], getattr(torch, g.rest_dtype)
        pool = runtime.pools.host if step.pool == "host" else runtime.pools.near
        out = []
        for name, numel, at in zip(g.names, g.chunk_numels, step.offsets, strict=True):
            if step.tier == "nvme" and runtime.region(name) is None:
                out += _at_rest(runtime, g, [name])
            else:
                assert pool is not None  # the Program has made room in it
                out.append(pool[at : at + numel * dtype.itemsize].view(dtype))
        return out


def _at_rest(runtime: _Runtime, g: GatherDesc, names: Sequence[str]) -> list[torch.Tensor]:
    """What of the chunks of ``names`` is gathered, where they rest in memory."""
    chunks: list[torch.Tensor] = runtime.flat_chunks(names)
    return [c[g.begin : g.begin + g.chunk_numels[0]] for c in chunks] if g.tile else chunks
