"""Finds repeated runs in a list of nodes, as the equal layers of a model make them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

_SHORTEST = 8  # nodes: a shorter period is no layer
_ENDS = 1  # copies at each end of a run that are looked at for themselves
_LEAST = 2 * _ENDS + 2  # copies from which on some are left out
_TRIED = 4  # periods tried for one run


@dataclass(frozen=True)
class Run:
    """``copies`` times the same ``length`` nodes, from place ``first`` on."""

    first: int
    length: int
    copies: int

    @property
    def left_out(self) -> range:
        """Places of the copies that the one before them stands for."""
        begin = self.first + (_ENDS + 1) * self.length
        return range(begin, self.first + (self.copies - _ENDS) * self.length)


def stand_ins(nodes: Sequence[fx.Node], kinds: Mapping[fx.Node, Hashable]) -> dict[fx.Node, fx.Node]:
    """For each node of a repeated part, but for those near its ends, the one that stands for all of its kind.

    Two nodes are alike where ``kinds`` says the same of both, and each input of one is that of the other, or lies as
    many nodes back, or comes from outside of the graph. Takes time linear in ``nodes``.
    """
    out = {}
    place = {n: i for i, n in enumerate(nodes)}
    for run in _runs(nodes, kinds, place, 0, len(nodes)):
        middle = run.first + _ENDS * run.length
        for i in run.left_out:
            out[nodes[i]] = nodes[middle + (i - middle) % run.length]
    return out


def _runs(
    nodes: Sequence[fx.Node],
    kinds: Mapping[fx.Node, Hashable],
    place: Mapping[fx.Node, int],
    begin: int,
    end: int,
) -> Iterator[Run]:
    """The run that spares most between two places, and those before and after it."""
    todo = [(begin, end)]
    while todo:
        begin, end = todo.pop()
        found = [
            _longest(nodes, kinds, place, begin, end, length) for length in _periods(nodes, kinds, begin, end)
        ]
        best = max(found, key=lambda r: len(r.left_out), default=None)
        if best is None or not best.left_out:
            continue
        yield best
        todo += [(begin, best.first), (best.first + best.length * best.copies, end)]


def _periods(nodes: Sequence[fx.Node], kinds: Mapping[fx.Node, Hashable], begin: int, end: int) -> list[int]:
    """The commonest distances of a node to the next one of its kind."""
    last: dict[Hashable, int] = {}
    seen: Counter[int] = Counter()
    for i in range(begin, end):
        kind = kinds[nodes[i]]
        if kind in last:
            seen[i - last[kind]] += 1
        last[kind] = i
    lengths = [(count, -length) for length, count in seen.items() if length >= _SHORTEST]
    return [-length for _, length in sorted(lengths, reverse=True)[:_TRIED]]


def _longest(
    nodes: Sequence[fx.Node],
    kinds: Mapping[fx.Node, Hashable],
    place: Mapping[fx.Node, int],
    begin: int,
    end: int,
    length: int,
) -> Run:
    """The longest part that repeats itself after ``length`` nodes."""
    best, first = Run(begin, length, 1), begin
    for i in range(begin, end):
        k = i + length
        if (
            k < end
            and kinds[nodes[i]] == kinds[nodes[k]]
            and _alike(nodes[i], nodes[k], kinds, place, length)
        ):
            continue
        copies = (i - first) // length + 1
        if copies > best.copies:
            best = Run(first, length, copies)
        first = i + 1
    return best if best.copies >= _LEAST else Run(begin, length, 1)


def _alike(
    a: fx.Node, b: fx.Node, kinds: Mapping[fx.Node, Hashable], place: Mapping[fx.Node, int], length: int
) -> bool:
    """Whether ``b`` reads what ``a`` reads, or the same a period later."""
    ones, others = a.all_input_nodes, b.all_input_nodes
    return len(ones) == len(others) and all(
        x is y
        or (x.op != "call_function" and y.op != "call_function" and kinds.get(x) == kinds.get(y))
        or (x in place and y in place and place[y] - place[x] == length)
        for x, y in zip(ones, others, strict=True)
    )
