"""Bytes live after each instruction of a Program."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import fx

from .cut import SegmentGraph
from .ir import facts
from .program import Compute, Program, Reduce, ReduceDesc, WaitReduce


def live_bytes(
    program: Program, graph: fx.Graph, numbers: Mapping[fx.Node, int], segments: list[SegmentGraph]
) -> list[int]:
    """Bytes live after each instruction, or inside it where that is more: the arena, values that the Program
    made, what forward saved for backward, and segments' internals.

    The batch, buffers and shards are the caller's. A segment counts as its unfused graph does: an upper bound for
    what a fusing compiler allocates.
    """
    node_of = {i: n for n, i in numbers.items()}
    roots = facts.alias_roots(graph)
    made: dict[fx.Node, int] = {}
    live, rows = 0, []
    holders: dict[fx.Node, set[int]] = {}
    in_flight: dict[int, tuple[int, ...]] = {}
    summing = 0  # sums that wait for the ranks with the same rows, beside the gradients that they become
    if program.phase == "backward":
        for node in graph.find_nodes(op="placeholder"):
            # AOTAutograd's names: what forward was given is the caller's, the rest forward made and nobody else holds.
            if not str(node.target).startswith("primals"):
                made[node] = facts.bytes_of(facts.value(node))
                holders[node] = {numbers[node]}
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
            # Padded chunks: a plan is the same on every rank, whichever rows it has. Tiles fill one after the other.
            r = program.reduces[instr.index]
            item = getattr(torch, r.out_dtype).itemsize
            live += sum(c * item for o, c in zip(instr.outs, r.chunk_numels, strict=True) if o >= 0 or r.tile)
            if r.copies > 1 and r.dtype != r.out_dtype:
                live -= summing
                summing = sum(r.chunk_numels) * getattr(torch, r.dtype).itemsize
                live += summing
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
