"""Gradients at rest in files, and what parameters and gradients need there (``offload_params``, ``offload_grads``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..alignment import block_aligned
from ..ir.transfers import file_of, gradient_of, start_of
from ..layout import Layout
from ..ranges import ranged
from ..storage.stores import FileStore, Nvme, Region, watch
from ..storage.writeback_buffers import Landing, write_buffers
from . import grads


class Files:
    """The files of one sharded model on this rank: where its parameters and gradients rest.

    Args:
        nvme: the tier.
        parameters, gradients: layouts, by name, of what is to lie in files.

    Raises:
        StorageError: no room; nothing is left behind.
    """

    def __init__(self, nvme: Nvme, parameters: Mapping[str, Layout], gradients: Mapping[str, Layout]) -> None:
        self.nvme = nvme
        self.parameters: dict[str, Region] = {}
        self._layouts = dict(parameters)
        self._used: set[str] = set()
        self._room = self._store("parameters", parameters)
        try:
            room = self._store("gradients", gradients)
        except BaseException:
            if self._room is not None:
                self._room.remove()
            raise
        self.gradients = self._regions(room, gradients)

    def add_gradients(self, layouts: Mapping[str, Layout]) -> dict[str, Region]:
        """Room for more of them.

        Raises:
            StorageError: there is none; all is as before.
        """
        added = self._regions(self._store("gradients", layouts), layouts)
        self.gradients.update(added)
        return added

    def _regions(self, room: FileStore | None, gradients: Mapping[str, Layout]) -> dict[str, Region]:
        return {
            name: room.allocate(f"gradient of {name}", layout.padded_shape, layout.dtype)
            for name, layout in gradients.items()
            if room is not None
        }

    def _store(self, what: str, layouts: Mapping[str, Layout]) -> FileStore | None:
        nbytes = sum(block_aligned(layout.bytes_local()) for layout in layouts.values())
        return self.nvme.store(what, nbytes) if layouts else None

    def place(self, name: str) -> Region | None:
        """Where the padded chunk of a parameter rests, zeros at first; None where that is not in a file."""
        if name not in self.parameters and name in self._layouts:
            assert self._room is not None
            layout = self._layouts[name]
            self.parameters[name] = self._room.allocate(name, layout.padded_shape, layout.dtype)
        return self.parameters.get(name)

    def first_use(self, name: str) -> bool:
        """Whether nobody has asked this of the parameter before: its place has zeros."""
        first = name not in self._used
        self._used.add(name)
        return first


class PlannedWrites:
    """In place of :class:`GradientFiles` where a plan is made and no file: what its writes would take."""

    def __init__(self, largest_bytes: int, budget_bytes: int | None) -> None:
        self.buffer_bytes = math.prod(write_buffers(block_aligned(largest_bytes), budget_bytes))


class GradientFiles:
    """Takes gradients as their reductions land, and writes them to files while backward goes on.

    When the backward is over ``.grad`` is a DTensor over the mapping of the file. What is added to a gradient that is
    there already goes through the mapping too: right, and slower.

    Args:
        find: the parameter of a name as it stands in the module now.
        budget_bytes: the memory budget of which its buffers are a part.
        regions: of each gradient, by the name of its parameter.
    """

    uses_up = False
    hooks: Collection[int] = ()

    def __init__(
        self,
        find: Callable[[str], torch.Tensor | None],
        budget_bytes: int | None,
        regions: Mapping[str, Region],
    ) -> None:
        self._find = find
        self._budget_bytes = budget_bytes
        self._regions = dict(regions)
        self._names: dict[int, str] = {}
        # Parameters whose gradients landed in this backward; True: into the file alone, so that it may be added to.
        self._landed: dict[str, tuple[Any, bool]] = {}
        # Of which some tiles have landed; True: they are added to what the file has.
        self._partly: dict[str, bool] = {}
        # Autograd's numbers of the backwards that run: one may run within another (torch.utils.checkpoint).
        self._tasks: set[int] = set()
        self._landing: Landing | None = None

    def add_regions(self, regions: Mapping[str, Region]) -> None:
        """From here on these too; no backward runs."""
        self._regions.update(regions)
        self._names.clear()
        if self._landing is not None:
            self._landing.drain()
            self._landing = None  # it was made for the largest of those before

    def _name_of(self, param: DTensor) -> str | None:
        """The name of a parameter as it stands in the module now: one that was made on meta is replaced when it is
        loaded."""
        name = self._names.get(id(param))
        if name is None or self._find(name) is not param:
            self._names = {id(self._find(name)): name for name in self._regions}
            name = self._names.get(id(param))
        return name

    @property
    def buffer_bytes(self) -> int:
        """Host memory of its writes, which is taken when the first gradient lands."""
        size, count = self._writes()
        return size * count

    def _writes(self) -> tuple[int, int]:
        """Bytes of one write at most, and how many buffers there are."""
        largest = max((r.nbytes for r in self._regions.values()), default=0)
        return write_buffers(largest, self._budget_bytes)

    def land(self, param: DTensor, local: torch.Tensor, final: bool) -> bool:
        """See :class:`~zero_compiler.sharded.grads.Sink`."""
        name = self._name_of(param)
        if name is None:
            return False
        rows = self._rows(name, local)
        self._enter()
        _, written = self._landed.get(name, (param, False))
        if written:
            self.landing().drain()
            rows.add_(local)
        elif param.grad is None:
            written = True
            self._write(name, local)
        else:
            grads.publish(param, local)
        self._landed[name] = (param, written)
        return True

    def land_part(self, param: DTensor, part: torch.Tensor, begin: int, last: bool, final: bool) -> bool:
        """A tile of a gradient, ``begin`` elements after the beginning of the chunk; tiles follow each other.

        Returns whether it was taken; what was not taken of the first tile is not of those after it.
        """
        name = self._name_of(param)
        if name is None or (begin and name not in self._partly):
            return False
        if begin == 0:
            takes = self._accepts_parts(name, param)
            if takes is None:
                return False
            self._partly[name] = takes
        self._enter()
        if self._partly[name]:  # through the mapping, as a whole gradient is
            self.landing().drain()
            self._regions[name].tensor.view(-1)[begin : begin + part.numel()].add_(part.view(-1))
        else:
            self._write(name, part, begin * part.element_size())
        if last:
            _, written = self._landed.get(name, (param, False))
            added = self._partly.pop(name)
            self._landed[name] = (param, written or not added)
        return True

    def _accepts_parts(self, name: str, param: DTensor) -> bool | None:
        """Whether they are added to what the file has; None: they are to be added to what lies elsewhere."""
        if self._landed.get(name, (param, False))[1]:
            return True
        if param.grad is None:
            return False
        local = getattr(param.grad, "_local_tensor", None)
        here = local is not None and local.data_ptr() == self._regions[name].tensor.data_ptr()
        return True if here else None

    def _enter(self) -> None:
        """The first gradient of a backward that lands."""
        if (task := torch._C._current_graph_task_id()) not in self._tasks:
            self._tasks.add(task)
            grads.at_end(partial(self._end, task), partial(self._broke_off, task))

    def _rows(self, name: str, local: torch.Tensor) -> torch.Tensor:
        tensor = self._regions[name].tensor
        return tensor[: local.shape[0]] if local.dim() else tensor

    def landing(self) -> Landing:
        """Where gradients are made, or copied to, that go to files."""
        if self._landing is None:
            size, count = self._writes()
            self._landing = Landing(size * count, size)
        return self._landing

    def _write(self, name: str, local: torch.Tensor, begin: int = 0) -> None:
        """Start to write to the file of ``name``, from byte ``begin`` on."""
        file = file_of(gradient_of(name))
        with ranged(start_of(file), file):
            self.landing().write(self._regions[name], local, begin)

    def has(self, name: str) -> bool:
        """Whether a gradient has landed in this backward, and is not complete."""
        return name in self._landed

    def _broke_off(self, task: int) -> None:
        """No write of this backward comes later than those of the next one."""
        self._tasks.discard(task)
        self._landed.clear()
        self._partly.clear()
        if self._landing is not None:
            self._landing.forget()

    def _end(self, task: int) -> None:
        """The backward is over: everything is written, and may be read; so is what has landed in one around it."""
        self._tasks.discard(task)
        self.finish()

    def finish(self, name: str | None = None) -> None:
        """What has landed, or of it the gradient of ``name``, is complete: it is written, and is ``.grad`` from here
        on."""
        names = list(self._landed) if name is None else [name] if name in self._landed else []
        landed = {name: self._landed.pop(name) for name in names}
        if landed:
            self.landing().drain()
        for name, (param, written) in landed.items():
            rows, grad = self._rows(name, param._local_tensor), param.grad
            if grad is not None and grad._local_tensor.data_ptr() != rows.data_ptr():
                # From outside: autograd added to nothing meanwhile, or the user had put it there before.
                rows.add_(grad._local_tensor) if written else rows.copy_(grad._local_tensor)
            param.grad = grads.as_dtensor(param, rows)
            watch(param.grad, rows)
