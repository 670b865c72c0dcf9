"""Units: parameters that are gathered and reduced together, as the layers of a transformer; small ones share a unit.

Not a rewrite: the analysis of the joint graph on which the later passes agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from zero_compiler.ir import facts, ops
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


def forward_reads(graph: fx.Graph) -> tuple[ParamRef, ...]:
    """Parameters as forward reads them, once for each read, off a joint graph as it was captured: passes merge reads.

    The order is that of the model's code, whatever operators a reader becomes at the sizes of a batch.
    """
    out: list[ParamRef] = []
    for node in graph.nodes:
        if any(facts.is_tangent(given) for given in node.all_input_nodes):
            break  # here backward begins
        if node.target is ops.unshard and node.users:
            out.append(ParamRef(node.args[3], node.args[4]))
    return tuple(out)


# That share a unit. The host takes some 60 us for a unit in each phase (`benchmarks/host_overhead.py` on an EPYC): so
# many have little of it each, and deep models still have several units that are alike and are compiled once.
MOST_BLOCKS = 8

_Group = tuple[tuple[str, str], list[ParamRef]]  # owner and name of a unit, and its parameters


def assign_units(
    order: list[ParamRef], params: Mapping[ParamRef, ParamPlan], bucket_bytes: int, join_bytes: int = 0
) -> dict[ParamRef, str]:
    """Unit of each parameter, in the canonical order; small units that are no repeated block join the next one.

    Args:
        join_bytes: repeated blocks that follow each other share a unit of less than so many bytes: each unit ends a
            compiled segment, and where blocks are small the host is what a step waits for.
    """
    groups: dict[tuple[str, str], list[ParamRef]] = {}
    for ref in order:
        # What is gathered in tiles shares no transfer.
        unit = ref.name if params[ref].tile_rows else unit_of(ref.name)
        groups.setdefault((ref.owner, unit), []).append(ref)
    items = _joined_blocks(list(groups.items()), params, join_bytes)
    out: dict[ParamRef, str] = {}
    carried: list[ParamRef] = []
    for i, ((owner, unit), refs) in enumerate(items):
        members = carried + refs
        following = items[i + 1][0] if i + 1 < len(items) else None
        # Joining a repeated block would make it differ from its siblings, and be compiled once more.
        joins = following is not None and not (_repeats(unit) or _repeats(following[1]))
        single = following is not None and any(params[r].tile_rows for r in (*members, *items[i + 1][1]))
        small = _gather_bytes(members, params) < bucket_bytes
        if small and not single and joins and following is not None and following[0] == owner:
            carried = members
            continue
        carried = []
        for r in members:
            out[r] = f"{owner}:{unit}"
    return out


def _joined_blocks(
    items: list[_Group], params: Mapping[ParamRef, ParamPlan], join_bytes: int
) -> list[_Group]:
    """Blocks of one list that follow each other in groups, named by the first and the last of each: ``h.0-7``."""
    out: list[list[_Group]] = []
    for item in items:
        run = out[-1] if out else []
        members = [r for _, refs in (*run, item) for r in refs]
        if (
            run
            and len(run) < MOST_BLOCKS
            and _are_siblings(run[-1][0], item[0])
            and not any(params[r].tile_rows for r in members)
            and _gather_bytes(members, params) < join_bytes
        ):
            run.append(item)
        else:
            out.append([item])
    return [_as_one(run) for run in out]


def _as_one(run: list[_Group]) -> _Group:
    owner, first = run[0][0]
    if len(run) == 1:
        return run[0]
    return (owner, f"{first}-{_index_of(run[-1][0][1])}"), [r for _, refs in run for r in refs]


def _are_siblings(a: tuple[str, str], b: tuple[str, str]) -> bool:
    """Whether two units are blocks of one list (``h.3`` and ``h.4``)."""
    indexed = _index_of(a[1]) is not None and _index_of(b[1]) is not None
    return indexed and (a[0], a[1].rpartition(".")[0]) == (b[0], b[1].rpartition(".")[0])


def _index_of(unit: str) -> int | None:
    """The index of a repeated block in its list; None of a unit that is none."""
    last = unit.rpartition(".")[2]
    return int(last) if last.isdigit() else None


def _repeats(unit: str) -> bool:
    """Whether a unit is a repeated block, several of them, or a part of one."""
    return any(part[:1].isdigit() for part in unit.split("."))


def _gather_bytes(refs: Iterable[ParamRef], params: Mapping[ParamRef, ParamPlan]) -> int:
    return sum(params[r].gather_bytes for r in refs)


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
