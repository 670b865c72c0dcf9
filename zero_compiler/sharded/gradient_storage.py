"""The files in which gradients of a sharded model rest, and how they come there as they land."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from weakref import WeakValueDictionary

import torch

from ..alignment import block_aligned
from ..errors import StorageError
from .call_protocol import CallProtocol
from .chunk_storage import ChunkStorage
from .files import Files, GradientFiles, PlannedWrites
from .grads import Sink
from .managed_parameters import ParamInfo, Places, find, is_fake
from .rest_tiers import RestTiers


class GradientStorage:
    """Gradients of one sharded model that rest in files.

    Args:
        sinks: who takes a gradient as soon as it is reduced, by the name of its parameter; it is added to.
    """

    def __init__(
        self,
        protocol: CallProtocol,
        tiers: RestTiers,
        storage: ChunkStorage,
        params: Mapping[str, ParamInfo],
        places: Mapping[str, Places],
        sinks: WeakValueDictionary[str, Sink],
    ) -> None:
        self._protocol = protocol
        self._tiers = tiers
        self._storage = storage
        self._params = params
        self._places = places
        self._sinks = sinks
        self.written: GradientFiles | None = None  # who writes them

    def begin(self) -> None:
        """From here on gradients that rest in files go there as they land; the parameters are installed."""
        files = self._storage.files
        if files is not None and files.gradients:
            self.written = self._writer(files)
            self.restore_sinks()

    def _writer(self, files: Files) -> GradientFiles:
        return GradientFiles(partial(find, self._places), self._tiers.files_budget, files.gradients)

    def make_room_for_trained(self) -> None:
        """Files for gradients of what has none and is trained: it was frozen when the model was sharded.

        Raises:
            StorageError: no room.
        """
        storage = self._storage
        have = storage.files.gradients if storage.files is not None else {}
        more = {
            name: info.layout
            for name, info in self._params.items()
            if name not in have
            and self._tiers.tier("grads", name) == "nvme"
            and (param := find(self._places, name)) is not None
            and param.requires_grad
            and not is_fake(param)
        }
        if not more or self._protocol.only_planned:
            return
        if storage.files is None:
            storage.files = Files(storage.nvme(), {}, {})
        try:
            added = storage.files.add_gradients(more)
        except StorageError as error:
            error.passing = True  # there may be room when it is tried again
            raise
        if self.written is None:
            self.written = self._writer(storage.files)
        else:
            self.written.add_regions(added)
        self.restore_sinks()

    def restore_sinks(self) -> None:
        """Gradients that rest in files and go to no optimizer go there."""
        if self._storage.files is not None and self.written is not None:
            for name in self._storage.files.gradients:
                self._sinks.setdefault(name, self.written)

    def files_of(self, name: str) -> GradientFiles | None:
        """Who takes the gradient of a parameter to its file; None where it rests elsewhere."""
        files = self._storage.files
        return self.written if files is not None and name in files.gradients else None

    def finish(self) -> None:
        """What has landed in files is complete, and is ``.grad``."""
        if self.written is not None:
            self.written.finish()

    def landing(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Memory for a gradient that goes to a file, or None where it may be anywhere."""
        if self.written is None:
            return None
        nbytes, landing = math.prod(shape) * dtype.itemsize, self.written.landing()
        if block_aligned(nbytes) > landing.limit:  # it goes in parts, of which some are under way at a time
            return None
        return landing.take(nbytes).view(dtype).view(*shape)

    @property
    def streamers(self) -> list[GradientFiles | PlannedWrites]:
        """Who moves gradients to files through buffers of its own (``buffer_bytes``), beside the Programs."""
        found = (self.written, self._storage.planned_writes)
        return [s for s in found if s is not None]
