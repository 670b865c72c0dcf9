"""Activations on other tiers: a place for what one forward hands to its backward, and tickets that stand for it."""

from __future__ import annotations

import itertools
import struct
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from zero_compiler.errors import TransferError


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
        make: a new place of so many bytes: a :class:`~zero_compiler.storage.stores.Store`, or memory of the host.
    """

    def __init__(self, make: Callable[[int], object]) -> None:
        self._make = make
        self._numbers = itertools.count(1)
        self._living: weakref.WeakValueDictionary[int, Parcel] = weakref.WeakValueDictionary()
        self._idle: list[Any] = []
        self._closed = False

    def reserve(self, nbytes: int) -> None:
        """Have a place of at least ``nbytes`` that is not in use.

        Raises:
            StorageError: there is no room for it.
        """
        with unset_fake_temporarily():  # while a call is compiled
            self._idle.append(self._place(nbytes))

    def _place(self, nbytes: int) -> object:
        # The smallest that will do: a larger one was made for a frame that needs it.
        fits = [k for k, place in enumerate(self._idle) if place.nbytes >= nbytes]
        if fits:
            return self._idle.pop(min(fits, key=lambda k: self._idle[k].nbytes))
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
        weakref.finalize(parcel, self._give_back, parcel.place).atexit = False
        return parcel

    def _give_back(self, place: object) -> None:
        if not self._closed:
            self._idle.append(place)

    def of(self, ticket: torch.Tensor) -> Parcel:
        """The parcel of a ticket.

        Raises:
            TransferError: it is of another model, or gone.
        """
        parcel = self._living.get(int(ticket))
        if parcel is None:
            raise TransferError(f"the activations of ticket {int(ticket)} are not on this rank any more")
        return parcel

    def close(self) -> None:
        """The model is gone: places go with their last tickets."""
        self._closed = True
        self._idle.clear()
