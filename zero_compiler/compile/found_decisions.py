"""What was decided of a frame, as a plan file has it, and what that frame is known by in every process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..ir import dump, facts, ops
from ..ir.content_digest import digest_of
from ..ir.decisions import PHASES, FrameDecisions, SavedValues
from ..ir.program import Program
from ..report.frame import Frame
from .plan_choice import PlanChoice


@dataclass(frozen=True)
class FrameIdentity:
    """Which frame of a model one is, and which graph it was captured as; see `FrameDecisions`."""

    function: str
    reads: str
    kind: str
    inputs: tuple[str, ...]
    graph: str


@dataclass(frozen=True)
class Partitioned:
    """How a frame was cut into phases: ``values``, and by phase in how many tiles each computation is done."""

    values: SavedValues
    tiles: Mapping[str, Mapping[str, int]]


def identity_of(code: str, weights: Sequence[str], kind: str, graph: fx.Graph) -> FrameIdentity:
    """What a frame is known by.

    Args:
        code: as in `Captured`.
        weights: that it reads, by the names that a plan has for them.
        graph: as it was captured.
    """
    words = code.rsplit(" ", 3)  # its place, its name, and two sums
    return FrameIdentity(
        words[1] if len(words) == 4 else "",
        f"{len(weights)} weights ({digest_of(sorted(weights))[:8]})",
        kind,
        inputs_of(graph),
        digest_of(dump.outline(graph)),
    )


def inputs_of(graph: fx.Graph) -> tuple[str, ...]:
    """Types of what a graph is given beside weights and gradients."""
    shards = {n.args[0] for n in graph.find_nodes(op="call_function", target=ops.unshard)}
    given = [n for n in graph.find_nodes(op="placeholder") if n not in shards and not facts.is_tangent(n)]
    return tuple(dump.without_addresses(dump.type_text(facts.value(n))) for n in given)


def found_decisions(
    identity: FrameIdentity,
    choice: PlanChoice,
    partitioned: Partitioned,
    frame: Frame,
    unit_name: Callable[[str], str],
    reduces_each: bool,
) -> FrameDecisions:
    """What was decided of a frame whose phases are compiled.

    Args:
        frame: with their Programs.
        unit_name: a unit as a plan has it.
        reduces_each: gradients of micro-batches do not wait for each other.
    """
    distances = {}
    for phase in PHASES[identity.kind]:
        ahead = choice.prefetch[phase].distances
        units = gathered_units(frame.programs[phase], choice)
        distances[phase] = {unit_name(unit): ahead.get(unit, 1) for unit in units}
    return FrameDecisions(
        identity.function,
        identity.reads,
        identity.kind,
        identity.inputs,
        identity.graph,
        choice.bucket_bytes,
        frame.bucket_why,
        choice.recompute,
        choice.tile_mlp,
        choice.mlp_bytes,
        choice.tile_heads,
        distances,
        partitioned.tiles,
        partitioned.values,
        reduces_each,
        frame.plans_tried,
    )


def gathered_units(program: Program, choice: PlanChoice) -> list[str]:
    """Units of whole weights that a Program gathers, in order. Tiles of a weight start one ahead of each other."""
    known = set(choice.units.values())
    units = dict.fromkeys(f"{g.owner}:{g.unit}" for g in program.gathers)
    return [unit for unit in units if unit in known]


def tiled(graph: fx.Graph) -> dict[str, fx.Node]:
    """What a graph does in tiles, in order, by a name that says what it is."""
    nodes = graph.find_nodes(op="call_function", target=ops.tiled)
    return {f"{n.name}: {facts.tiling(n).what}": n for n in nodes}


def tile_counts(graphs: Mapping[str, fx.GraphModule]) -> dict[str, dict[str, int]]:
    """By phase, in how many tiles each computation is done."""
    return {
        phase: {name: facts.tiling(n).tiles for name, n in tiled(gm.graph).items()}
        for phase, gm in graphs.items()
    }


def partitioned(
    graphs: Mapping[str, fx.GraphModule],
    values: SavedValues | None = None,
    limit_bytes: int | None = None,
    hidden: frozenset[str] | None = None,
) -> Partitioned:
    """How a frame was cut.

    Args:
        values: what forward hands to backward; None: there is no backward.
        limit_bytes: within which these were chosen.
        hidden: what was known then to cost nothing on another tier; None: nothing may wait there.
    """
    values = SavedValues(found=SavedValues().digest) if values is None else values
    names = None if hidden is None else tuple(sorted(hidden)) if limit_bytes is not None else ()
    return Partitioned(replace(values, limit_bytes=limit_bytes, hidden=names), tile_counts(graphs))


def named_values(
    graphs: Mapping[str, fx.GraphModule], remade: Sequence[Any], away: Sequence[Any]
) -> SavedValues:
    """What forward hands to backward in a partition of which nothing is in parts.

    Args:
        remade, away: what backward makes again, and what waits on another tier, as the report has them.
    """
    forward = {n.name: n for n in graphs["forward"].graph.nodes if n.op == "call_function"}
    entries = (forward.get(str(n.target)) for n in graphs["backward"].graph.find_nodes(op="placeholder"))
    values = SavedValues(
        saved={n.name: _described(n) for n in entries if n is not None and _is_tensor(n)},
        made_again={r.name: _words(r.op, r.module) for r in remade},
        away={a.name: _words(a.op, a.module) for a in away},
    )
    return replace(values, found=values.digest)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(facts.value(node), torch.Tensor) and node.target is not ops.offload


def _described(node: fx.Node) -> str:
    return f"{dump.type_text(facts.value(node))}, {_words(dump.target_text(node), facts.module_path(node))}"


def _words(op: str, module: str) -> str:
    return f"{op} of {module}" if module else op
