"""From a scheduled graph to a Program and its compute segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from ..ir import facts, ops
from ..ir.facts import ParamRef
from ..ir.instructions import (
    Bring,
    Compute,
    Discard,
    Gather,
    Instruction,
    KeepPart,
    Offload,
    Reduce,
    Release,
    Restore,
    Store,
    WaitGather,
    WaitOffload,
    WaitReduce,
    WaitRestore,
    Write,
)
from ..ir.program import Constant, Program
from ..memory.alias_table import storages_of
from ..memory.live import live_bytes
from ..memory.segment_graph import SegmentGraph
from ..memory.verify import verify_program
from ..passes.base import ParamPlan
from . import segmentation
from .prefetch_hops import Fetches
from .transfer_allocation import GatherSpan, OffloadSpan, ReduceSpan, allocate_transfers, kept_ends


@dataclass(frozen=True)
class Emitted:
    """A Program, and the graph that it was emitted from."""

    program: Program
    segments: list[SegmentGraph]  # one per Compute, in order; equal ones are merged by the compiler
    graph: fx.Graph
    numbers: dict[fx.Node, int]  # value of each node


# Long: every field of a Program is given here, by name.
def emit(
    gm: fx.GraphModule,
    params: Mapping[ParamRef, ParamPlan],
    phase: str,
    kept_offsets: Mapping[str, dict[str, int]],
    ahead: Sequence[Sequence[int]] = (),
    trial: bool = False,
) -> Emitted:
    """Program of a scheduled graph.

    Args:
        kept_offsets: for each owner, offsets of kept weights in its own arena, by name: shared by all Programs that
            use them; grown here.
        ahead: how far ahead chunks set out from other tiers (see `prefetch_hops.py`).
        trial: only bytes are asked: the Program is not verified.
    """
    graph = gm.graph
    emission = _Emission(gm, params, ahead)
    emission.run()
    (output,) = graph.find_nodes(op="output")
    returned = output.args[0]
    returned = list(returned) if isinstance(returned, (list, tuple)) else [returned]
    numbers, segments = emission.numbers, emission.segments
    outputs = [_output(n, numbers) for n in returned]
    instrs = _with_frees(emission.instrs, emission.reads, numbers, output)
    allocation = allocate_transfers(
        emission.gathers,
        emission.reduces,
        emission.offloads,
        params,
        kept_offsets,
        len(instrs),
        emission.fetches,
    )
    storages, lies_in = storages_of(graph, numbers, phase, roots=emission.roots)
    program = Program(
        phase=phase,
        num_inputs=emission.num_inputs,
        num_values=len(numbers),
        instrs=instrs,
        outputs=outputs,
        gathers=allocation.gathers,
        reduces=allocation.reduces,
        segments=[],
        modules=emission.modules,
        transient_bytes=allocation.pool_bytes["transient"],
        slots_bytes=allocation.pool_bytes["slots"],
        slots_ranks=max((p.world for p in params.values()), default=1),
        own_bytes=allocation.pool_bytes["own"],
        host_bytes=allocation.pool_bytes["host"],
        device_bytes=allocation.pool_bytes["device"],
        offloads=allocation.offloads,
        returned_bytes=facts.returned_bytes(graph),
        storages=storages,
        lies_in=lies_in,
        notes=[f"%{n.name}: {line}" for n in graph.nodes for line in (facts.note(n) or "").splitlines()],
    )
    if not trial:
        worlds = {ref.owner: plan.world for ref, plan in params.items()}
        verify_program(program, worlds, kept_bytes=kept_ends(kept_offsets))
    live, inside = live_bytes(program, graph, numbers, segments, roots=emission.roots)
    return Emitted(replace(program, live=live, inside=inside), segments, graph, numbers)


class _Emission:
    """Turns the steps of a scheduled graph into instructions, one after the other.

    ``reads`` are the nodes that each instruction reads. ``gathers``, ``reduces`` and ``offloads`` are the transfers
    with the instructions between which they need a place.
    """

    def __init__(
        self, gm: fx.GraphModule, params: Mapping[ParamRef, ParamPlan], ahead: Sequence[Sequence[int]]
    ) -> None:
        self._gm, self._params = gm, params
        graph = gm.graph
        self.numbers: dict[fx.Node, int] = {}
        placeholders = list(graph.find_nodes(op="placeholder"))
        for node in placeholders:
            self.number(node)
        self.num_inputs = len(placeholders)
        self._steps = segmentation.steps(graph)
        self.fetches = Fetches(self._steps, params, ahead)
        self.instrs: list[Instruction] = []
        self.reads: list[Sequence[fx.Node]] = []
        self.gathers: list[GatherSpan] = []
        self.reduces: list[ReduceSpan] = []
        self.offloads: list[OffloadSpan] = []
        self.segments: list[SegmentGraph] = []
        self.modules: list[str] = []
        self._index_of: dict[fx.Node, int] = {}
        # Results on their way to the host, and their readers.
        self._leaving: list[tuple[WaitReduce, set[fx.Node]]] = []
        (output,) = graph.find_nodes(op="output")
        self._returned = set(output.all_input_nodes)
        self.roots = facts.alias_roots(graph)
        self._step_of = {n: i for i, s in enumerate(self._steps) if isinstance(s, list) for n in s}
        self._symbols = segmentation.symbols_given(graph)

    def number(self, node: fx.Node) -> int:
        """The value of a node."""
        return self.numbers.setdefault(node, len(self.numbers))

    def run(self) -> None:
        """Emit all steps."""
        for i, step in enumerate(self._steps):
            nodes = step if isinstance(step, list) else [step]
            if self._leaving:
                self._arrive({n for node in nodes for n in node.all_input_nodes})
            if isinstance(step, list):
                self._compute(i, step)
            else:
                _EMITTERS[step.target](self, step)
        self._arrive()

    def _add(self, instr: Instruction, reads: Sequence[fx.Node] = ()) -> None:
        self.instrs.append(instr)
        self.reads.append(reads)

    @property
    def _now(self) -> int:
        """The number of the instruction that comes next."""
        return len(self.instrs)

    def _arrive(self, wanted: set[fx.Node] | None = None) -> None:
        """Wait for results on their way to the host; of those that are ``wanted``, or for all."""
        for waited, nodes in [p for p in self._leaving if wanted is None or not wanted.isdisjoint(p[1])]:
            self._leaving.remove((waited, nodes))
            self._add(waited)

    def _compute(self, i: int, step: list[fx.Node]) -> None:
        seg = segmentation.segment(
            self._gm, step, i, self._step_of, self.roots, self._returned, self._symbols
        )
        if not seg.outs and not any(segmentation.impure(n) for n in step):
            return
        self.segments.append(seg)
        self.modules.append(_modules(step))
        values = tuple(map(self.number, seg.ins)), tuple(map(self.number, seg.outs))
        self._add(Compute(len(self.segments) - 1, *values, ()), seg.ins)

    def _gather(self, step: fx.Node) -> None:
        index = self._index_of[step] = len(self.gathers)
        for op in self.fetches.before(index, self._now):
            self._add(op)
        self.gathers.append(GatherSpan(step, self._now, self._now))
        self._add(Gather(index))
        for op in self.fetches.after(index, self._now):
            self._add(op)

    def _reduce(self, step: fx.Node) -> None:
        index = self._index_of[step] = len(self.reduces)
        self.reduces.append(ReduceSpan(step, self._now, self._now))
        grads: Any = step.args[0]
        self._add(Reduce(index, tuple(map(self.number, grads)), ()), list(grads))

    def _wait(self, step: fx.Node) -> None:
        start: Any = step.args[0]
        index, refs = self._index_of[start], facts.params(start)
        elements = {e.args[1]: e for e in step.users}
        outs = tuple(self.number(elements[k]) if k in elements else -1 for k in range(len(refs)))
        if start.target is ops.gather:
            self.gathers[index].ready = self._now
            self._add(WaitGather(index, outs))
            return
        self.reduces[index].end = self._now
        if self._params[refs[0]].grad_path[:1] != ("host",):
            self._add(WaitReduce(index, outs))
            return
        # The copy goes on while the next gradients are made; what it copies is held until then.
        self._add(Store(index))
        self._arrive()
        self._leaving.append((WaitReduce(index, outs), set(elements.values())))

    def _release(self, step: fx.Node) -> None:
        weights: Any = step.args[0]
        index = self._index_of[weights[0].args[0].args[0]]
        self.gathers[index].end = self._now
        self._add(Release(index, tuple(map(self.number, weights))))

    def _keep_part(self, step: fx.Node) -> None:
        weights: Any = step.args[0]
        start = weights[0].args[0].args[0]
        index, refs = self._index_of[start], facts.params(start)
        self.gathers[index].parted = frozenset(refs[w.args[1]] for w in weights)
        self._add(KeepPart(index))

    def _offload_or_restore(self, step: fx.Node) -> None:
        index = self._index_of[step] = len(self.offloads)
        source: object = step.args[0]
        where: Any = step.args[2]
        value = facts.value(source if step.target is ops.offload else _back(step))
        self.offloads.append(OffloadSpan(facts.away(step), where, value, self._now))
        ins = (self.number(source),)
        if step.target is ops.offload:
            self._add(Offload(index, ins, (self.number(step),), ()), [source])
        else:
            self._add(Restore(index, ins), [source])

    def _write_or_bring(self, step: fx.Node) -> None:
        index = self._index_of[step] = self._index_of_source(step)
        self._add(Write(index) if step.target is ops.write else Bring(index))

    def _offloaded(self, step: fx.Node) -> None:
        index = self._index_of_source(step)
        self.offloads[index].end = self._now
        self._add(WaitOffload(index))

    def _restored(self, step: fx.Node) -> None:
        index = self._index_of[step] = self._index_of_source(step)
        self.offloads[index].end = self._now  # staged: nothing reads its place in the pool from here on
        self._add(WaitRestore(index, (self.number(step),)))

    def _discard(self, step: fx.Node) -> None:
        index = self._index_of_source(step)
        if not self.offloads[index].away.staged:
            self.offloads[index].end = self._now
        source: object = step.args[0]
        self._add(Discard(index, (self.number(source),)))

    def _cut(self, step: fx.Node) -> None:
        """A border between two segments is no instruction."""

    def _index_of_source(self, step: fx.Node) -> int:
        source: object = step.args[0]
        return self._index_of[source]


_EMITTERS: dict[Any, Callable[[_Emission, fx.Node], None]] = {
    ops.gather: _Emission._gather,
    ops.reduce: _Emission._reduce,
    ops.wait: _Emission._wait,
    ops.release: _Emission._release,
    ops.keep_part: _Emission._keep_part,
    ops.cut: _Emission._cut,
    ops.offload: _Emission._offload_or_restore,
    ops.restore: _Emission._offload_or_restore,
    ops.write: _Emission._write_or_bring,
    ops.bring: _Emission._write_or_bring,
    ops.offloaded: _Emission._offloaded,
    ops.restored: _Emission._restored,
    ops.discard: _Emission._discard,
}


def _output(returned: Any, numbers: Mapping[fx.Node, int]) -> int | Constant | None:
    """What a graph returns, as an output of its Program."""
    if isinstance(returned, fx.Node):
        return numbers[returned]
    return None if returned is None else Constant(returned)


def _back(restore: fx.Node) -> fx.Node:
    """What a ``zero.restore`` brings back, once it is there."""
    (user,) = restore.users
    return _back(user) if user.target is ops.bring else user


def _modules(nodes: list[fx.Node]) -> str:
    """The modules that a segment computes, in order: repeated blocks by their index, others by name."""
    found: dict[str, None] = {}
    for node in nodes:
        parts = facts.module_path(node).split(".")
        index = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
        found.setdefault(".".join(parts[: index + 1]))
    found.pop("", None)
    names = list(found)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _with_frees(
    instrs: list[Instruction],
    reads: list[Sequence[fx.Node]],
    numbers: Mapping[fx.Node, int],
    output: fx.Node,
) -> list[Instruction]:
    """Give each value's last reader the duty to drop it.

    Outputs are the caller's. Gradients that backward is given are autograd's, which holds them until backward ends.
    """
    kept = {numbers[n] for n in output.all_input_nodes}
    kept |= {i for n, i in numbers.items() if facts.is_tangent(n)}
    last: dict[int, int] = {}
    for i, nodes in enumerate(reads):
        for node in nodes:
            last[numbers[node]] = i
    free: dict[int, list[int]] = {}
    for value, i in last.items():
        if value not in kept:
            free.setdefault(i, []).append(value)
    out: list[Instruction] = []
    for i, instr in enumerate(instrs):
        out.append(replace(instr, free=tuple(free[i])) if i in free and hasattr(instr, "free") else instr)
    return out
