"""From a scheduled graph to a Program and its compute segments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .arena import Slot, aligned, check, pack
from .errors import VerifyError
from .ir import facts, ops
from .ir.facts import ParamRef
from .program import (
    Compute,
    Fetch,
    Gather,
    GatherDesc,
    Instr,
    Program,
    Reduce,
    ReduceDesc,
    Release,
    WaitFetch,
    WaitGather,
    WaitReduce,
)
from .runtime.stores import blocks
from .verify import verify_program


@dataclass
class SegmentGraph:
    """A compute segment as a graph of its own, with the fake values of its inputs."""

    gm: fx.GraphModule
    inputs: list[Any]


@dataclass
class Emitted:
    program: Program
    segments: list[SegmentGraph]  # one per Compute, in order; equal ones are merged by the compiler


@dataclass
class _Builder:
    graph: fx.Graph
    root: fx.GraphModule
    numbers: dict[fx.Node, int] = field(default_factory=dict)

    def number(self, node: fx.Node) -> int:
        return self.numbers.setdefault(node, len(self.numbers))


def emit(
    gm: fx.GraphModule, params: Mapping[ParamRef, Any], phase: str, kept_offsets: Mapping[str, dict[str, int]]
) -> Emitted:
    """Program of a scheduled graph.

    Args:
        kept_offsets: for each owner, offsets of kept weights in its own arena, by name: shared by all Programs that
            use them; grown here.
    """
    graph = gm.graph
    b = _Builder(graph, gm)
    placeholders = list(graph.find_nodes(op="placeholder"))
    for node in placeholders:
        b.number(node)
    (output,) = graph.find_nodes(op="output")
    returned = output.args[0]
    returned = list(returned) if isinstance(returned, (list, tuple)) else [returned]

    steps = _steps(graph)
    instrs: list[Instr] = []
    gathers: list[dict[str, Any]] = []
    reduces: list[dict[str, Any]] = []
    index_of: dict[fx.Node, int] = {}
    fetches = _Fetches(steps, params)
    segments: list[SegmentGraph] = []
    modules: list[str] = []
    roots = facts.alias_roots(graph)
    reads: list[list[fx.Node]] = []
    step_of = {n: i for i, s in enumerate(steps) if isinstance(s, list) for n in s}
    notes = [f"%{n.name}: {facts.note(n)}" for n in graph.nodes if facts.note(n)]

    for i, step in enumerate(steps):
        if isinstance(step, list):
            seg, ins, outs = _segment(b, step, i, step_of, roots, set(output.all_input_nodes))
            if not outs and not any(_impure(n) for n in step):
                continue
            segments.append(seg)
            modules.append(_modules(step))
            instrs.append(
                Compute(
                    len(segments) - 1, tuple(b.number(n) for n in ins), tuple(b.number(n) for n in outs), ()
                )
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
            instrs.append(Reduce(index_of[step], tuple(b.number(g) for g in step.args[0]), ()))
            reads.append(list(step.args[0]))
        elif step.target is ops.wait:
            start = step.args[0]
            elements = {e.args[1]: e for e in step.users}
            outs_ = tuple(
                b.number(elements[k]) if k in elements else -1 for k in range(len(facts.params(start)))
            )
            if start.target is ops.gather:
                gathers[index_of[start]]["ready"] = len(instrs)
                instrs.append(WaitGather(index_of[start], outs_))
            else:
                reduces[index_of[start]]["end"] = len(instrs)
                instrs.append(WaitReduce(index_of[start], outs_))
            reads.append([])
        elif step.target is ops.release:
            weights = list(step.args[0])
            start = weights[0].args[0].args[0]
            gathers[index_of[start]]["end"] = len(instrs)
            instrs.append(Release(index_of[start], tuple(b.number(w) for w in weights)))
            reads.append([])

    instrs = _with_frees(instrs, reads, b, output, gathers)
    gather_descs, reduce_descs, sizes = _plan_arena(
        gathers, reduces, params, kept_offsets, len(instrs), fetches.starts
    )
    outputs = [b.number(n) if isinstance(n, fx.Node) else None for n in returned]
    program = Program(
        phase=phase,
        num_inputs=len(placeholders),
        num_values=len(b.numbers),
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
        notes=notes,
    )
    verify_program(program, {ref.owner: plan.world for ref, plan in params.items()})
    program.live = _live(program, b, segments, placeholders, output)
    return Emitted(program, segments)


class _Fetches:
    """Where reads of files go: those of a unit's chunks start as the gathers of the unit before it do, one layer ahead.

    The wait comes right before the gather. So the disk is at work as long as there is anything left to read, and
    chunks of two units at most lie in the pool.
    """

    def __init__(self, steps: list[Any], params: Mapping[ParamRef, Any]) -> None:
        nodes = [s for s in steps if not isinstance(s, list) and s.target is ops.gather]
        self._filed = [all(params[r].filed for r in facts.params(n)) for n in nodes]
        self._units: list[list[int]] = []
        for k, node in enumerate(nodes):
            if k and facts.unit(nodes[k - 1]) == facts.unit(node):
                self._units[-1].append(k)
            else:
                self._units.append([k])
        self.starts: dict[int, int] = {}  # instruction that starts the fetch of each gather

    def before(self, index: int, at: int) -> list[Instr]:
        """Instructions in front of gather ``index``, the first of them number ``at``."""
        first = self._start(self._units[0], at) if index == 0 else []
        return [*first, *([WaitFetch(index)] if self._filed[index] else [])]

    def after(self, index: int, at: int) -> list[Instr]:
        """Instructions behind it."""
        for unit, following in zip(self._units, self._units[1:], strict=False):
            if unit[-1] == index:
                return self._start(following, at)
        return []

    def _start(self, unit: list[int], at: int) -> list[Instr]:
        filed = [k for k in unit if self._filed[k]]
        self.starts.update((k, at + i) for i, k in enumerate(filed))
        return [Fetch(k) for k in filed]


def _steps(graph: fx.Graph) -> list[list[fx.Node] | fx.Node]:
    """Maximal runs of compute nodes, and the transfers between them, in order."""
    steps: list[list[fx.Node] | fx.Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or facts.is_element(node):
            continue
        if node.target in ops.BORDERS:
            steps.append(node)
        elif steps and isinstance(steps[-1], list):
            steps[-1].append(node)
        else:
            steps.append([node])
    return steps


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


def _impure(node: fx.Node) -> bool:
    return node.is_impure() or (
        isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    )


def _remade(node: fx.Node, roots: dict[fx.Node, frozenset[fx.Node]]) -> bool:
    """True for what a segment makes again rather than takes: views of weights, constants, symbolic arithmetic."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or facts.is_element(node):
        return False
    if isinstance(facts.value(node), torch.Tensor):
        return node not in roots[node] and all(facts.is_weight(r) for r in roots[node])
    # Arithmetic on sizes alone: as cheap as passing the result.
    return not any(isinstance(facts.value(i), torch.Tensor) for i in node.all_input_nodes) and isinstance(
        facts.value(node), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)
    )


def _segment(
    b: _Builder,
    nodes: list[fx.Node],
    index: int,
    step_of: dict[fx.Node, int],
    roots: dict[fx.Node, frozenset[fx.Node]],
    returned: set[fx.Node],
) -> tuple[SegmentGraph, list[fx.Node], list[fx.Node]]:
    inside = set(nodes)
    pulled: dict[fx.Node, None] = {}
    ins: dict[fx.Node, None] = {}

    def need(node: fx.Node) -> None:
        if node in inside or node in pulled or node in ins:
            return
        if _remade(node, roots):
            for i in node.all_input_nodes:
                need(i)
            pulled[node] = None
        else:
            ins[node] = None

    for node in nodes:
        for used in node.all_input_nodes:
            need(used)
    symbols: set[Any] = set()
    for node in (*nodes, *ins, *pulled):
        symbols |= facts.symbols_of(facts.value(node))
    if symbols:
        _bring_symbols(b.graph, symbols, ins)
    outs = [
        n
        for n in nodes
        if n.op != "get_attr"
        and (
            n in returned
            or any(
                u.op != "output"
                and step_of.get(u, -1) != index
                and (not _remade(n, roots) or not facts.is_compute(u))
                for u in n.users
            )
        )
    ]
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(ins):
        env[node] = graph.placeholder(f"in_{i}")
        _copy_meta(node, env[node])
    for node in (*pulled, *nodes):
        env[node] = graph.node_copy(node, lambda n: env[n])
    out_node = graph.output(tuple(env[n] for n in outs))
    out_node.meta["val"] = tuple(facts.value(n) for n in outs)
    gm = fx.GraphModule(b.root, graph)
    return SegmentGraph(gm, [facts.value(n) for n in ins]), list(ins), outs


def _copy_meta(src: fx.Node, dst: fx.Node) -> None:
    for key in ("val", "tensor_meta"):
        if key in src.meta:
            dst.meta[key] = src.meta[key]


def _bring_symbols(graph: fx.Graph, symbols: set[Any], ins: dict[fx.Node, None]) -> None:
    """Add the inputs of the graph that define symbolic sizes to those of a segment that uses them."""
    known: set[Any] = set()
    for node in ins:
        val = facts.value(node)
        if isinstance(val, torch.SymInt) and val.node.expr in symbols:
            known.add(val.node.expr)
    for node in graph.find_nodes(op="placeholder"):
        val = facts.value(node)
        if isinstance(val, torch.SymInt) and val.node.expr in symbols - known:
            ins[node] = None
            known.add(val.node.expr)


def _with_frees(
    instrs: list[Instr],
    reads: list[list[fx.Node]],
    b: _Builder,
    output: fx.Node,
    gathers: list[dict[str, Any]],
) -> list[Instr]:
    """Give each value's last reader the duty to drop it."""
    kept = {b.number(n) for n in output.all_input_nodes}
    last: dict[int, int] = {}
    for i, nodes in enumerate(reads):
        for node in nodes:
            last[b.number(node)] = i
    free: dict[int, list[int]] = {}
    for value, i in last.items():
        if value not in kept:
            free.setdefault(i, []).append(value)
    out: list[Instr] = []
    for i, instr in enumerate(instrs):
        if isinstance(instr, Compute):
            instr = Compute(instr.segment, instr.ins, instr.outs, tuple(free.get(i, ())))
        elif isinstance(instr, Reduce):
            instr = Reduce(instr.index, instr.ins, tuple(free.get(i, ())))
        out.append(instr)
    return out


def _plan_arena(
    gathers: list[dict[str, Any]],
    reduces: list[dict[str, Any]],
    params: Mapping[ParamRef, Any],
    kept_offsets: Mapping[str, dict[str, int]],
    end: int,
    fetch_starts: Mapping[int, int],
) -> tuple[list[GatherDesc], list[ReduceDesc], dict[str, int]]:
    slots: dict[str, list[Slot]] = {"transient": [], "slots": [], "own": [], "host": []}
    where: dict[str, list[tuple[str, int, int]]] = {pool: [] for pool in slots}
    gather_rows, reduce_rows = [], []

    def need(pool: str, key: tuple[str, int, int], slot: Slot) -> None:
        where[pool].append(key)
        slots[pool].append(slot)

    for k, g in enumerate(gathers):
        node = g["node"]
        plans = [params[r] for r in facts.params(node)]
        item = plans[0].gather_dtype.itemsize
        chunks = [_chunk(p) for p in plans]
        kept, shared = not plans[0].released, plans[0].shared
        home = all(p.home for p in plans)
        gather_rows.append((node, plans, chunks, kept, home))
        if k in fetch_starts:
            # One rank computes with what was read, where it lies.
            last = g["ready"] if plans[0].world > 1 or g["end"] is None else g["end"]
            for m, (p, chunk) in enumerate(zip(plans, chunks, strict=True)):
                size = blocks(chunk * p.dtype.itemsize)
                need("host", ("fetch", k, m), Slot(size, fetch_starts[k], last))
        if home:
            continue
        if kept:
            for p, chunk in zip(plans, chunks, strict=True):
                table = kept_offsets[p.ref.owner]
                if p.ref.name not in table:
                    table[p.ref.name] = table.get(_KEPT_END, 0)
                    table[_KEPT_END] = table[p.ref.name] + aligned(chunk * p.world * item)
        else:
            for m, (p, chunk) in enumerate(zip(plans, chunks, strict=True)):
                live = g["start"], g["end"] if g["end"] is not None else end
                need(
                    "slots" if shared else "transient", ("gather", k, m), Slot(chunk * p.world * item, *live)
                )
        several, cast = len(plans) > 1, plans[0].gather_dtype != plans[0].dtype
        if (several or cast) and not shared:
            total = sum(chunks) * item
            size = total * (plans[0].world + 1) if several else total
            need("transient", ("gather_staging", k, 0), Slot(size, g["start"], g["ready"]))
    for k, r in enumerate(reduces):
        node = r["node"]
        plans = [params[ref] for ref in facts.params(node)]
        chunks = [_chunk(p) for p in plans]
        item = plans[0].reduce_dtype.itemsize
        world = plans[0].world if plans[0].cut else 1
        live = r["start"], r["end"]
        if plans[0].shared:
            need("own", ("reduce", k, 0), Slot(sum(p.numel for p in plans) * item, *live))
        elif not _from_where_it_lies(node, plans):
            size = aligned(sum(chunks) * world * item) + (sum(chunks) * item if plans[0].cut else 0)
            need("transient", ("reduce", k, 0), Slot(size, *live))
        reduce_rows.append((node, plans, chunks))
    at: dict[tuple[str, int, int], int] = {}
    sizes: dict[str, int] = {}
    for pool, wanted in slots.items():
        offsets, sizes[pool] = pack(wanted)
        wrong = check(wanted, offsets, sizes[pool])
        if wrong:
            raise VerifyError(f"planned memory: {wrong}")
        at |= zip(where[pool], offsets, strict=True)
    gather_descs = [
        GatherDesc(
            owner=plans[0].ref.owner,
            names=tuple(p.ref.name for p in plans),
            shapes=tuple(p.shape for p in plans),
            chunk_numels=tuple(chunks),
            dtype=_dtype_text(plans[0].gather_dtype),
            kept=kept,
            offsets=tuple(
                -1 if home else kept_offsets[p.ref.owner][p.ref.name] if kept else at[("gather", k, m)]
                for m, p in enumerate(plans)
            ),
            staging=at.get(("gather_staging", k, 0), -1),
            unit=facts.unit(node).split(":", 1)[-1],
            home=home,
            shared=plans[0].shared,
            fetched=tuple(at[("fetch", k, m)] for m in range(len(plans))) if k in fetch_starts else (),
            rest_dtype=_dtype_text(plans[0].dtype),
        )
        for k, (node, plans, chunks, kept, home) in enumerate(gather_rows)
    ]
    reduce_descs = [
        ReduceDesc(
            owner=plans[0].ref.owner,
            names=tuple(p.ref.name for p in plans),
            shapes=tuple(p.shape for p in plans),
            chunk_numels=tuple(chunks),
            dtype=_dtype_text(plans[0].reduce_dtype),
            out_dtype=_dtype_text(plans[0].dtype),
            replicated=not plans[0].cut,
            staging=at.get(("reduce", k, 0), -1),
            unit=facts.unit(node).split(":", 1)[-1],
            shared=plans[0].shared,
            stored=all(p.grad_filed for p in plans),
        )
        for k, (node, plans, chunks) in enumerate(reduce_rows)
    ]
    return gather_descs, reduce_descs, sizes


# The end of a kept arena stands in its table of offsets under a name that no parameter has.
_KEPT_END = ""


def kept_bytes(kept_offsets: Mapping[str, dict[str, int]]) -> int:
    """Bytes of all kept arenas."""
    return sum(table.get(_KEPT_END, 0) for table in kept_offsets.values())


def _from_where_it_lies(node: fx.Node, plans: Sequence[Any]) -> bool:
    """True for a lone gradient that the engine reduces with no copy before or after: whole chunks of rows, one
    piece of memory, and the dtype of the arithmetic is that of the gradient and of the result."""
    plan, grad = plans[0], facts.value(node.args[0][0])
    return (
        len(plans) == 1
        and plan.cut
        and plan.shape[0] % plan.world == 0
        and plan.reduce_dtype == plan.dtype == grad.dtype
        and grad.is_contiguous()
    )


def _chunk(plan: Any) -> int:
    if not plan.cut:
        return int(plan.numel)
    rows = -(-plan.shape[0] // plan.world)
    return rows * (plan.numel // plan.shape[0])


def _dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _live(
    program: Program, b: _Builder, segments: list[SegmentGraph], placeholders: list[fx.Node], output: fx.Node
) -> list[int]:
    """Bytes live after each instruction, or inside it where that is more: the arena, values that the Program
    made, what forward saved for backward, and segments' internals.

    The batch, buffers and shards are the caller's. A segment counts as its unfused graph does: an upper bound for
    what a fusing compiler allocates.
    """
    node_of = {i: n for n, i in b.numbers.items()}
    roots = facts.alias_roots(b.graph)
    made: dict[fx.Node, int] = {}
    live, rows = 0, []
    holders: dict[fx.Node, set[int]] = {}
    in_flight: dict[int, tuple[int, ...]] = {}
    if program.phase == "backward":
        for node in placeholders:
            # AOTAutograd's names: what forward was given is the caller's, the rest forward made and nobody else holds.
            if not str(node.target).startswith("primals"):
                made[node] = facts.bytes_of(facts.value(node))
                holders[node] = {b.number(node)}
                live += made[node]
    for instr in program.instrs:
        inside = live
        if isinstance(instr, Compute):
            seg = segments[instr.segment].gm.graph
            ins = [node_of[i] for i in instr.ins]
            # Given up to the segment, and nobody else's: the segment frees them at their last use.
            dying = [
                all(r in made and holders[r] <= set(instr.free) for r in roots[n])
                if i in instr.free
                else False
                for i, n in zip(instr.ins, ins, strict=True)
            ]
            given = {r for n, gone in zip(ins, dying, strict=True) if gone for r in roots[n]}
            peak = _peak_inside(seg, dying)
            inside = live - sum(made[r] for r in given) + peak
            for o in instr.outs:
                for r in roots[node_of[o]]:
                    if r in made or r.op == "placeholder" or facts.is_weight(r):
                        continue
                    made[r] = facts.bytes_of(facts.value(r))
                    live += made[r]
                for r in roots[node_of[o]]:
                    holders.setdefault(r, set()).add(o)
        free = getattr(instr, "free", ())
        if isinstance(instr, Reduce) and _read_in_place(program.reduces[instr.index]):
            in_flight[instr.index], free = free, ()
        if isinstance(instr, WaitReduce):
            free = in_flight.pop(instr.index, ())
            # Padded chunks: a plan is the same on every rank, whichever rows it has.
            r = program.reduces[instr.index]
            item = getattr(torch, r.out_dtype).itemsize
            live += sum(c * item for o, c in zip(instr.outs, r.chunk_numels, strict=True) if o >= 0)
        rows.append(program.buffer_bytes + (inside if isinstance(instr, Compute) else live))
        for o in free:
            for r in roots[node_of[o]]:
                held = holders.get(r)
                if held is not None:
                    held.discard(o)
                    if not held and r in made:
                        live -= made.pop(r)
    return rows


def _read_in_place(r: ReduceDesc) -> bool:
    """Whether a gradient lives until its reduction ends: it may be reduced from where it lies."""
    if r.shared:
        return False
    return len(r.names) == 1 or all(
        c >= math.prod(shape) for c, shape in zip(r.chunk_numels, r.shapes, strict=True)
    )


def _peak_inside(graph: fx.Graph, dying: list[bool]) -> int:
    """Most bytes live at once in a segment: inputs that die in it, what it makes, and what it returns."""
    roots = facts.alias_roots(graph)
    size: dict[fx.Node, int] = {}
    last: dict[fx.Node, int] = {}
    order = list(graph.nodes)
    gone = iter(dying)
    for i, node in enumerate(order):
        if node.op == "placeholder":
            if next(gone):
                size[node] = facts.bytes_of(facts.value(node))
        elif facts.is_compute(node) and roots[node] == frozenset((node,)):
            size[node] = facts.bytes_of(facts.value(node))
        for used in (node, *node.all_input_nodes):
            for r in roots.get(used, ()):
                last[r] = i
    ends: dict[int, int] = {}
    for r, i in last.items():
        ends[i] = ends.get(i, 0) + size.get(r, 0)
    live = sum(n for node, n in size.items() if node.op == "placeholder")
    peak = live
    for i, node in enumerate(order):
        if node.op != "placeholder":
            live += size.get(node, 0)
        peak = max(peak, live)
        if node.op != "output":
            live -= ends.get(i, 0)
    return peak
