"""Copies that eager code is given as the weights of a forward: what is written to one would be lost with it."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from . import grads
from .errors import ShardError


class Copies:
    """Those of one forward, by torch's counters of writes, which do not see those through ``.data``."""

    def __init__(self) -> None:
        self._counters: list[tuple[str, torch.Tensor, int]] = []

    def add(self, name: str, param: Any, full: torch.Tensor) -> None:
        """The forward is given ``full`` as the weight of ``param``."""
        if full.untyped_storage()._cdata == param._local_tensor.untyped_storage()._cdata:
            return  # the parameter itself: what is written to it stays
        if full.is_meta or isinstance(full, FakeTensor) or full.is_inference():
            return
        counter = full.detach()
        counter.data = full.new_empty(0)  # it counts with ``full``, and keeps none of its memory
        self._counters.append((name, counter, counter._version))

    def check(self) -> None:
        """At the end of the forward.

        Raises:
            ShardError: naming the first parameter that was written to. Nothing is sent: no rank need meet another one
                behind a forward.
        """
        for name, counter, writes in self._counters:
            if counter._version != writes:
                raise ShardError(grads.written(name))
