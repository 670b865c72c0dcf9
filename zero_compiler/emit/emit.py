"""From a scheduled graph to a Program and its compute segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from ..ir import facts, ops
from ..ir.facts import ParamRef
from ..ir.program import (
    Bring,
    Compute,
    Constant,
    Discard,
    Gather,
    Instr,
    Offload,
    Program,
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
from ..memory.alias_table import storages_of
from ..memory.live import live_bytes
from ..memory.segment_graph import SegmentGraph
from ..memory.verify import verify_program
from . import segmentation
from .prefetch_hops import Fetches
from .transfer_allocation import kept_ends, plan_slots


@dataclass
class Emitted:
    program: Program
    segments: list[SegmentGraph]  # one per Compute, in order; equal ones are merged by the compiler
    graph: fx.Graph
    numbers: dict[fx.Node, int]  # value of each node


def emit(
    gm: fx.GraphModule,
    params: Mapping[ParamRef, Any],
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
    numbers: dict[fx.Node, int] = {}

    def number(node: fx.Node) -> int:
        return numbers.setdefault(node, len(numbers))

    placeholders = list(graph.find_nodes(op="placeholder"))
    for node in placeholders:
        number(node)
    (output,) = graph.find_nodes(op="output")
    returned = output.args[0]
    returned = list(returned) if isinstance(returned, (list, tuple)) else [returned]

    steps = segmentation.steps(graph)
    instrs: list[Instr] = []
    gathers: list[dict[str, Any]] = []
    reduces: list[dict[str, Any]] = []
    index_of: dict[fx.Node, int] = {}
    offloads: list[dict[str, Any]] = []
    fetches = Fetches(steps, params, ahead)
    leaving: list[tuple[WaitReduce, set[fx.Node]]] = []  # results on their way to the host, and their readers
    segments: list[SegmentGraph] = []
    modules: list[str] = []
    roots = facts.alias_roots(graph)
    reads: list[list[fx.Node]] = []
    step_of = {n: i for i, s in enumerate(steps) if isinstance(s, list) for n in s}
    kept = set(output.all_input_nodes)
    symbols = segmentation.symbols_given(graph)
    notes = [f"%{n.name}: {line}" for n in graph.nodes for line in (facts.note(n) or "").splitlines()]

    def arrive(wanted: set[fx.Node] | None = None) -> None:
        """Wait for results on their way to the host; of those that are ``wanted``, or for all."""
        for waited, nodes in [pair for pair in leaving if wanted is None or not wanted.isdisjoint(pair[1])]:
            leaving.remove((waited, nodes))
            instrs.append(waited)
            reads.append([])

    for i, step in enumerate(steps):
        arrive({n for node in (step if isinstance(step, list) else [step]) for n in node.all_input_nodes})
        if isinstance(step, list):
            seg, ins, outs = segmentation.segment(gm, step, i, step_of, roots, kept, symbols)
            if not outs and not any(segmentation.impure(n) for n in step):
                continue
            segments.append(seg)
            modules.append(_modules(step))
            instrs.append(
                Compute(len(segments) - 1, tuple(number(n) for n in ins), tuple(number(n) for n in outs), ())
            )
            reads.append(ins)
        elif step.target is ops.gather:
            index = index_of[step] = len(gathers)
            for op in fetches.before(index, len(instrs)):
                instrs.append(op)
                reads.append([])
            gathers.append({"node": step, "start": len(instrs), "ready": len(instrs), "end": None})
            instrs.append(Gather(index))
            reads.append([])
            for op in fetches.after(index, len(instrs)):
                instrs.append(op)
                reads.append([])
        elif step.target is ops.reduce:
            index_of[step] = len(reduces)
            reduces.append({"node": step, "start": len(instrs), "end": len(instrs)})
            instrs.append(Reduce(index_of[step], tuple(number(g) for g in step.args[0]), ()))
            reads.append(list(step.args[0]))
        elif step.target is ops.wait:
            start = step.args[0]
            elements = {e.args[1]: e for e in step.users}
            outs_ = tuple(
                number(elements[k]) if k in elements else -1 for k in range(len(facts.params(start)))
            )
            if start.target is ops.gather:
                gathers[index_of[start]]["ready"] = len(instrs)
                instrs.append(WaitGather(index_of[start], outs_))
            elif params[facts.params(start)[0]].grad_path[:1] == ("host",):
                # The copy goes on while the next gradients are made; what it copies is held until then.
                reduces[index_of[start]]["end"] = len(instrs)
                instrs.append(Store(index_of[start]))
                reads.append([])
                arrive()
                leaving.append((WaitReduce(index_of[start], outs_), set(elements.values())))
                continue
            else:
                reduces[index_of[start]]["end"] = len(instrs)
                instrs.append(WaitReduce(index_of[start], outs_))
            reads.append([])
        elif step.target is ops.release:
            weights = list(step.args[0])
            start = weights[0].args[0].args[0]
            gathers[index_of[start]]["end"] = len(instrs)
            instrs.append(Release(index_of[start], tuple(number(w) for w in weights)))
            reads.append([])

        elif step.target in (ops.offload, ops.restore):
            index = index_of[step] = len(offloads)
            away, where = facts.away(step), step.args[2]
            value = facts.value(step.args[0] if step.target is ops.offload else _back(step))
            offloads.append({"away": away, "where": where, "value": value, "start": len(instrs)})
            source = (number(step.args[0]),)
            if step.target is ops.offload:
                instrs.append(Offload(index, source, (number(step),), ()))
            else:
                instrs.append(Restore(index, source))
            reads.append([step.args[0]])
        elif step.target in (ops.write, ops.bring):
            index = index_of[step] = index_of[step.args[0]]
            instrs.append(Write(index) if step.target is ops.write else Bring(index))
            reads.append([])
        elif step.target is ops.offloaded:
            index = index_of[step.args[0]]
            offloads[index]["end"] = len(instrs)
            instrs.append(WaitOffload(index))
            reads.append([])
        elif step.target is ops.restored:
            index = index_of[step] = index_of[step.args[0]]
            offloads[index]["end"] = len(instrs)  # staged: nothing reads its place in the pool from here on
            instrs.append(WaitRestore(index, (number(step),)))
            reads.append([])
        elif step.target is ops.discard:
            index = index_of[step.args[0]]
            if not offloads[index]["away"].staged:
                offloads[index]["end"] = len(instrs)
            instrs.append(Discard(index, (number(step.args[0]),)))
            reads.append([])

    arrive()
    outputs = [_output(n, numbers) for n in returned]
    instrs = _with_frees(instrs, reads, numbers, output)
    gather_descs, reduce_descs, offload_descs, sizes = plan_slots(
        gathers, reduces, params, kept_offsets, len(instrs), fetches, offloads
    )
    storages, lies_in = storages_of(graph, numbers, phase)
    program = Program(
        phase=phase,
        num_inputs=len(placeholders),
        num_values=len(numbers),
        instrs=instrs,
        outputs=outputs,
        gathers=gather_descs,
        reduces=reduce_descs,
        segments=[],
        modules=modules,
        transient_bytes=sizes["transient"],
        slots_bytes=sizes["slots"],
        slots_ranks=max((p.world for p in params.values()), default=1),
        own_bytes=sizes["own"],
        host_bytes=sizes["host"],
        device_bytes=sizes["device"],
        offloads=offload_descs,
        returned_bytes=facts.returned_bytes(graph),
        storages=storages,
        lies_in=lies_in,
        notes=notes,
    )
    if not trial:
        worlds = {ref.owner: plan.world for ref, plan in params.items()}
        verify_program(program, worlds, kept_bytes=kept_ends(kept_offsets))
    program.live, program.inside = live_bytes(program, graph, numbers, segments)
    return Emitted(program, segments, graph, numbers)


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
    instrs: list[Instr],
    reads: list[list[fx.Node]],
    numbers: Mapping[fx.Node, int],
    output: fx.Node,
) -> list[Instr]:
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
    out: list[Instr] = []
    for i, instr in enumerate(instrs):
        if isinstance(instr, (Compute, Reduce, Offload)):
            instr = replace(instr, free=tuple(free.get(i, ())))
        out.append(instr)
    return out
