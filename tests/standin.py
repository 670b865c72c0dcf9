"""A CPU in an accelerator's place: tensors "on the device" and "on the host" count apart and pass through pools of their
own, as they would there.

Copies between the two are as late as they may be on a stream of their own: what is copied to the device is there when
the device has been told to wait for it, and what is copied to the host when the host has waited. Until then there are
NaNs, so that a wait that is missing gives wrong numbers. Until the host has waited, what it copies from must stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

from zero_compiler.runtime import model
from zero_compiler.runtime.tier_copies import Aside
from zero_compiler.sharded.rest_tiers import RestTiers


class _Copy:
    """One copy, which is its own event."""

    def __init__(self, aside, into, of, to_host):
        self.aside, self.into, self.of, self.to_host = aside, into, of, to_host
        for there in into:
            there.as_strided((there.numel(),), (1,)).view(torch.uint8).fill_(0xFF)
        self.read = self.over = False

    def query(self):
        return self.over

    def synchronize(self):
        self.aside.await_copy(self)

    def end(self):
        """The host has waited."""
        for there, was, here in zip(self.into, self.was, self.of, strict=True):
            if self.to_host:
                there.copy_(was)
            else:
                assert self.over or torch.equal(here, was), "written while the device may still read it"
        self.over = True


def _overlap(these, those):
    """Whether tensors of the two lie on the same bytes."""
    spans = [[(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors] for tensors in (these, those)]
    return any(a < d and c < b for a, b in spans[0] for c, d in spans[1])


class LateAside(Aside):
    def __init__(self, device, stream):
        super().__init__(device, stream)
        self._waiting: list[_Copy] = []  # nobody has waited for them
        self._ending: list[_Copy] = []  # the device has, and the host has not

    def to_device(self, into, of):
        self._waiting.append(_Copy(self, into, of, to_host=False))
        return self._waiting[-1]

    def to_places(self, into, of):
        # In order: what was copied from there has been read when this writes to it.
        assert not any(_overlap(copy.of, into) for copy in self._waiting if not copy.to_host)
        for copy in [c for c in self._ending if not c.to_host and _overlap(c.of, into)]:
            copy.end()
            self._ending.remove(copy)
        self._waiting.append(_Copy(self, into, of, to_host=True))
        return self._waiting[-1]

    def wait(self, event):
        while not event.read:  # in order
            copy = self._waiting.pop(0)
            copy.read = True
            copy.was = [t.clone() for t in copy.of]
            self._ending.append(copy)
            for there, here in () if copy.to_host else zip(copy.into, copy.of, strict=True):
                there.copy_(here)

    def await_copy(self, event):
        """With it, in order, what was started before."""
        self.wait(event)
        while not event.over:
            self._ending.pop(0).end()

    def finish(self):
        if self._waiting:
            self.wait(self._waiting[-1])
        for copy in self._ending:
            copy.end()
        self._ending.clear()
        super().finish()


@contextlib.contextmanager
def accelerator(late: bool = True) -> Iterator[None]:
    """Models that are sharded and run inside are on an accelerator.

    Args:
        late: False: copies are done at once, and take no memory beside what they are to and from.
    """
    with (
        mock.patch.object(RestTiers, "apart", True),
        mock.patch.object(model, "Aside", LateAside if late else Aside),
    ):
        yield
