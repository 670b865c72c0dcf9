"""What Programs move: the transfers, each described once, and the lanes that they take."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..quantised_blocks import moved_bytes, packed_bytes

# Compute, collectives between ranks, reads and writes of files, copies between an accelerator and its host.
LANES = COMPUTE, LINK, READ, WRITE, HOST = (
    "compute",
    "device-device",
    "nvme-read",
    "nvme-write",
    "host-device",
)


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

    def of(self, label: str) -> str:
        """The name of this step of the way of what is called ``label``."""
        return file_of(label) if self.tier == "nvme" else copy_of(label)


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

    ``wire``: the dtype of 8 bits that chunks travel in, by its name (see `quantised_blocks.py`); "" where they travel
    as they are computed with. The start packs this rank's chunks, and the wait unpacks those of all.

    ``host_ranks``: so many ranks of a host share second shards of these weights; 0: there are none. In forward
    ``parts`` are the elements of each full weight that this rank keeps (0: none), and ``part_tiles``, of a weight that
    backward gathers in tiles, those of a chunk in one of them (see `second_runs` in `layout.py`). A gather with no
    ``parts`` is one of second shards among the ranks of the host, whose chunks are ``chunk_numels``. ``second_tiles``
    are, of both, how second shards are laid out: in tiles of so many elements of a chunk; 0: whole.
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
    wire: str = ""
    host_ranks: int = 0
    parts: tuple[int, ...] = ()
    part_tiles: tuple[int, ...] = ()
    second_tiles: tuple[int, ...] = ()

    @property
    def from_second(self) -> bool:
        """Whether it gathers second shards, among the ranks of a host."""
        return self.host_ranks > 0 and not self.parts

    def ranks(self, world: int) -> int:
        """Among how many ranks it is, of ``world`` that hold chunks."""
        return self.host_ranks if self.from_second else world

    @property
    def part_bytes(self) -> int:
        """Of the second shards that this rank keeps."""
        return sum(self.parts) * getattr(torch, self.dtype).itemsize

    @property
    def steps(self) -> int:
        """On their lanes: the hops of the chunks, and the collective."""
        return len(self.hops) + 1

    @property
    def row_numels(self) -> tuple[int, ...]:
        """Elements of a row of each weight."""
        return tuple(math.prod(shape[1:]) for shape in self.shapes)

    @property
    def sent_bytes(self) -> int:
        """Of this rank's chunks on their way between ranks."""
        if not self.wire:
            return sum(self.chunk_numels) * getattr(torch, self.dtype).itemsize
        return sum(map(packed_bytes, self.chunk_numels, self.row_numels))

    def staging_bytes(self, world: int) -> int:
        """Beside the full weights, from the start to the wait: what this rank sends; and where that is taken apart
        again, what comes from all ranks."""
        if self.staging < 0:
            return 0
        return self.sent_bytes * (self.ranks(world) + 1 if self.wire or len(self.names) > 1 else 1)

    @property
    def packing_bytes(self) -> int:
        """Of memory, that packing this rank's chunks takes the time of."""
        rest = getattr(torch, self.rest_dtype or self.dtype).itemsize
        return moved_bytes(sum(self.chunk_numels), rest) if self.wire else 0

    @property
    def unpacking_bytes(self) -> int:
        """The same of unpacking those of all ranks."""
        numel = sum(map(math.prod, self.shapes))
        return moved_bytes(numel, getattr(torch, self.dtype).itemsize) if self.wire else 0

    @property
    def begin(self) -> int:
        """Elements of a chunk at rest before those that are gathered."""
        return self.tile.begin if self.tile else 0

    @property
    def chunk_bytes(self) -> int:
        """Of this rank's chunks at rest."""
        return sum(self.chunk_numels) * getattr(torch, self.rest_dtype or self.dtype).itemsize

    @property
    def what(self) -> str:
        return f"{few(self.names)}{tile_text(self.tile)}"

    @property
    def how(self) -> str:
        return "in place" if self.home else "gather"

    @property
    def shaped(self) -> str:
        within = f" within {self.host_ranks} ranks of a host" if self.from_second else ""
        return _shaped(self) + (f" as {self.wire}" if self.wire else "") + within

    @property
    def label(self) -> str:
        return f"gather of {self.what}"


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
    ``wire``: the dtype of 8 bits in which what the ranks of a host have summed up goes to the others of ``hosts``, each
    rank's chunk of a gradient as one row (see `quantised_blocks.py`); there it is summed up in float32. "": as it is.
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
    wire: str = ""
    hosts: int = 1

    @property
    def packed_bytes(self) -> int:
        """Of this rank's chunks, on their way from one host."""
        return sum(packed_bytes(n, n) for n in self.chunk_numels)

    @property
    def summed_bytes(self) -> int:
        """Of this rank's chunks as they are summed up."""
        return sum(self.chunk_numels) * getattr(torch, self.dtype).itemsize

    @property
    def steps(self) -> int:
        """On their lanes: the collective, and the copy of its result."""
        return 1 + self.copied

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
    def read_in_place(self) -> bool:
        """Whether a gradient lives until its reduction ends: it may be reduced from where it lies."""
        if self.shared:
            return False
        chunks = zip(self.chunk_numels, self.shapes, strict=True)
        return len(self.names) == 1 or all(c >= math.prod(shape) for c, shape in chunks)

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
        first += f" as {self.wire} between hosts" if self.wire else ""
        return first if self.copies == 1 else f"{first}, all-reduce x {self.copies}"

    @property
    def what(self) -> str:
        return f"{few(self.names)}{tile_text(self.tile)}"

    @property
    def shaped(self) -> str:
        return _shaped(self)

    @property
    def label(self) -> str:
        return f"reduction of the gradients of {self.what}"


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
    def shaped(self) -> str:
        return _shaped(self)

    @property
    def label(self) -> str:
        return f"sum of the gradients of {few(self.names)}{tile_text(self.tile)}"


def tile_text(tile: Part | None) -> str:
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
    def steps(self) -> int:
        """On their lanes, in each direction."""
        return len(self.tiers)

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
    def shaped(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def what(self) -> str:
        return self.label

    @property
    def label(self) -> str:
        return f"activation {self.name}{' of ' if self.module else ''}{self.module}"


def _shaped(desc: GatherDesc | ReduceDesc | KeepDesc) -> str:
    """Names with what they are."""
    pairs = [f"{n} {desc.dtype}{list(s)}" for n, s in zip(desc.names, desc.shapes, strict=True)]
    more = f" and {len(pairs) - 3} more" if len(pairs) > 3 else ""
    return ", ".join(pairs[:3]) + more + tile_text(desc.tile)


# What the runtime does, as traces name it: that of a plan and those of torch's profiler, behind the name of the lane.


def file_of(label: str) -> str:
    """Of what is read from a file, or written to one."""
    return f"file of the {label}"


def copy_of(label: str) -> str:
    """Of a copy between an accelerator and its host."""
    return f"copy of the {label}"


def start_of(label: str) -> str:
    """Of what the thread that runs a Program does to start the transfer ``label``."""
    return f"start of the {label}"


def wait_for(label: str) -> str:
    """Of a wait for the transfer ``label``."""
    return f"wait for the {label}"


def gradient_of(name: str) -> str:
    """Of this rank's rows of a gradient."""
    return f"gradient of {name}"


def update_of(names: Iterable[str]) -> str:
    """Of what an optimizer updates at once."""
    return f"update of {few(tuple(dict.fromkeys(names)))}"


def few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
