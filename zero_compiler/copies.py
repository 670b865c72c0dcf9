"""Copies that eager code is given as the weights of a forward: what is written to one would be lost with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from . import grads
from .errors import ShardError
from .group import Group
from .headers import cannot_begin
from .layout import Layout

if TYPE_CHECKING:
    from .policy import Policy


class Copies:
    """Those of one forward.

    Writes are counted by torch, of every copy until the forward ends, but not writes through ``.data``. So the last
    copy is held until the next one is made, and this rank's rows in it are compared with what they were.
    """

    def __init__(self) -> None:
        self._counters: list[tuple[Group, str, torch.Tensor, int]] = []
        self._last: tuple[Group, str, Layout, torch.Tensor, torch.Tensor] | None = None

    def add(self, policy: Policy, name: str, param: Any, full: torch.Tensor) -> None:
        """The forward is given ``full`` as the weight of ``param``."""
        if full.untyped_storage()._cdata == param._local_tensor.untyped_storage()._cdata:
            return  # the parameter itself: what is written to it stays
        if full.is_meta or isinstance(full, FakeTensor):
            return
        group, layout = policy.group, policy.params[name].layout
        if not full.is_inference():
            counter = full.detach()
            counter.data = full.new_empty(0)  # it counts with ``full``, and keeps none of its memory
            self._counters.append((group, name, counter, counter._version))
        self._last = group, name, layout, full, _rows(group, layout, full).clone()

    def check_last(self) -> None:
        """Let go of the last copy.

        Raises:
            ShardError: it was written to; also on ranks whose rows stayed as they were, where they meet next.
        """
        last, self._last = self._last, None
        if last is not None:
            group, name, layout, full, before = last
            now = _rows(group, layout, full)
            if now.shape != before.shape or not torch.equal(now, before):
                self._raise(group, name)

    def check(self) -> None:
        """At the end of the forward.

        Raises:
            ShardError: naming the first parameter that was written to.
        """
        for group, name, counter, writes in self._counters:
            if counter._version != writes:
                self._raise(group, name)
        self.check_last()

    def _raise(self, group: Group, name: str) -> None:
        self.__init__()  # type: ignore[misc]
        error = ShardError(grads.written(name))
        cannot_begin(group, error)
        raise error


def _rows(group: Group, layout: Layout, full: torch.Tensor) -> torch.Tensor:
    """Bytes of this rank's rows: equal where values are, also where those are not numbers."""
    rows = full.detach()
    if layout.cut:
        rows = rows[layout.start(group.rank) : layout.start(group.rank) + layout.rows(group.rank)]
    return rows.reshape(-1).view(torch.uint8)
