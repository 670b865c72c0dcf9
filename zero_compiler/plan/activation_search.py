"""Forward and backward that fit a budget: the joint graph is partitioned again, with less saved, until they do."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import fx

from ..errors import MemoryBudgetError

Phases = Mapping[str, fx.GraphModule]  # the graphs of forward and backward, with markers
# Phases whose activations take at most so many bytes, as the joint graph tells.
Partition = Callable[[int | None], Phases]
# Most bytes that backward holds at once of what forward made, or of what it makes again.
Held = Callable[[Phases], int]
_CUTS = 4  # how often the joint graph is partitioned again at most
_STEPS = 32  # of a budget, what is tried at least: choices are a tensor of every layer apart


def within_activations(partition: Partition, graphs: Phases, budget_bytes: int, held_bytes: Held) -> Phases:
    """Phases whose backward holds at most ``budget_bytes`` of activations.

    The joint graph tells the order of backward only nearly: what a partition holds is read off its backward.

    Raises:
        MemoryBudgetError: there are none; with the smallest budget that would do.
    """
    room = budget_bytes
    over = held_bytes(graphs) - budget_bytes
    for _ in range(_CUTS):
        if over <= 0:
            return graphs
        try:
            graphs = partition(room)
        except MemoryBudgetError as refused:
            if refused.least_bytes is None:
                raise
            break
        over = held_bytes(graphs) - budget_bytes
        room = max(0, room - max(over, budget_bytes // _STEPS))
    if over > 0:
        graphs = _smallest(partition)
    check_held(held_bytes(graphs), budget_bytes)
    return graphs


def check_held(held: int, budget_bytes: int) -> None:
    """What backward holds of activations must fit.

    Raises:
        MemoryBudgetError: it does not; with the smallest budget that would do.
    """
    if held <= budget_bytes:
        return
    error = MemoryBudgetError(
        f"activation_budget_bytes={budget_bytes:,} is {held - budget_bytes:,} bytes too small: backward must hold "
        f"{held:,} bytes of activations at least; give {held:,}, or a smaller batch"
    )
    error.least_bytes = held
    raise error


def within_memory(
    partition: Partition, graphs: Phases, over: Callable[[Phases], int], held_bytes: Held
) -> Phases:
    """Phases that take no byte ``over`` a budget for everything, or those of the fewest activations.

    Args:
        over: by how many bytes a plan of phases passes the budget; makes their tiles as small as that takes.
    """
    room, excess = held_bytes(graphs), over(graphs)
    for _ in range(_CUTS):
        if excess <= 0 or room == 0:
            break
        room = max(0, room - max(excess, room // _STEPS))
        try:
            graphs = partition(room)
        except MemoryBudgetError as refused:
            if refused.least_bytes is None:
                raise
            graphs, room = partition(refused.least_bytes), 0
        excess = over(graphs)
    if excess > 0 and room > 0:
        graphs = _smallest(partition)
        over(graphs)
    return graphs


def _smallest(partition: Partition) -> Phases:
    """Phases with the fewest activations that were found."""
    try:
        return partition(0)
    except MemoryBudgetError as refused:
        if refused.least_bytes is None:
            raise
        return partition(refused.least_bytes)
