"""Predicted bytes of one rank: what rests between steps, what a step takes beside, and what the process has."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..storage.resident_memory import Footprint
from .step import MicroBatches

# What a process takes beyond its plan and what it had, of which nobody asks the system in advance. Measured by
# `benchmarks/resident.py`: threads, buffers of libraries and the objects of a running loop; in the heap holes, of what
# comes and goes there; tables of the system's own.
_RUNNING_BYTES = 24 << 20
_HOLES = 4  # one part in so many of what Programs add
_TABLES = 256
# What compiling leaves, where it was not measured: Dynamo's, AOTAutograd's and Inductor's objects.
_COMPILED_BYTES = 64 << 20


@dataclass(frozen=True)
class Memory:
    """Predicted bytes of one rank on the compute device.

    ``parameters``, ``gradients``, ``optimizer``, ``kept`` (gathered weights that stay: stages 1 and 2, and of
    stage 3 those for which a memory budget has room) and ``arena`` (gather buffers and staging) lie there between
    steps; ``programs`` is what a Program holds beyond all of that when it holds most. Gradients make room for
    activations: they count from when they are reduced until the next forward, which finds them dropped
    (``zero_grad()``). ``host`` are the buffers on the host through which files are read and written; they count
    where the CPU is the compute device. ``files`` are bytes at rest in files, which do not count. ``assumed`` are
    the bytes of optimizer states, wherever they rest, that no ``zero.optimizer`` has told, and
    ``assumed_optimizer`` is whose (``Config.optimizer``). ``waiting`` are the full gradients that a step under
    ``zero.no_sync`` keeps from one backward to the next, in ``reduce_dtype``; ``accumulating`` is what such a
    step holds when it holds most, in place of ``gradients`` and ``programs``. ``recorded`` is the memory of graphs of
    the device (``mode="reduce-overhead"``), which rests; ``programs`` counts beside it, for calls that run without
    them. ``apart`` are bytes in the memory of an accelerator's host, which do not count: what rests there, and the
    buffers of files. ``elsewhere``: the
    memory of the compute device is not the process's. ``footprint``: what the process has beside all of this,
    where it was measured.
    """

    parameters: int
    gradients: int
    optimizer: int
    kept: int
    arena: int
    programs: int
    host: int = 0
    files: int = 0
    assumed: int = 0
    waiting: int = 0
    accumulating: int = 0
    apart: int = 0
    recorded: int = 0
    elsewhere: bool = False
    assumed_optimizer: str = ""
    footprint: Footprint | None = field(default=None, compare=False)

    @property
    def at_rest(self) -> int:
        """After ``optimizer.step()``, before ``zero_grad()``."""
        held = self.kept + self.arena + self.recorded + self.host
        return self.parameters + self.gradients + self.optimizer + held

    @property
    def peak(self) -> int:
        """Of a step that begins without gradients. One that adds to gradients holds ``gradients`` once more."""
        return self.at_rest + self.programs

    @property
    def accumulating_peak(self) -> int:
        """Of a step that begins without gradients, and whose backwards but the last run under ``zero.no_sync``."""
        return self.at_rest - self.gradients + self.accumulating

    def peak_of(self, given: MicroBatches) -> int:
        """Of a step of micro-batches that begins without gradients."""
        if given.count == 1:
            return self.peak
        return self.accumulating_peak if given.waits else self.peak + self.gradients

    @property
    def planned(self) -> int:
        """Of the plan, what is in the memory of the process."""
        return self.apart if self.elsewhere else self.peak

    @property
    def overhead(self) -> int:
        """What a process takes beside, derived: see `_RUNNING_BYTES`, `_HOLES` and `_TABLES`."""
        holes = 0 if self.elsewhere else self.programs // _HOLES
        return _RUNNING_BYTES + holes + self.planned // _TABLES

    @property
    def compiled(self) -> int:
        """What compiling leaves in the process: measured, or assumed where nothing was compiled."""
        return self.footprint.compiled if self.footprint and self.footprint.frames else _COMPILED_BYTES

    @property
    def resident(self) -> int:
        """Expected resident memory of the process, as a container counts it, without pages of files, which the system
        takes back. Where ``footprint`` is None, without what the process has beside the plan."""
        had, compiling = (self.footprint.had, self.footprint.compiling) if self.footprint else (0, 0)
        steps = self.planned + self.overhead
        # Nothing has been gathered or computed when a model is compiled.
        compiles = (0 if self.elsewhere else self.parameters) + compiling + _RUNNING_BYTES
        return had + self.compiled + max(steps, compiles)
