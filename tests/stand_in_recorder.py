"""A recorder of segments that runs on the CPU, in the place of CUDA graphs: what is recorded reads and writes fixed
addresses, in blocks that serve the next value once the one that lay there has died."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zero_compiler.torch_cpp import Held, RecordedValues


def at_its_address(tensors: Sequence[Any], owner: object) -> list[Any]:
    """Tensors over the same memory, which they do not keep alive."""
    return RecordedValues(Held(owner), [], list(tensors)).make([])


class StandIn:
    """One pool of memory, as a :class:`~zero_compiler.runtime.recorded_segments.GraphRecorder` has one."""

    replays = 0  # of all
    recordings = 0
    most_bytes = 0  # that values of one had at once

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu"
        type(self).recordings += 1
        self._blocks: list[tuple[torch.Tensor, StorageWeakRef, int]] = []

    def record(
        self, run: Callable[[list[Any]], Sequence[Any]], args: list[Any]
    ) -> tuple[Sequence[Any], Callable[[], None]]:
        given = at_its_address(args, None)
        storages = {a.untyped_storage()._cdata for a in args}
        out = list(run(args))
        new = [v is not None and v.untyped_storage()._cdata not in storages for v in out]
        placed = [self._placed(v) if n else v for v, n in zip(out, new, strict=True)]
        places = [at_its_address([v], None)[0] if n else None for v, n in zip(placed, new, strict=True)]

        def replay() -> None:
            type(self).replays += 1
            for place, value in zip(places, run(list(given)), strict=True):
                if place is not None:
                    place.copy_(value)

        return placed, replay

    def _placed(self, value: torch.Tensor) -> torch.Tensor:
        """The same in a block that no living value has."""
        span = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) + 1
        nbytes = span * value.element_size() if value.numel() else 0
        free = (
            at
            for at, (block, holder, _) in enumerate(self._blocks)
            if block.numel() >= nbytes and holder.expired()
        )
        at = next(free, len(self._blocks))
        block = self._blocks[at][0] if at < len(self._blocks) else torch.empty(nbytes, dtype=torch.uint8)
        within = block[:nbytes].view(value.dtype).as_strided(value.shape, value.stride())
        (placed,) = at_its_address([within], block)
        placed.copy_(value)
        self._blocks[at : at + 1] = [(block, StorageWeakRef(placed.untyped_storage()), nbytes)]
        alive = sum(n for _, holder, n in self._blocks if not holder.expired())
        type(self).most_bytes = max(type(self).most_bytes, alive)
        return placed
