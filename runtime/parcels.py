"""Activations in files: one file for what one forward hands to its backward, and tickets that stand for it."""

from __future__ import annotations

import contextlib
import itertools
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from zero_compiler.errors import StorageError, TransferError

from .stores import Span, Store, blocks


class Parcel(bytearray):
    """What one forward has put aside. It lives as long as a ticket of it does; then its file serves another forward.

    The bytes are its number, which a ticket shows.
    """

    store: Store

    def ticket(self) -> torch.Tensor:
        """A tensor of one number whose storage keeps the parcel: autograd may save it, and drop it."""
        return torch.frombuffer(self, dtype=torch.int64)


class Parcels:
    """The parcels of one sharded model on this rank.

    Args:
        policy: weak reference to the model's policy, whose NVMe tier the files are of.
    """

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self._numbers = itertools.count(1)
        self._living: weakref.WeakValueDictionary[int, Parcel] = weakref.WeakValueDictionary()
        self._idle: list[Store] = []

    def reserve(self, nbytes: int) -> None:
        """Have a file of at least ``nbytes`` that is not in use.

        Raises:
            StorageError: there is no room for it.
        """
        with unset_fake_temporarily():  # while a call is compiled
            self._idle.append(self._file(nbytes))

    def _file(self, nbytes: int) -> Store:
        for k, store in enumerate(self._idle):
            if store.nbytes >= nbytes:
                return self._idle.pop(k)
        return self._policy().nvme().store("activations", nbytes)

    def take(self, nbytes: int) -> Parcel:
        """A parcel for ``nbytes``: in a file whose last parcel is gone, or in a new one.

        Raises:
            StorageError: there is no room for a new one.
        """
        number = next(self._numbers)
        parcel = Parcel(struct.pack("=q", number))
        parcel.store = self._file(nbytes)
        self._living[number] = parcel
        weakref.finalize(parcel, self._idle.append, parcel.store).atexit = False
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


class Moves:
    """The activations of one Program on their way between the pool on the host and a parcel.

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
        store = self._parcel.store
        self._under_way[which] = store.write(self._span(store, which), self._pool())
        return self._parcel.ticket()

    def restore(self, which: int, ticket: torch.Tensor) -> None:
        """Start to read what ``ticket`` stands for to its place in the pool."""
        store = self._parcels.of(ticket).store
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
