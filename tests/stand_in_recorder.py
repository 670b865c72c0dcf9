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

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu"
        type(self).recordings += 1
        self.most_alive = 0  # bytes that values had at once
        self._blocks: list[tuple[torch.Tensor, StorageWeakRef, int]] = []

    def record(
        self, run: Callable[[list[Any]], Sequence[Any]], args: list[Any]
    ) -> tuple[Sequence[Any], Callable[[], None]]:
        given = at_its_address(args, None)
        storages = {a.untyped_storage()._cdata for a in args}
        out = list(run(args))
        new = [v is not None and v.untyped_storage()._cdata not in storages for v in out]
        own = {v.untyped_storage()._cdata: v for v, n in zip(out, new, strict=True) if n}
        moved = {key: self._placed(v.untyped_storage()) for key, v in own.items()}
        placed = [
            _within(moved[v.untyped_storage()._cdata], v) if n else v for v, n in zip(out, new, strict=True)
        ]
        places = [at_its_address([v], None)[0] if n else None for v, n in zip(placed, new, strict=True)]

        def replay() -> None:
            type(self).replays += 1
            for place, value in zip(places, run(list(given)), strict=True):
                if place is not None:
                    place.copy_(value)

        return placed, replay

    def _placed(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The bytes of a storage in a block that no living value has."""
        nbytes = storage.nbytes()
        free = (
            at
            for at, (block, holder, _) in enumerate(self._blocks)
            if block.numel() >= nbytes and holder.expired()
        )
        at = next(free, len(self._blocks))
        block = self._blocks[at][0] if at < len(self._blocks) else torch.empty(nbytes, dtype=torch.uint8)
        (placed,) = at_its_address([block[:nbytes]], block)
        placed.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
        self._blocks[at : at + 1] = [(block, StorageWeakRef(placed.untyped_storage()), nbytes)]
        alive = sum(n for _, holder, n in self._blocks if not holder.expired())
        self.most_alive = max(self.most_alive, alive)
        return placed


def _within(placed: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``value`` in the place of its storage."""
    storage = placed.untyped_storage()
    empty = torch.empty(0, dtype=value.dtype)
    return empty.set_(storage, value.storage_offset(), value.shape, value.stride())
