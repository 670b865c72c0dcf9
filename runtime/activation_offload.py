"""Activations on their way from forward to backward: out to another tier, and back in time."""

from __future__ import annotations

import abc
import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from zero_compiler.alignment import block_aligned
from zero_compiler.ir.instructions import Bring, Discard, Offload, Restore, WaitOffload, WaitRestore, Write
from zero_compiler.ir.transfers import OffloadDesc

from ..storage.activation_store import Parcel, Parcels
from ..storage.aio import Engine
from ..storage.stores import FileSpan, FileStore, settle
from .tier_copies import Aside

Step = Callable[[list[object]], None]


class Moves(abc.ABC):
    """The activations of one Program.

    Args:
        parcels: of the model.
        offloads: ``Program.offloads``.
        nbytes: ``Program.file_bytes``.
    """

    def __init__(self, parcels: Parcels, offloads: Sequence[OffloadDesc], nbytes: int) -> None:
        self._parcels, self._offloads, self._nbytes = parcels, offloads, nbytes
        self._parcel: Parcel | None = None

    def step(self, instr: Any) -> Step:
        """What an instruction does to an activation, given the values of a call."""
        which = instr.index

        def offload(env: list[Any]) -> None:
            env[instr.outs[0]] = self.offload(which, env[instr.ins[0]])
            for i in instr.free:
                env[i] = None

        def restore(env: list[Any]) -> None:
            self.restore(which, env[instr.ins[0]])

        def wait(env: list[object]) -> None:
            self.wait(which)

        def restored(env: list[object]) -> None:
            self.wait(which)
            env[instr.outs[0]] = self.view(which)

        def discard(env: list[object]) -> None:
            env[instr.values[0]] = None

        steps: dict[type, Step] = {
            Offload: offload,
            WaitOffload: wait,
            Restore: restore,
            WaitRestore: restored,
            Discard: discard,
        }
        return steps[type(instr)]

    @abc.abstractmethod
    def offload(self, which: int, value: torch.Tensor) -> torch.Tensor:
        """Start to take ``value`` away; its ticket."""

    @abc.abstractmethod
    def restore(self, which: int, ticket: torch.Tensor) -> None:
        """Start to bring back what ``ticket`` stands for."""

    @abc.abstractmethod
    def wait(self, which: int) -> None:
        """Wait for either.

        Raises:
            StorageError: it failed; names the tensor and the file.
        """

    @abc.abstractmethod
    def view(self, which: int) -> torch.Tensor:
        """What is back, as the tensor that it was."""

    def end(self) -> None:
        """The call is over: nothing is under way any more, and tickets alone keep its parcel."""
        self._parcel = None

    def _filled(self) -> Parcel:
        """What this call puts its activations into."""
        if self._parcel is None:
            self._parcel = self._parcels.take(self._nbytes)
        return self._parcel

    def _shaped(self, which: int, memory: torch.Tensor, at: int) -> torch.Tensor:
        """An activation that begins ``at`` bytes behind the begin of ``memory``."""
        o = self._offloads[which]
        return memory[at : at + o.nbytes].view(getattr(torch, o.dtype)).as_strided(o.shape, o.stride)


class ActivationFiles(Moves):
    """Between the pool on the host and the file of a parcel.

    Args:
        pool: gives the pool, which may have grown.
    """

    def __init__(
        self, parcels: Parcels, offloads: Sequence[OffloadDesc], nbytes: int, pool: Callable[[], torch.Tensor]
    ) -> None:
        super().__init__(parcels, offloads, nbytes)
        self._pool = pool
        self._under_way: dict[int, Any] = {}
        self._engines: weakref.WeakSet[Engine] = weakref.WeakSet()  # that move them

    def offload(self, which: int, value: torch.Tensor) -> torch.Tensor:
        """Copy ``value`` to its place in the pool, and start to write it from there; its ticket."""
        self._in_pool(which).copy_(value)
        parcel = self._filled()
        store: FileStore = parcel.place
        self._begin(which, store)
        self._under_way[which] = store.write(self._span(store, which), self._pool())
        return parcel.ticket()

    def restore(self, which: int, ticket: torch.Tensor) -> None:
        store: FileStore = self._parcels.of(ticket).place
        self._begin(which, store)
        self._under_way[which] = store.read(self._span(store, which), self._pool())

    def _begin(self, which: int, store: FileStore) -> None:
        """Ctrl-C may come before a request is known."""
        self._engines.add(store.engine)
        self._under_way[which] = None

    def wait(self, which: int) -> None:
        # What breaks off a wait does not end the transfer: it stays under way for `end`.
        self._under_way[which].wait()
        del self._under_way[which]

    def view(self, which: int) -> torch.Tensor:
        return self._in_pool(which)

    def _in_pool(self, which: int) -> torch.Tensor:
        """The place of an activation in the pool, as the tensor that it is."""
        return self._shaped(which, self._pool(), self._offloads[which].offset)

    def end(self) -> None:
        if self._under_way:
            settle(list(self._engines))
        self._under_way.clear()
        super().end()

    def _span(self, store: FileStore, which: int) -> FileSpan:
        o = self._offloads[which]
        return FileSpan(store, o.where, block_aligned(o.nbytes), o.offset, o.label)


class Staged(ActivationFiles):
    """Between an accelerator and the file of a parcel, by way of the pool on its host.

    Args:
        device: that computes.
        aside: gives what copies between it and the pool.
    """

    def __init__(
        self,
        parcels: Parcels,
        offloads: Sequence[OffloadDesc],
        nbytes: int,
        pool: Callable[[], torch.Tensor],
        device: torch.device,
        aside: Callable[[], Aside],
    ) -> None:
        super().__init__(parcels, offloads, nbytes, pool)
        self._device, self._aside = device, aside
        # Events of copies, and what they read or write on the device: it is held until nothing needs it there.
        self._copying: dict[int, tuple[torch.Event | None, torch.Tensor]] = {}

    def step(self, instr: Any) -> Step:
        if not isinstance(instr, (Write, Bring)):
            return super().step(instr)
        onward, which = (self._write if isinstance(instr, Write) else self._bring), instr.index
        return lambda env: onward(which)

    def offload(self, which: int, value: torch.Tensor) -> torch.Tensor:
        """Start to copy ``value`` to its place in the pool; its ticket."""
        parcel = self._filled()
        self._copying[which] = None, value
        self._copying[which] = self._aside().to_places([self._in_pool(which)], [value]), value
        return parcel.ticket()

    def _write(self, which: int) -> None:
        """Wait for the copy, and start to write what came."""
        self._aside().await_copy(self._copying[which][0])
        del self._copying[which]
        store: FileStore = self._filled().place
        self._begin(which, store)
        self._under_way[which] = store.write(self._span(store, which), self._pool())

    def restore(self, which: int, ticket: torch.Tensor) -> None:
        o = self._offloads[which]
        self._aside().spare(o.offset, o.offset + block_aligned(o.nbytes))
        super().restore(which, ticket)

    def _bring(self, which: int) -> None:
        """Wait for the file, and start to copy what was read to the device."""
        super().wait(which)
        place, o = self._in_pool(which), self._offloads[which]
        value = torch.empty_strided(place.shape, place.stride(), dtype=place.dtype, device=self._device)
        self._copying[which] = None, value
        event = self._aside().to_device([value], [place])
        self._copying[which] = event, value
        self._aside().reads(event, [(o.offset, o.offset + o.nbytes)])

    def wait(self, which: int) -> None:
        """For a file; or what computes from here on finds the copy done."""
        if which in self._copying:
            self._aside().wait(self._copying[which][0])
        else:
            super().wait(which)

    def view(self, which: int) -> torch.Tensor:
        return self._copying.pop(which)[1]

    def end(self) -> None:
        if self._copying:
            self._aside().finish()  # nothing reads or writes what goes now
            self._copying.clear()
        super().end()


class HostCopies(Moves):
    """Between an accelerator and memory of its host.

    Copies of a model run on a stream of their own, in order: so a place may be filled again while it is still being
    read, and written to again where a call broke off. Waits hold up the stream that computes, and not the host.

    Args:
        device: that computes.
        stream: gives that of the model's copies; None where the device has no streams, and copies are done at once.
    """

    def __init__(
        self,
        parcels: Parcels,
        offloads: Sequence[OffloadDesc],
        nbytes: int,
        device: torch.device,
        stream: Callable[[], torch.Stream | None],
    ) -> None:
        super().__init__(parcels, offloads, nbytes)
        self._device, self._of_model = device, stream
        self._events: dict[int, torch.Event] = {}
        # What copies read and write on the device is held until what computes has waited for them: then its memory is
        # free for whatever computes next, as the plan has it. A stream that is told of memory (`record_stream`) gives
        # it back when the host sees the copy done, which may be calls later.
        self._leaving: dict[int, torch.Tensor] = {}
        self._back: dict[int, torch.Tensor] = {}

    @property
    def _stream(self) -> torch.Stream | None:
        return self._of_model()

    def offload(self, which: int, value: torch.Tensor) -> torch.Tensor:
        """Start to copy ``value`` to the host; its ticket."""
        parcel = self._filled()
        place = self._place(parcel, which)
        self._leaving[which] = value
        with self._aside(which):
            place.copy_(value, non_blocking=True)
        return parcel.ticket()

    def restore(self, which: int, ticket: torch.Tensor) -> None:
        place = self._place(self._parcels.of(ticket), which)
        # Memory of the stream that computes: another one's would be of no use to it afterwards.
        value = torch.empty_strided(place.shape, place.stride(), dtype=place.dtype, device=self._device)
        self._back[which] = value
        with self._aside(which):
            value.copy_(place, non_blocking=True)

    def wait(self, which: int) -> None:
        """What computes from here on finds the copy done."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._events.pop(which))
        self._leaving.pop(which, None)

    def view(self, which: int) -> torch.Tensor:
        return self._back.pop(which)

    def end(self) -> None:
        if self._events and self._stream is not None:
            self._stream.synchronize()  # after an error: nothing reads or writes what goes now
        self._events.clear()
        self._leaving.clear()
        self._back.clear()
        super().end()

    @contextlib.contextmanager
    def _aside(self, which: int) -> Iterator[None]:
        """On the stream of copies, behind what the device has been told to compute so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            yield
            self._events[which] = self._stream.record_event()

    def _place(self, parcel: Parcel, which: int) -> torch.Tensor:
        return self._shaped(which, parcel.place, self._offloads[which].where)
