"""What of a phase graphs of the device may record, and what of its inputs and outputs the caller has in hand."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from . import facts


@dataclass(frozen=True)
class RecordedPhase:
    """A phase whose segments are recorded into graphs of the device.

    Args:
        given: inputs that the caller may make anew for each call: the batch, buffers, gradients of outputs.
        returned: outputs that the caller may hold while the next call runs.
        direct: segments that are not recorded.
    """

    given: tuple[int, ...]
    returned: tuple[int, ...]
    direct: frozenset[int] = frozenset()


def written_inputs(graph: fx.Graph) -> frozenset[str]:
    """Names of the inputs to which a phase writes."""
    copies = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    return frozenset(str(n.args[0].target) for n in copies if n.args[0].op == "placeholder")


def recorded_phase(
    graph: fx.Graph,
    phase: str,
    shards: Collection[int],
    num_outputs: int,
    written: frozenset[str] = frozenset(),
) -> RecordedPhase:
    """What may be recorded of ``graph``, a phase as AOTAutograd has it.

    An input that the graph writes to, as a buffer of statistics, is none of ``given``: it is written where it lies,
    in backward too.

    Args:
        shards: inputs of the forward that are rows of parameters.
        num_outputs: of what forward returns, the first so many are the caller's.
        written: names of inputs to which backward writes, where the graph is that of its forward.
    """
    placeholders = list(graph.find_nodes(op="placeholder"))
    written |= written_inputs(graph)
    if phase == "backward":
        rows = {f"primals_{at + 1}" for at in shards}
        # What else it takes forward has made, at the same place in each call that is replayed.
        given = tuple(
            i
            for i, n in enumerate(placeholders)
            if str(n.target) not in written
            and (facts.is_tangent(n) or (str(n.target).startswith("primals") and str(n.target) not in rows))
        )
        return RecordedPhase(given, ())
    count = len(graph.output_node().args[0]) if phase == "inference" else num_outputs
    given = tuple(i for i, n in enumerate(placeholders) if i not in shards and str(n.target) not in written)
    return RecordedPhase(given, tuple(range(count)))


def given_bytes(graph: fx.Graph, recorded: RecordedPhase) -> int:
    """Bytes of the inputs of ``graph`` that a recording may copy."""
    placeholders = list(graph.find_nodes(op="placeholder"))
    return sum(facts.bytes_of(facts.value(placeholders[i])) for i in recorded.given)
