"""What a pass is, what it may read, and the manager that runs passes in order."""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import fx

from zero_compiler.cost.hardware import HardwareSpec
from zero_compiler.ir import dump, spec
from zero_compiler.ir.facts import ParamRef, Tile


@dataclass(frozen=True)
class ParamPlan:
    """What a pass may know of a managed parameter. Nothing in it depends on the rank."""

    ref: ParamRef
    shape: tuple[int, ...]
    dtype: torch.dtype
    gather_dtype: torch.dtype
    reduce_dtype: torch.dtype
    sharded: bool
    world: int
    stage: int
    kept: bool = False
    shared: bool = False  # between ranks that read each other's memory
    # Tiers from where the shard rests to the device, nearest last; () where it rests there.
    path: tuple[str, ...] = ()
    grad_path: tuple[str, ...] = ()  # those of the gradient, from the device to where it rests
    copies: int = 1  # ranks that hold the same rows; their gradients are summed too
    tile_rows: int = 0  # of a rank's chunk, that are gathered at a time; 0: the whole weight is
    wire: torch.dtype | None = None  # of 8 bits, that it travels in; None: as it is gathered
    second: int = 0  # ranks of a host that share a second shard of it for backward; 0: there is none
    sum_wire: torch.dtype | None = None  # of 8 bits, that sums of its gradient travel in between hosts
    sum_hosts: int = 1  # between how many hosts they do
    split: bool = False  # a part of what tensor-parallel ranks hold together: theirs are others

    @property
    def within_host(self) -> ParamPlan:
        """The same as backward gathers it from second shards: among the ranks of a host, which have a part each."""
        return replace(
            self, world=self.second, dtype=self.gather_dtype, path=(), wire=None, copies=1, second=0
        )

    @property
    def second_numel(self) -> int:
        """Elements of this rank's second shard, padded like a chunk. That of a weight in tiles has those of each tile
        one after the other."""
        row = self.numel // self.shape[0]
        if self.tile_rows:
            return self.world // self.second * self.chunk_rows * row
        return -(-self.shape[0] // self.second) * row

    @property
    def numel(self) -> int:
        n = 1
        for s in self.shape:
            n *= s
        return n

    @property
    def gather_bytes(self) -> int:
        return self.numel * self.gather_dtype.itemsize

    @property
    def reduce_bytes(self) -> int:
        return self.numel * self.reduce_dtype.itemsize

    @property
    def chunk_rows(self) -> int:
        """Rows of one padded chunk."""
        return -(-self.shape[0] // self.world)

    @property
    def tile_count(self) -> int:
        """In how many tiles a weight is gathered; 0: it is gathered whole."""
        return -(-self.chunk_rows // self.tile_rows) if self.tile_rows else 0

    def tile(self, index: int) -> Tile:
        """One tile of a weight that is never gathered whole: of equally many rows, but for the last one."""
        begin = index * self.tile_rows
        return Tile(begin, min(self.tile_rows, self.chunk_rows - begin), index, self.tile_count)

    @property
    def tiles(self) -> list[Tile]:
        """All of them."""
        return [self.tile(index) for index in range(self.tile_count)]

    @property
    def home(self) -> bool:
        """Read where it lies at rest: every rank's rows are in memory that all share, in the dtype of the gather."""
        same = self.gather_dtype == self.dtype
        return self.shared and self.sharded and same and not self.path and not self.tile_rows

    @property
    def released(self) -> bool:
        """Stage 3 releases a weight after its last use of a phase, unless a memory budget has room to keep it; the
        other stages keep every weight until the shards change. Tiles are released at every stage."""
        return bool(self.tile_rows) or (self.stage == 3 and not self.kept)


@dataclass(frozen=True)
class Context:
    """The facts of a graph that stand outside of it: equal passes, contexts and graphs give equal results.

    Args:
        params: plan of every managed parameter of the frame.
        phase: "joint", "forward", "backward" or "inference".
        units: unit of every parameter, in the canonical order of transfers: that of first use in the joint
            graph. Sizes of activations cannot change it.
        reads: in backward, the parameters that forward reads, in its order and once for each read. Nor can they change
            this.
        reduced: parameters whose gradient this phase reduces; None: those that its graph reduces at first.
        gathered: parameters that this phase gathers whatever its graph reads; None: what the graph reads.
        second: parameters that forward gathers, and backward too: of these forward leaves second shards, where they
            have any.
        machine: what the graph is to run on; None: nothing is known of it.
        fused: whether element-wise operators of a segment are fused there.
        forward_outputs: of a joint graph, how many of its outputs are forward's.
    """

    params: Mapping[ParamRef, ParamPlan]
    phase: str
    units: Mapping[ParamRef, str] = field(default_factory=dict)
    reads: Sequence[ParamRef] = ()
    gathered: frozenset[ParamRef] | None = None
    second: frozenset[ParamRef] = frozenset()
    reduced: frozenset[ParamRef] | None = None
    machine: HardwareSpec | None = None
    fused: bool = False
    forward_outputs: int = 0


@dataclass(frozen=True)
class NamedValues:
    """What forward hands to backward, by the names of nodes of the joint graph.

    Args:
        saved, again, away: handed over; made again; on another tier in the meantime.
        moved: of all three, those of which it is not known that they can be so.
    """

    saved: frozenset[str]
    again: frozenset[str]
    away: frozenset[str]
    moved: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PassOptions:
    """What is chosen of passes: `passes/__init__.py` gives each pass those that are its own, as fields.

    Args:
        bucket_bytes: transfers smaller than this share a bucket, in bytes of full tensors.
        tile_bytes: what is computed tile by tile is made in tiles of at most so many bytes; None: of so many that
            reading the weight again for each does not count on the machine.
        distances: by unit, how many waits of units before its own its gathers start ahead of; 1 where not named.
            Decided once for all ranks (see ``schedule.py``).
        kernels: operators may go to another library than the one that torch takes.
        recompute: backward may run forward's costly operators again. The same on every rank: backward then gathers
            more of the small weights.
        activation_bytes: most bytes that backward may hold at once of what forward made; None: no limit.
        tile_mlp: a budget asks for intermediates of MLPs to be made tile by tile. The same on every rank: backward then
            gathers biases too.
        mlp_bytes: then of at most so many bytes at a time; None: of as many as ``tile_bytes`` says.
        tile_heads: a budget asks for weights of heads that can be gathered in tiles. The same on every rank: backward
            then gathers them too.
        away: saved values may wait on another tier; those named cost no time there. None: they may not.
        tiers: those on their way there from the compute device: "host" (of an accelerator), "nvme", or both in turn.
        budgeted: memory counts more than the time that transfers of saved values take.
        named: what forward hands to backward, where that is given and not chosen.
        bytes_only: what is asked is the most bytes that live at once, and the order in which things happen does not
            depend on how long they take: of tiles that are alike not all are written out.
        some_tiles: nor of tiles of a weight: what these take is then told nearly, where no gather starts more than a
            unit ahead.
    """

    bucket_bytes: int = 1 << 20
    tile_bytes: int | None = None
    distances: Mapping[str, int] = field(default_factory=dict)
    kernels: bool = False
    recompute: bool = False
    activation_bytes: int | None = None
    tile_mlp: bool = False
    mlp_bytes: int | None = None
    tile_heads: bool = False
    away: frozenset[str] | None = None
    tiers: tuple[str, ...] = ("nvme",)
    budgeted: bool = False
    named: NamedValues | None = None
    bytes_only: bool = False
    some_tiles: bool = False


class Pass(Protocol):
    """A named, immutable rewrite of a graph in place."""

    @property
    def name(self) -> str: ...

    def run(self, graph: fx.Graph, ctx: Context) -> None: ...


class SplitPass(Protocol):
    """One that rewrites both graphs of a partition, and what forward hands to backward."""

    @property
    def name(self) -> str: ...

    def run(self, forward: fx.Graph, backward: fx.Graph, num_outputs: int, ctx: Context) -> None: ...


@dataclass
class Trace:
    """What the manager saw of each pass: seconds, in which lint and verifier are, and the node count after it."""

    rows: list[tuple[str, float, int]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(row[1] for row in self.rows)


def run_passes(
    graph: fx.Graph,
    passes: Sequence[tuple[Pass, str]],
    ctx: Context,
    trace: Trace | None = None,
    dump_dir: str | None = None,
    trial: bool = False,
) -> Trace:
    """Run ``passes`` in order; after each one verify at its level of lowering, time, count and dump; lint at the end.
    What a pass has left as it was is verified already, unless more is to be proved of it.

    Of a ``trial`` only bytes are asked, and what is chosen runs through the passes again: it is neither verified nor
    dumped.
    """
    trace = trace or Trace()
    dump_dir = None if trial else dump_dir
    if dump_dir:
        _write(dump_dir, 0, ctx.phase, "captured", graph)
    known = frozenset[ParamRef]() if trial else ctx.reduced
    reduced = spec.reduced_by(graph) if known is None else known
    proved: tuple[str, _Nodes] | None = None
    for i, (p, level) in enumerate(passes):
        start = time.perf_counter()
        p.run(graph, ctx)
        if not trial:
            nodes = _nodes(graph)
            if proved is None or level != proved[0] or _differ(nodes, proved[1]):
                spec.verify(graph, level, ctx.params, reduced)
                proved = level, nodes
            if i == len(passes) - 1:
                graph.lint()
        seconds = time.perf_counter() - start
        trace.rows.append((f"{ctx.phase}/{p.name}", seconds, len(graph.nodes)))
        if dump_dir:
            _write(dump_dir, i + 1, ctx.phase, p.name, graph)
    return trace


_Nodes = list[object]


def _nodes(graph: fx.Graph) -> _Nodes:
    """What a graph consists of: objects, which are others where a pass has changed anything."""
    return [part for n in graph.nodes for part in (n, n.target, n.args, n.kwargs)]


def _differ(some: _Nodes, others: _Nodes) -> bool:
    return len(some) != len(others) or not all(map(operator.is_, some, others))


def run_split(
    p: SplitPass,
    forward: fx.Graph,
    backward: fx.Graph,
    num_outputs: int,
    ctx: Context,
    trace: Trace | None = None,
    dump_dir: str | None = None,
) -> None:
    """The same for a pass over a partition, of which ``num_outputs`` results of forward are not handed to backward."""
    start = time.perf_counter()
    graphs = {"forward": forward, "backward": backward}
    reduced = {phase: spec.reduced_by(graph) for phase, graph in graphs.items()}
    p.run(forward, backward, num_outputs, ctx)
    for phase, graph in graphs.items():
        graph.lint()
        spec.verify(graph, "captured", ctx.params, reduced[phase])
    spec.verify_partition(forward, num_outputs, backward)
    if trace is not None:
        nodes = sum(len(graph.nodes) for graph in graphs.values())
        trace.rows.append((f"split/{p.name}", time.perf_counter() - start, nodes))
    for i, (phase, graph) in enumerate(graphs.items() if dump_dir else ()):
        _write(str(dump_dir), i, p.name, phase, graph)


def _write(directory: str, index: int, phase: str, name: str, graph: fx.Graph) -> None:
    path = os.path.join(directory, phase)
    os.makedirs(path, exist_ok=True)
    with open(os.path.join(path, f"{index:02d}-{name}.txt"), "w") as f:
        f.write(dump.text(graph))
