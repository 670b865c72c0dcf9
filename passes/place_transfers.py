"""Forward or backward graph: transfers start early, end late, and weights are released."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from zero_compiler.ir import facts, ops

from .base import Context


@dataclass(frozen=True)
class PlaceStarts:
    """Start the gathers of a unit while units before it compute; wait for reductions as late as is useful.

    At distance 1 they start right behind the wait of the unit before, at distance 2 behind that of the one before
    that: always where a segment ends anyway. Units keep their order.

    Before::

        %s1 = zero.gather [w1]
        %t1 = zero.wait %s1
        ...
        %s2 = zero.gather [w2]
        %t2 = zero.wait %s2

    After::

        %s1 = zero.gather [w1]
        %t1 = zero.wait %s1
        %s2 = zero.gather [w2]
        ...
        %t2 = zero.wait %s2

    What would start ahead of all waits starts at the top, as the first unit always does. A reduction's wait moves
    to the start of the second reduction group after it: two groups are in flight. On one rank nothing moves, and it
    stands behind the starts of its group.

    In memory that ranks share nothing moves between start and wait, which sums where the gradients lie. A wait that
    comes late gives a peer that is behind some slack, and holds the gradients for it. There as many are in flight as
    take the bytes of the largest one, or of two buckets.

    Refuses: nothing.
    """

    bucket_bytes: int = 0
    distances: Mapping[str, int] = field(default_factory=dict)
    name: str = "place-starts"

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        groups = unit_groups(graph, ops.gather)
        order = {n: i for i, n in enumerate(graph.nodes)}
        anchors = [max((_wait(g) for g in group), key=order.__getitem__) for group in groups]
        starts = _starts(groups, self.distances)
        for i in range(len(groups) - 1, 0, -1):
            if starts[i]:
                # Behind the last wait of that unit: its own weights come first on the lane.
                anchor = last_element(anchors[starts[i] - 1])
                for gather in reversed(groups[i]):
                    anchor.append(gather)
        if groups:
            # Nothing to wait behind: the first weights travel while whatever reads none computes.
            top = next(n for n in graph.nodes if n.op != "placeholder")
            for i, group in enumerate(groups):
                for gather in group if not starts[i] else ():
                    if gather is top:
                        top = top.next
                    else:
                        top.prepend(gather)
        # Waits of a group stand together, after all of its starts.
        for group in groups:
            _together(group)
        reductions = unit_groups(graph, ops.reduce)
        (output,) = graph.find_nodes(op="output")
        shared = [s for group in reductions for s in group if ctx.params[facts.params(s)[0]].shared]
        _wait_for_room(shared, output, ctx, 2 * self.bucket_bytes)
        for i, group in enumerate(reductions):
            point = reductions[i + 2][0] if i + 2 < len(reductions) else output
            behind = group[-1].next
            while behind is _wait(group[-1]) or facts.is_element(behind):
                behind = behind.next
            for start in group:
                plan = ctx.params[facts.params(start)[0]]
                if not plan.shared:
                    _wait_before(start, point if plan.world * plan.copies > 1 else behind)


def _wait_before(start: fx.Node, point: fx.Node) -> None:
    wait = _wait(start)
    for node in (wait, *sorted(wait.users, key=lambda e: e.args[1])):
        point.prepend(node)


def _wait_for_room(reductions: list[fx.Node], output: fx.Node, ctx: Context, least_bytes: int) -> None:
    """Wait for the oldest of ``reductions`` where another one would not fit beside those in flight."""
    nbytes = {s: _reduced_bytes(s, ctx) for s in reductions}
    room = max(least_bytes, *nbytes.values()) if nbytes else 0
    flying: deque[fx.Node] = deque()
    taken = 0
    for start in reductions:
        while flying and taken + nbytes[start] > room:
            taken -= nbytes[flying[0]]
            _wait_before(flying.popleft(), start)
        flying.append(start)
        taken += nbytes[start]
    for start in flying:
        _wait_before(start, output)


def _reduced_bytes(start: fx.Node, ctx: Context) -> int:
    plans, tile = [ctx.params[r] for r in facts.params(start)], facts.tile(start)
    if tile is None:
        return sum(p.reduce_bytes for p in plans)
    return sum(p.reduce_bytes * tile.rows // p.chunk_rows for p in plans)


@dataclass(frozen=True)
class InsertReleases:
    """Release each gathered weight after the last use of its storage, at the end of the segment that uses it.

    Before::

        %y = aten.mm %x, %w
        %t2 = zero.wait %s2

    After::

        %y = aten.mm %x, %w
             zero.release %w
        %t2 = zero.wait %s2

    Weights of stages 1 and 2 are kept until the shards change, and get no release.

    Refuses: nothing.
    """

    name: str = "insert-releases"

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        order = {n: i for i, n in enumerate(graph.nodes)}
        roots = facts.alias_roots(graph)
        last: dict[fx.Node, fx.Node] = {}
        weights = frozenset(filter(facts.is_weight, graph.nodes))
        for node in graph.nodes:
            for used in node.all_input_nodes:
                for root in roots[used] & weights:
                    last[root] = node
        ends = _segment_ends(graph, order)
        at_end: dict[fx.Node, list[list[fx.Node]]] = {}
        for gather in graph.find_nodes(op="call_function", target=ops.gather):
            if not ctx.params[facts.params(gather)[0]].released:
                continue
            # A bucket is one slot in the plan: it is released when the last of its weights is dead.
            elements = sorted(_wait(gather).users, key=lambda e: e.args[1])
            end = max((ends[last.get(e, e)] for e in elements), key=order.__getitem__)
            at_end.setdefault(end, []).append(elements)
        for end, buckets in at_end.items():
            with graph.inserting_before(end):
                for elements in buckets:
                    graph.call_function(ops.release, (elements,))


def _segment_ends(graph: fx.Graph, order: dict[fx.Node, int]) -> dict[fx.Node, fx.Node]:
    """For each node, the transfer (or output) before which its segment ends."""
    out: dict[fx.Node, fx.Node] = {}
    end: fx.Node | None = None
    for node in reversed(graph.nodes):
        if node.op == "output" or node.target in ops.BORDERS:
            end = node
        assert end is not None
        out[node] = end
    # A transfer's own "segment" (a release of a weight nobody reads) ends at the transfer after its elements.
    for node in graph.nodes:
        if facts.is_element(node) or node.target in ops.TRANSFERS:
            after = node.next
            while facts.is_element(after):
                after = after.next
            out[node] = after
    return out


def _starts(groups: list[list[fx.Node]], distances: Mapping[str, int]) -> list[int]:
    """How many units have been waited for where each unit's gathers start; never falling, which keeps their order."""
    starts = [max(0, i + 1 - distances.get(facts.unit(group[0]), 1)) for i, group in enumerate(groups)]
    starts[:1] = [0] * len(starts[:1])
    for i in range(len(starts) - 2, -1, -1):
        starts[i] = min(starts[i], starts[i + 1])
    return starts


def _wait(start: fx.Node) -> fx.Node:
    (wait,) = start.users
    return wait


def last_element(wait: fx.Node) -> fx.Node:
    """The last of the elements that follow a wait, else the wait."""
    node = wait
    while facts.is_element(node.next) and node.next.args[0] is wait:
        node = node.next
    return node


def unit_groups(graph: fx.Graph, target: object) -> list[list[fx.Node]]:
    """Starts of ``target`` in order, those of one unit that follow each other together."""
    groups: list[list[fx.Node]] = []
    for node in graph.nodes:
        if node.target is target:
            if groups and facts.unit(groups[-1][-1]) == facts.unit(node):
                groups[-1].append(node)
            else:
                groups.append([node])
    return groups


def _together(group: list[fx.Node]) -> None:
    anchor = group[0]
    for start in group[1:]:
        anchor.append(start)
        anchor = start
    first = _wait(group[0])
    anchor = last_element(first)
    for start in group[1:]:
        wait = _wait(start)
        elements = sorted(wait.users, key=lambda e: e.args[1])
        for node in (wait, *elements):
            anchor.append(node)
            anchor = node
