"""Storages of a Program: how many bytes each has, and in which ones each value may lie. The verifier counts by it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from ..ir import facts


def storages_of(
    graph: fx.Graph,
    numbers: Mapping[fx.Node, int],
    phase: str,
    sizes: facts.Sizes | None = None,
    roots: Mapping[fx.Node, frozenset[fx.Node]] | None = None,
) -> tuple[list[int], list[tuple[int, ...]]]:
    """Bytes of each storage that forward saved for this Program or that its segments make; and for each value those in
    which it may lie.

    What the caller gives and keeps, and what lies in an arena, is in none of them.

    Args:
        numbers: value of each node.
        sizes: at which symbolic ones are counted; None: as the capture saw them.
        roots: of the graph, see :func:`facts.alias_roots`, where they are known.
    """
    roots = facts.alias_roots(graph) if roots is None else roots
    first, saved = facts.saved_storages(graph, sizes) if phase == "backward" else ({}, {})
    index: dict[fx.Node, int] = {}
    nbytes: list[int] = []
    lies_in: list[tuple[int, ...]] = [()] * len(numbers)
    for node, value in numbers.items():
        found: dict[int, None] = {}
        for root in sorted(first.get(r, r) for r in roots[node]):
            if root not in saved and not facts.is_compute(root):
                continue
            if root not in index:
                index[root] = len(nbytes)
                nbytes.append(saved[root] if root in saved else facts.bytes_of(facts.value(root), sizes))
            found[index[root]] = None
        lies_in[value] = tuple(found)
    return nbytes, lies_in
