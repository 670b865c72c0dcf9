"""The Program: the flat, versioned, serialisable instruction list that the runtime executes.

Values are numbered; an instruction reads and writes numbers. Transfers are described once, in tables, with
their planned byte offsets in the arenas, and instructions name them by index. Nothing in a Program depends
on the rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..alignment import block_aligned
from .facts import ParamRef

VERSION = 7


@dataclass(frozen=True)
class Part:
    """A tile: of every rank's padded chunk, of ``numel`` elements, those from ``begin`` on; number ``index`` of ``of``
    tiles."""

    begin: int
    index: int
    of: int
    numel: int

    @property
    def last(self) -> bool:
        return self.index == self.of - 1


@dataclass(frozen=True)
class Hop:
    """One step of the way of this rank's chunks to the compute device: from ``tier`` ("nvme" or "host") to these byte
    ``offsets`` of the pool "host" or "device"."""

    tier: str
    pool: str
    offsets: tuple[int, ...]

    @property
    def what(self) -> str:
        """What is waited for, in words."""
        return "file" if self.tier == "nvme" else "copy"


@dataclass(frozen=True)
class GatherDesc:
    """One bucket of weights gathered by one collective.

    ``offsets`` are those of the full weights in the arena of their pool ("transient", or "kept" for weights
    that stay until the shards change); ``staging`` is -1 where none is needed.

    With ``shared`` that arena is memory that all ranks share, and each writes its own rows there. With ``home``
    nothing is written and there are no offsets (-1): the weights are read where they lie at rest.

    ``hops``: this rank's chunks rest on another tier, and come to the device step by step first; ``()`` where they
    rest there. One rank that casts nothing computes with them where they arrive. A file is read into the pool "host";
    where the CPU computes, that is the device's memory, and else a copy to the pool "device" follows.

    With ``tile`` only a part of one weight is gathered (see :class:`Part`): ``shapes`` and ``chunk_numels`` are those
    of the part.
    """

    owner: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    chunk_numels: tuple[int, ...]
    dtype: str
    kept: bool
    offsets: tuple[int, ...]
    staging: int
    unit: str
    home: bool = False
    shared: bool = False
    hops: tuple[Hop, ...] = ()
    rest_dtype: str = ""
    tile: Part | None = None

    @property
    def begin(self) -> int:
        """Elements of a chunk at rest before those that are gathered."""
        return self.tile.begin if self.tile else 0

    @property
    def chunk_bytes(self) -> int:
        """Of this rank's chunks at rest."""
        return sum(self.chunk_numels) * getattr(torch, self.rest_dtype or self.dtype).itemsize

    @property
    def label(self) -> str:
        return f"gather of {few(self.names)}{_of(self.tile)}"


@dataclass(frozen=True)
class ReduceDesc:
    """One bucket of gradients reduced by one collective; ``dtype`` is that of the arithmetic.

    With ``shared``, ``staging`` is where this rank lays its gradients, one after the other, for its peers to read.
    ``tiers``: the result rests on the last of them. "host" is the host of an accelerator, to which a ``store`` copies
    it; what goes to files ("nvme") is written as it lands. ``copies`` ranks hold the same rows:
    when their own ranks' gradients are summed up, an all-reduce between them follows, which may be under way until
    the next reduction lands, or the Program ends.
    With ``tile`` only a part of one gradient is reduced; the wait for the last part gives all of this rank's rows.
    The gradients come in ``grad_dtype``; "" stands for ``dtype``. Those named in ``direct`` are made in memory from
    which they are written to files.
    """

    owner: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    chunk_numels: tuple[int, ...]
    dtype: str
    out_dtype: str
    replicated: bool
    staging: int
    unit: str
    shared: bool = False
    tiers: tuple[str, ...] = ()
    copies: int = 1
    tile: Part | None = None
    grad_dtype: str = ""
    direct: tuple[str, ...] = ()

    @property
    def copied(self) -> bool:
        """Whether the result leaves the device by a ``store``, between the reduction and its wait."""
        return self.tiers[:1] == ("host",)

    @property
    def passes(self) -> bool:
        """Whether the result is gone once it has landed: it rests on another tier, or is laid, a tile, into its place
        among the others."""
        return bool(self.tiers) or self.tile is not None

    @property
    def cast_last(self) -> bool:
        """Whether what ranks with the same rows sum up becomes the result only then, in another dtype."""
        return self.copies > 1 and self.dtype != self.out_dtype

    @property
    def result_bytes(self) -> int:
        """Of this rank's chunks of the result."""
        return sum(self.chunk_numels) * getattr(torch, self.out_dtype).itemsize

    @property
    def how(self) -> str:
        """The collectives that it takes."""
        first = "all-reduce" if self.replicated else "reduce-scatter"
        return first if self.copies == 1 else f"{first}, all-reduce x {self.copies}"

    @property
    def label(self) -> str:
        return f"reduction of the gradients of {few(self.names)}{_of(self.tile)}"


@dataclass(frozen=True)
class KeepDesc:
    """Full gradients of this rank that come in ``grad_dtype``, and are added to what waits, in ``dtype``, for the next
    backward that reduces. With ``tile`` it is a part of one gradient."""

    owner: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    grad_dtype: str
    tile: Part | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that wait."""
        return sum(map(math.prod, self.shapes)) * getattr(torch, self.dtype).itemsize

    @property
    def cast_bytes(self) -> int:
        """Most bytes that stand beside gradients and sums while one is added to the other: of each in turn the copy in
        the dtype of the sum, or the part that is cut from it."""
        if self.tile is None and self.grad_dtype == self.dtype:
            return 0
        return max(map(math.prod, self.shapes)) * getattr(torch, self.dtype).itemsize

    @property
    def label(self) -> str:
        return f"sum of the gradients of {few(self.names)}{_of(self.tile)}"


def _of(tile: Part | None) -> str:
    return f", tile {tile.index + 1} of {tile.of}" if tile else ""


@dataclass(frozen=True)
class OffloadDesc:
    """A tensor of ``nbytes`` that waits on a tier between forward and backward, ``where`` bytes behind the begin of all
    that do. ``module`` made it. ``tiers`` are those on its way from the compute device, where it rests last: "host" of
    an accelerator, or files ("nvme"), to which those of an accelerator go by way of the host. On the way to a file
    ``offset`` is its place in the pool "host"; -1 for what passes no pool."""

    name: str
    module: str
    tiers: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    where: int
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize

    @property
    def pooled(self) -> bool:
        """Whether it passes the pool on the host."""
        return self.tiers[-1] == "nvme"

    @property
    def copied(self) -> bool:
        """Whether it leaves the device by a copy, which reads it until it has been waited for."""
        return self.tiers[0] == "host"

    @property
    def staged(self) -> bool:
        """Whether it stops in the pool between a copy and a file."""
        return len(self.tiers) > 1

    @property
    def label(self) -> str:
        return f"activation {self.name}{' of ' if self.module else ''}{self.module}"


def few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


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


# Instructions. `op` names the kind; JSON keeps the fields in order.
@dataclass(frozen=True)
class Fetch:
    """Start hop ``hop`` of this rank's chunks of gather ``index``: to read them from files, or to copy them to the
    device."""

    index: int
    hop: int = 0
    op: str = "fetch"


@dataclass(frozen=True)
class WaitFetch:
    """Wait until hop ``hop`` of the chunks of gather ``index`` is done."""

    index: int
    hop: int = 0
    op: str = "wait_fetch"


@dataclass(frozen=True)
class Gather:
    """Start gather ``index``."""

    index: int
    op: str = "gather"


@dataclass(frozen=True)
class WaitGather:
    """Wait for gather ``index``; ``outs`` are its weights (-1: not read)."""

    index: int
    outs: tuple[int, ...]
    op: str = "wait_gather"


@dataclass(frozen=True)
class Release:
    """The weights of gather ``index`` are dead: their slots may be used again."""

    index: int
    values: tuple[int, ...]
    op: str = "release"


@dataclass(frozen=True)
class Compute:
    """Run ``segment`` on the values ``ins``; values in ``free`` are read here for the last time."""

    segment: int
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    free: tuple[int, ...]
    op: str = "compute"


@dataclass(frozen=True)
class Reduce:
    """Start reduction ``index`` of the gradients ``ins``."""

    index: int
    ins: tuple[int, ...]
    free: tuple[int, ...]
    op: str = "reduce"


@dataclass(frozen=True)
class Store:
    """Wait for reduction ``index``, and start to copy its result to the host of the accelerator."""

    index: int
    op: str = "store"


@dataclass(frozen=True)
class WaitReduce:
    """Wait for reduction ``index``, or for the copy of its result; ``outs`` are this rank's rows of the mean gradients,
    where they rest."""

    index: int
    outs: tuple[int, ...]
    op: str = "wait_reduce"


@dataclass(frozen=True)
class Keep:
    """Add the gradients ``ins`` to what waits for a reduction, as ``keeps`` at ``index`` says."""

    index: int
    ins: tuple[int, ...]
    free: tuple[int, ...]
    op: str = "keep"


@dataclass(frozen=True)
class Offload:
    """Start to take the value ``ins`` to the first tier on its way; ``outs`` is its ticket. To a file it is copied into
    the pool at once, and written from there."""

    index: int
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    free: tuple[int, ...]
    op: str = "offload"


@dataclass(frozen=True)
class Write:
    """Wait until offloaded tensor ``index`` has been copied into the pool, and start to write it to its file."""

    index: int
    op: str = "write"


@dataclass(frozen=True)
class WaitOffload:
    """Wait until offloaded tensor ``index`` is where it waits: its place in the pool is free."""

    index: int
    op: str = "wait_offload"


@dataclass(frozen=True)
class Restore:
    """Start to bring back offloaded tensor ``index``, for which the ticket ``ins`` stands: a file is read into the
    pool, memory of the host is copied to the device."""

    index: int
    ins: tuple[int, ...]
    op: str = "restore"


@dataclass(frozen=True)
class Bring:
    """Wait until offloaded tensor ``index`` has been read into the pool, and start to copy it to the device."""

    index: int
    op: str = "bring"


@dataclass(frozen=True)
class WaitRestore:
    """Wait until it is back: the value ``outs``."""

    index: int
    outs: tuple[int, ...]
    op: str = "wait_restore"


@dataclass(frozen=True)
class Discard:
    """Offloaded tensor ``index`` is dead: so is the memory that it came back to."""

    index: int
    values: tuple[int, ...]
    op: str = "discard"


Instr = (
    Fetch
    | WaitFetch
    | Gather
    | WaitGather
    | Release
    | Compute
    | Reduce
    | Store
    | WaitReduce
    | Keep
    | Offload
    | Write
    | WaitOffload
    | Restore
    | Bring
    | WaitRestore
    | Discard
)
_KINDS: dict[str, type] = {
    "fetch": Fetch,
    "wait_fetch": WaitFetch,
    "gather": Gather,
    "wait_gather": WaitGather,
    "release": Release,
    "compute": Compute,
    "reduce": Reduce,
    "store": Store,
    "wait_reduce": WaitReduce,
    "keep": Keep,
    "offload": Offload,
    "write": Write,
    "wait_offload": WaitOffload,
    "restore": Restore,
    "bring": Bring,
    "wait_restore": WaitRestore,
    "discard": Discard,
}


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
        storages, lies_in: see `alias_table.py`.
        inside: for each ``Compute.segment``, most bytes that it holds beyond what is live before it.
        live: for each instruction, predicted bytes live after it on the compute device, with the arena and
            without what is at rest.
    """

    phase: str
    num_inputs: int
    num_values: int
    instrs: list[Instr]
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
    storages: list[int] = field(default_factory=list)
    lies_in: list[tuple[int, ...]] = field(default_factory=list)
    inside: list[int] = field(default_factory=list)
    keeps: list[KeepDesc] = field(default_factory=list)
    version: int = VERSION

    @property
    def title(self) -> str:
        """The phase, and which of its two Programs this is."""
        return f"{self.phase} under zero.no_sync" if self.keeps else self.phase

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
        lines = [f"phase {self.title}"]
        for instr in self.instrs:
            if isinstance(instr, Gather):
                g = self.gathers[instr.index]
                where = " kept" if g.kept else ""
                if g.home:
                    where += " in place"
                elif g.shared:  # every rank writes into the same slots
                    where += f" at bytes {', '.join(map(str, g.offsets))}"
                lines.append(
                    f"gather {', '.join(g.names)}{_of(g.tile)} {g.dtype} {sum(g.chunk_numels)} elements a rank{where}"
                )
            elif isinstance(instr, Reduce):
                r = self.reduces[instr.index]
                what = f"{', '.join(r.names)}{_of(r.tile)}"
                lines.append(f"{r.how} {what} {r.dtype} {sum(r.chunk_numels)} elements a rank")
        return "\n".join(lines)

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
        data["instrs"] = [_KINDS[i["op"]](**_tuples(i)) for i in data["instrs"]]
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

    def line(self, instr: Instr) -> str:
        """An instruction in words, in columns: what it does, and to what."""
        if isinstance(instr, (Offload, Write, WaitOffload, Restore, Bring, WaitRestore, Discard)):
            o = self.offloads[instr.index]
            if isinstance(instr, (Offload, Write, Restore, Bring)):
                to = ", to the device" if isinstance(instr, Bring) else ""
                return f"{instr.op:<15} {o.name} {o.dtype}{list(o.shape)}, {o.nbytes:,} bytes{to}"
            if isinstance(instr, Discard):
                return f"discard         {o.name}"
            last = o.tiers[-1] if isinstance(instr, WaitOffload) else o.tiers[0]
            return f"wait            {'copy' if last == 'host' else 'file'} of {o.name}"
        if isinstance(instr, (Fetch, WaitFetch)):
            g = self.gathers[instr.index]
            hop, what = g.hops[instr.hop], f"{few(g.names)}{_of(g.tile)}"
            if isinstance(instr, WaitFetch):
                return f"wait            {hop.what} of {what}"
            to = ", to the device" if hop.pool == "device" else ""
            return f"fetch           {what}, {g.chunk_bytes:,} bytes a rank{to}"
        if isinstance(instr, Gather):
            g = self.gathers[instr.index]
            return (
                f"{'in place' if g.home else 'gather':<15} {_sized(g.names, g.shapes, g.dtype)}{_of(g.tile)}"
            )
        if isinstance(instr, WaitGather):
            g = self.gathers[instr.index]
            return f"wait            {few(g.names)}{_of(g.tile)}"
        if isinstance(instr, Release):
            g = self.gathers[instr.index]
            return f"release         {few(g.names)}{_of(g.tile)}"
        if isinstance(instr, Compute):
            of = f": {self.modules[instr.segment]}" if instr.segment < len(self.modules) else ""
            return f"compute         segment {instr.segment}{of}"
        if isinstance(instr, Keep):
            k = self.keeps[instr.index]
            return f"keep            {_sized(k.names, k.shapes, k.dtype)}{_of(k.tile)}"
        r = self.reduces[instr.index]
        if isinstance(instr, Store):
            what = f"{few(r.names)}{_of(r.tile)}"
            return f"store           gradients of {what}, {r.result_bytes:,} bytes a rank"
        if isinstance(instr, Reduce):
            return f"{r.how:<15} {_sized(r.names, r.shapes, r.dtype)}{_of(r.tile)}"
        return f"wait            gradients of {few(r.names)}{_of(r.tile)}"


def _sized(names: Iterable[str], shapes: Iterable[tuple[int, ...]], dtype: str) -> str:
    pairs = [f"{n} {dtype}{list(s)}" for n, s in zip(names, shapes, strict=True)]
    return ", ".join(pairs[:3]) + (f" and {len(pairs) - 3} more" if len(pairs) > 3 else "")


def _desc(data: dict[str, Any]) -> dict[str, Any]:
    out = _tuples(data)
    if out.get("tile") is not None:
        out["tile"] = Part(**out["tile"])
    if "hops" in out:
        out["hops"] = tuple(Hop(**h) for h in out["hops"])
    return out


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    if isinstance(value, list):
        return tuple(_tuples(v) for v in value)
    return value


def outputs_of(program: Program, value: Callable[[int], Any]) -> list[Any]:
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
        if isinstance(instr, (Gather, WaitGather, Release)):
            g = program.gathers[instr.index]
            for k, name in enumerate(g.names):
                last[g.owner, name] = float("inf") if g.home else at
                if isinstance(instr, WaitGather) and instr.outs[k] >= 0:
                    weight[instr.outs[k]] = (g.owner, name)
        elif isinstance(instr, Compute):
            for value in instr.ins:
                if value in weight:
                    key = weight[value]
                    last[key] = max(last[key], at)
    return last
