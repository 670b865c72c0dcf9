"""Units: parameters that are gathered and reduced together, as the layers of a transformer.

Not a rewrite: the analysis of the joint graph on which the later passes agree.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from zero_compiler.ir import ops
from zero_compiler.ir.facts import ParamRef

from .base import ParamPlan
from .tag_recompute import regathered


def unit_of(name: str) -> str:
    """Prefix of a qualified name through its first index (``h.3`` of ``h.3.mlp.weight``), else its module."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ".".join(parts[:-1])


def order_of_use(graph: fx.Graph) -> list[ParamRef]:
    """Parameters in the order of their first gather; last those that are only reduced.

    Nothing may be left that reads a weight (of no elements, say) whose gradient is still due.
    """
    out: dict[ParamRef, None] = {}
    for target in (ops.unshard, ops.reduce_grad):
        for node in graph.find_nodes(op="call_function", target=target):
            out.setdefault(ParamRef(node.args[3], node.args[4]))
    return list(out)


def assign_units(
    order: list[ParamRef], params: Mapping[ParamRef, ParamPlan], bucket_bytes: int
) -> dict[ParamRef, str]:
    """Unit of each parameter, in the canonical order; small units that are no repeated block join the next one."""
    groups: dict[tuple[str, str], list[ParamRef]] = {}
    for ref in order:
        # What is gathered in tiles shares no transfer.
        unit = ref.name if params[ref].tile_rows else unit_of(ref.name)
        groups.setdefault((ref.owner, unit), []).append(ref)
    out: dict[ParamRef, str] = {}
    carried: list[ParamRef] = []
    items = list(groups.items())
    for i, ((owner, unit), refs) in enumerate(items):
        members = carried + refs
        size = sum(params[r].gather_bytes for r in members)
        indexed = any(part.isdigit() for part in unit.split("."))
        following = items[i + 1][0] if i + 1 < len(items) else None
        # Joining a repeated block would make it differ from its siblings, and be compiled once more.
        joins = following is not None and not any(p.isdigit() for p in following[1].split("."))
        single = following is not None and any(params[r].tile_rows for r in (*members, *groups[following]))
        if (
            size < bucket_bytes
            and not indexed
            and not single
            and joins
            and following is not None
            and following[0] == owner
        ):
            carried = members
            continue
        carried = []
        for r in members:
            out[r] = f"{owner}:{unit}"
    return out


def gathered_in_backward(
    graph: fx.Graph, params: Mapping[ParamRef, ParamPlan], small_bytes: int, recompute: bool = False
) -> frozenset[ParamRef]:
    """Weights that backward gathers whatever its graph reads, off the tagged joint graph.

    A partitioner may recompute what a small weight was used for, or save it, by the sizes of activations;
    gathering it in any case keeps the sequence of collectives the same on ranks whose sizes differ.
    """
    markers = regathered(graph, small_bytes, recompute)
    refs = {ParamRef(m.args[3], m.args[4]) for m in markers}
    return frozenset(r for r in refs if params[r].sharded)
