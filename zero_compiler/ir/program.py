"""The Program: the flat, versioned, serialisable instruction list that the runtime executes.

Values are numbered; an instruction reads and writes numbers. Transfers are described once, in tables, with
their planned byte offsets in the arenas, and instructions name them by index. Nothing in a Program depends
on the rank.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from ..alignment import block_aligned
from .facts import ParamRef
from .instructions import KINDS, Instruction, Reducing, reducing
from .transfers import GatherDesc, Hop, KeepDesc, OffloadDesc, Part, ReduceDesc

VERSION = 8


@dataclass(frozen=True)
class Constant:
    """An output that is the same number at every call, as a size that what follows in its frame has fixed."""

    value: int | float | bool | complex

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: its type beside it, since JSON has no complex numbers."""
        v = self.value
        return {"constant": type(v).__name__, "value": [v.real, v.imag] if isinstance(v, complex) else v}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Constant:
        """Inverse of :meth:`to_dict`."""
        return Constant(complex(*data["value"]) if data["constant"] == "complex" else data["value"])


@dataclass(frozen=True)
class Need:
    """What a call of a Program takes: ``nbytes`` on this rank, with the reason why they are too many, or 0 where it
    fits. Of the storages of gradients that nobody holds ``idle_bytes`` may wait while it runs; -1: all of them."""

    nbytes: int
    idle_bytes: int
    refusal: str = ""


@dataclass(frozen=True)
class Program:
    """One phase of one captured frame: a value. What is found of it later (what its code takes, what other frames hold
    beside it) is another one, made by ``dataclasses.replace``.

    Args:
        phase: "forward", "backward" or "inference".
        keeps: gradients that a backward under ``zero.no_sync`` adds up instead of reducing them
            (see `no_sync_program.py`).
        num_values: size of the value table; inputs are values 0 to ``num_inputs`` - 1.
        outputs: the number of the value that each output is, or the :class:`Constant` that it is. None: it is None.
        segments: text of each distinct compute segment.
        structures: for each ``Compute.segment``, the index of its text in ``segments``.
        segment_us: predicted time of each ``Compute.segment``.
        modules: for each ``Compute.segment``, the modules of the model that it computes.
        transient_bytes: size of the arena that gather buffers and staging of this Program share.
        slots_bytes: size of the gather buffers that all ranks share, ``slots_ranks`` of them.
        own_bytes: size of this rank's staging that its peers read. Of several models each has slots and staging of its
            own, to where they end (see `arena_extents.py`), which may lie at the same bytes.
        host_bytes: size of the pinned pool on the host through which files are read and written.
        device_bytes: size of the pool on the device to which chunks are copied that rest on its host, or in files.
        offloads: tensors that wait on another tier between forward and backward.
        idle_bytes: of the storages of gradients that rest in memory and nobody holds, so many may wait to be used again
            while this Program runs; the rest is given back when it begins (see `live.py`), or before more is taken. -1:
            all may wait.
        before_bytes: what frames before this one have saved for their backward, which is still due
            (see `cross_frame_memory.py`).
        again_bytes: gradients that frames behind this one have stored, in the same backward, of weights whose gradients
            it makes as well.
        returned_bytes: of a backward, what its forward has returned and it does not read: the caller may hold that
            until it has run.
        recorded_bytes: memory of graphs of the device: what its segments make, and copies of what they are given. It
            rests between calls.
        storages, lies_in: see `alias_table.py`.
        inside: for each ``Compute.segment``, most bytes that it holds beyond what is live before it.
        live: for each instruction, predicted bytes live after it on the compute device, with the arena and
            without what is at rest.
    """

    phase: str
    num_inputs: int
    num_values: int
    instrs: list[Instruction]
    outputs: list[int | Constant | None]
    gathers: list[GatherDesc]
    reduces: list[ReduceDesc]
    segments: list[str]
    transient_bytes: int
    structures: list[int] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    segment_us: list[float] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    slots_bytes: int = 0
    slots_ranks: int = 1
    own_bytes: int = 0
    host_bytes: int = 0
    device_bytes: int = 0
    offloads: list[OffloadDesc] = field(default_factory=list)
    idle_bytes: int = -1
    before_bytes: int = 0
    again_bytes: int = 0
    returned_bytes: int = 0
    recorded_bytes: int = 0
    storages: list[int] = field(default_factory=list)
    lies_in: list[tuple[int, ...]] = field(default_factory=list)
    inside: list[int] = field(default_factory=list)
    keeps: list[KeepDesc] = field(default_factory=list)
    version: int = VERSION

    @property
    def title(self) -> str:
        """The phase, and which of its two Programs this is."""
        return f"{self.phase} under zero.no_sync" if self.keeps else self.phase

    def title_in(self, frame: int) -> str:
        """The same with the number of its frame, as traces name a run of it."""
        return f"frame {frame}, {self.title}"

    @functools.cached_property
    def reductions(self) -> list[Reducing | None]:
        """What each instruction is to a reduction; None: nothing."""
        return [reducing(self, instr) for instr in self.instrs]

    @property
    def beside_bytes(self) -> int:
        """Bytes that others hold while this Program runs, as far as they come from the same step."""
        return self.before_bytes + self.again_bytes + self.returned_bytes

    @property
    def waiting_bytes(self) -> int:
        """Bytes of full gradients that wait for their reduction when this Program has run."""
        return sum(k.nbytes for k in self.keeps)

    @property
    def file_bytes(self) -> int:
        """Bytes of a file, or of memory on the host, that holds what forward offloads."""
        return max((o.where + block_aligned(o.nbytes) for o in self.offloads), default=0)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all arenas of this Program on the device, with this rank's part of what ranks share."""
        shared = self.own_bytes + -(-self.slots_bytes // self.slots_ranks)
        return self.transient_bytes + shared + self.device_bytes

    def collectives(self) -> str:
        """The sequence of collectives, one line each: what ranks must agree on before the first of them.

        Only parameters, order, placement and world size are in it; never sizes of activations.
        """
        lines = [line for instr in self.instrs if (line := instr.collective(self))]
        return "\n".join([f"phase {self.title}", *lines])

    def params(self) -> list[ParamRef]:
        """Parameters that the Program moves, without repeats."""
        out: dict[ParamRef, None] = {}
        descs: list[GatherDesc | ReduceDesc | KeepDesc] = [*self.gathers, *self.reduces, *self.keeps]
        for desc in descs:
            for name in desc.names:
                out[ParamRef(desc.owner, name)] = None
        return list(out)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        out = asdict(self)
        out["instrs"] = [asdict(i) for i in self.instrs]
        out["outputs"] = [v.to_dict() if isinstance(v, Constant) else v for v in self.outputs]
        return out

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Program:
        """Inverse of :meth:`to_dict`.

        Raises:
            ValueError: another version of the format.
        """
        if data.get("version") != VERSION:
            raise ValueError(f"Program version must be {VERSION}, found {data.get('version')!r}")
        data = dict(data)
        data["instrs"] = [KINDS[i["op"]](**_tuples(i)) for i in data["instrs"]]
        data["gathers"] = [GatherDesc(**_desc(g)) for g in data["gathers"]]
        data["offloads"] = [OffloadDesc(**_tuples(o)) for o in data["offloads"]]
        data["reduces"] = [ReduceDesc(**_desc(r)) for r in data["reduces"]]
        data["keeps"] = [KeepDesc(**_desc(k)) for k in data["keeps"]]
        data["lies_in"] = [tuple(v) for v in data["lies_in"]]
        data["outputs"] = [Constant.from_dict(v) if isinstance(v, dict) else v for v in data["outputs"]]
        return Program(**data)

    def text(self, live: bool = True) -> str:
        """One line an instruction."""
        lines = []
        for i, instr in enumerate(self.instrs):
            tail = f"live {self.live[i]:,}" if live and i < len(self.live) else ""
            lines.append(f"{self.line(instr):<88} {tail}".rstrip())
        return "\n".join(lines)

    def line(self, instr: Instruction) -> str:
        """An instruction in words, in columns: what it does, and to what."""
        return instr.text(self)


def _desc(data: dict[str, object]) -> dict[str, Any]:
    out = _tuples(data)
    if out.get("tile") is not None:
        out["tile"] = Part(**out["tile"])
    if "hops" in out:
        out["hops"] = tuple(Hop(**h) for h in out["hops"])
    return out


def _tuples(value: object) -> Any:
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    if isinstance(value, list):
        return tuple(_tuples(v) for v in value)
    return value


def outputs_of(program: Program, value: Callable[[int], object]) -> list[Any]:
    """What a Program returns when it has run.

    Args:
        value: by its number.
    """
    return [value(v) if isinstance(v, int) else v.value if v is not None else None for v in program.outputs]


def last_reads(program: Program) -> dict[tuple[str, str], float]:
    """The last instruction of a Program that reads each weight; no update may come before it.

    Without a copy of its own (one rank, or memory that ranks share) a weight is read where it lies at rest, by
    peers even until the call ends.
    """
    weight: dict[int, tuple[str, str]] = {}
    last: dict[tuple[str, str], float] = {}
    for at, instr in enumerate(program.instrs):
        if instr.table == "gathers":
            g = program.gathers[instr.index]
            for k, name in enumerate(g.names):
                last[g.owner, name] = float("inf") if g.home else at
                if instr.writes and instr.writes[k] >= 0:
                    weight[instr.writes[k]] = (g.owner, name)
        for value in instr.reads:
            if value in weight:
                key = weight[value]
                last[key] = max(last[key], at)
    return last
