"""Activations on other tiers: a place for what one forward hands to its backward, and tickets that stand for it."""

from __future__ import annotations

import contextlib
import itertools
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from zero_compiler.errors import StorageError, TransferError

from .stores import Span, Store, blocks


class Parcel(bytearray):
    """What one forward has put aside. It lives as long as a ticket of it does; then its place serves another forward.

    The bytes are its number, which a ticket shows.
    """

    place: Any

    def ticket(self) -> torch.Tensor:
        """A tensor of one number whose storage keeps the parcel: autograd may save it, and drop it."""
        return torch.frombuffer(self, dtype=torch.int64)


class Parcels:
    """The parcels of one sharded model on this rank.

    Args:
        make: a new place of so many bytes: a :class:`~zero_compiler.runtime.stores.Store`, or memory of the host.
    """

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make
        self._numbers = itertools.count(1)
        self._living: weakref.WeakValueDictionary[int, Parcel] = weakref.WeakValueDictionary()
        self._idle: list[Any] = []

    def reserve(self, nbytes: int) -> None:
        """Have a place of at least ``nbytes`` that is not in use.

        Raises:
            StorageError: there is no room for it.
        """
        with unset_fake_temporarily():  # while a call is compiled
            self._idle.append(self._place(nbytes))

    def _place(self, nbytes: int) -> Any:
        for k, place in enumerate(self._idle):
            if place.nbytes >= nbytes:
                return self._idle.pop(k)
        return self._make(nbytes)

    def take(self, nbytes: int) -> Parcel:
        """A parcel for ``nbytes``: in a place whose last parcel is gone, or in a new one.

        Raises:
            StorageError: there is no room for a new one.
        """
        number = next(self._numbers)
        parcel = Parcel(struct.pack("=q", number))
        parcel.place = self._place(nbytes)
        self._living[number] = parcel
        weakref.finalize(parcel, self._idle.append, parcel.place).atexit = False
        return parcel

    def of(self, ticket: torch.Tensor) -> Parcel:
        """The parcel of a ticket.

        Raises:
            TransferError: it is of another model, or gone.
        """
        parcel = self._living.get(int(ticket))
        if parcel is None:
            raise TransferError(f"the activations of ticket {int(ticket)} are not on this rank any more")
        return parcel


class Files:
    """The activations of one Program on their way between the pool on the host and the file of a parcel.

    Args:
        parcels: of the model.
        offloads: ``Program.offloads``.
        nbytes: ``Program.file_bytes``.
        pool: gives the pool, which may have grown.
    """

    def __init__(
        self, parcels: Parcels, offloads: Sequence[Any], nbytes: int, pool: Callable[[], torch.Tensor]
    ) -> None:
        self._parcels, self._offloads, self._nbytes, self._pool = parcels, offloads, nbytes, pool
        self._parcel: Parcel | None = None
        self._under_way: dict[int, Any] = {}

    def offload(self, which: int, value: torch.Tensor) -> torch.Tensor:
        """Copy ``value`` to its place in the pool, and start to write it from there; its ticket."""
        self.view(which).copy_(value)
        if self._parcel is None:
            self._parcel = self._parcels.take(self._nbytes)
        store: Store = self._parcel.place
        self._under_way[which] = store.write(self._span(store, which), self._pool())
        return self._parcel.ticket()

    def restore(self, which: int, ticket: torch.Tensor) -> None:
        """Start to read what ``ticket`` stands for to its place in the pool."""
        store: Store = self._parcels.of(ticket).place
        self._under_way[which] = store.read(self._span(store, which), self._pool())

    def wait(self, which: int) -> None:
        """Wait for either.

        Raises:
            StorageError: it failed; names the tensor and the file.
        """
        self._under_way.pop(which).wait()

    def view(self, which: int) -> torch.Tensor:
        """The place of an activation in the pool, as the tensor that it is."""
        o = self._offloads[which]
        raw = self._pool()[o.offset : o.offset + o.nbytes]
        return raw.view(getattr(torch, o.dtype)).as_strided(o.shape, o.stride)

    def end(self) -> None:
        """The call is over: nothing is under way any more, and tickets alone keep its parcel."""
        self._parcel = None
        for request in self._under_way.values():
            with contextlib.suppress(StorageError):
                request.wait()
        self._under_way.clear()

    def _span(self, store: Store, which: int) -> Span:
        o = self._offloads[which]
        return Span(store, o.where, blocks(o.nbytes), o.offset, o.label)


class Copies:
    """The activations of one Program on their way between an accelerator and memory of its host.

    Copies run on a stream of their own, in order: so a place may be filled again while it is still being read. Waits
    hold up the stream that computes, and not the host.

    Args:
        parcels, offloads, nbytes: as for :class:`Files`.
        device: that computes. Where it has no streams, copies are done at once.
    """

    def __init__(self, parcels: Parcels, offloads: Sequence[Any], nbytes: int, device: torch.device) -> None:
        self._parcels, self._offloads, self._nbytes, self._device = parcels, offloads, nbytes, device
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._parcel: Parcel | None = None
        self._events: dict[int, Any] = {}
        self._back: dict[int, torch.Tensor] = {}

    def offload(self, which: int, value: torch.Tensor) -> torch.Tensor:
        """Start to copy ``value`` to the host; its ticket."""
        if self._parcel is None:
            self._parcel = self._parcels.take(self._nbytes)
        place = self._memory(self._parcel, which)
        with self._aside(which):
            place.copy_(value, non_blocking=True)
        if self._stream is not None:
            value.record_stream(self._stream)
        return self._parcel.ticket()

    def restore(self, which: int, ticket: torch.Tensor) -> None:
        """Start to copy what ``ticket`` stands for back to the device."""
        place = self._memory(self._parcels.of(ticket), which)
        with self._aside(which):
            self._back[which] = torch.empty_strided(
                place.shape, place.stride(), dtype=place.dtype, device=self._device
            ).copy_(place, non_blocking=True)

    def wait(self, which: int) -> None:
        """What computes from here on finds the copy done."""
        if self._stream is not None:
            current = torch.accelerator.current_stream(self._device)
            current.wait_event(self._events.pop(which))
            if which in self._back:
                self._back[which].record_stream(current)

    def view(self, which: int) -> torch.Tensor:
        """What came back."""
        return self._back.pop(which)

    def end(self) -> None:
        """The call is over: tickets alone keep its parcel."""
        self._parcel = None
        self._events.clear()
        self._back.clear()

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

    def _memory(self, parcel: Parcel, which: int) -> torch.Tensor:
        o = self._offloads[which]
        raw = parcel.place[o.where : o.where + o.nbytes]
        return raw.view(getattr(torch, o.dtype)).as_strided(o.shape, o.stride)
