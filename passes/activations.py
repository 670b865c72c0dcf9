"""What forward can hand to backward, what it can leave to be made again, and what each costs.

Not a rewrite: the analysis of the joint graph on which `choose_saved.py` decides.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import networkx as nx  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from zero_compiler.cost.cost import CostModel, at_hints, hints
from zero_compiler.ir import dump, facts, ops

from .repeats import stand_ins
from .tag_recompute import regathered

_aten = torch.ops.aten
# Tables: what is looked up is small beside the table, which backward would have to gather and hold.
_LOOKUPS = frozenset({_aten.embedding.default, _aten._embedding_bag.default})
_KNOWN = frozenset({"aten", "prims", "zero", "_c10d_functional"})
_FORCED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
_NS = (
    1000  # capacities are whole nanoseconds: sums of them are exact, and equal graphs give equal minimum cuts
)


@dataclass(frozen=True)
class Choice:
    """``again`` is made once more in backward, ``saved`` is handed to it, and ``away`` comes back from files.

    ``us`` is the time that this takes, ``saved_bytes`` what is held between the phases, and ``peak_bytes`` the most
    that backward holds at once of what forward made, or what was made again of it.
    """

    again: frozenset[fx.Node]
    saved: frozenset[fx.Node]
    away: frozenset[fx.Node]
    us: float
    saved_bytes: int
    peak_bytes: int


class Activations:
    """The values of a joint graph that backward may want, with prices.

    Args:
        graph: a joint graph with markers, as `tag_recompute.py` leaves it.
        outputs: how many outputs of the graph are forward's.
        cost: prices operators.
        recompute: whether backward gathers every small weight.
        fused: whether element-wise operators are fused; where they are, making one again costs its arithmetic, and
            saving it a pass over memory.
        small_bytes: weights smaller than this are gathered in backward whatever it reads.
        known: by price, what was found for a copy of the graph; grows.
        away_us: time that it costs to keep a value in a file between the phases; None where it cannot be kept there.
    """

    # Long: all that the searches ask of a graph is found once, here.
    def __init__(
        self,
        graph: fx.Graph,
        outputs: int,
        cost: CostModel,
        *,
        fused: bool,
        small_bytes: int,
        recompute: bool,
        known: dict[float, frozenset[str]] | None = None,
        away_us: Callable[[fx.Node], float | None] = lambda node: None,
    ) -> None:
        self.cost, self.fused = cost, fused
        self._min_cuts = {} if known is None else known
        self._at: dict[float, Choice] = {}
        tangents = facts.depends_on_tangents(graph)
        (self._output,) = graph.find_nodes(op="output")
        # Sizes are left to the partitioner, which hands them over as numbers.
        self.forward = [n for n in graph.nodes if n not in tangents and n.op != "output" and not _symbolic(n)]
        self.backward = [n for n in graph.nodes if n in tangents and n.op == "call_function"]
        self._known = hints(graph)
        self.place = {n: i for i, n in enumerate(self.forward)}
        weights = facts.made_of_weights(graph)
        self._free = {n for n in self.forward if n.op != "call_function"} | set(weights)
        self.roots = storages(self.forward)
        self.bytes = {n: 0 if n in self._free else _bytes(n) for n in self.forward}
        returned = [n for n in tree_leaves(self._output.args[0])[:outputs] if isinstance(n, fx.Node)]
        impure = [n for n in self.forward if n.op == "call_function" and n.is_impure()]
        self.required = _behind([*returned, *impure])
        late = [n for n in tree_leaves(self._output.args[0])[outputs:] if isinstance(n, fx.Node)]
        wanted = {i for n in self.backward for i in n.all_input_nodes} | set(late)
        self.wanted = {n for n in wanted if n in self.place}
        self._usable = regathered(graph, small_bytes, recompute)
        self._weights = weights
        regions = {n: n.meta.get("ac_graph_id", 0) for n in self.forward}
        self.forced = {
            n
            for n in self.forward
            if n in weights
            or (
                n.meta.get("recompute") in _FORCED
                # What one region of the user hands to the next one is saved, as the partitioner has it.
                and not any(
                    u.meta.get("recompute") in _FORCED and regions[u] > regions[n]
                    for u in n.users
                    if u in self.place
                )
            )
        }
        self.held = {n for n in self.forward if n not in self.forced and not self._can_be_made_again(n)}
        self.us = {n: self._us(n) for n in self.forward}
        # What the caller holds is there anyway.
        others = {r for n in (*returned, *late) for r in self.roots.get(n, ())}
        self.away_us = {
            n: us
            for n in self.forward
            if n.op == "call_function"
            and self.savable(n)
            and n not in others
            and n not in self.forced
            and (us := away_us(n)) is not None
        }
        self._live = {n for n in _behind(self.wanted) if n in self.place}

    @functools.cached_property
    def _stand_in(self) -> dict[fx.Node, fx.Node]:
        kinds = {n: self._kind(n) for n in self.forward}
        return stand_ins([n for n in self.forward if n.op == "call_function"], kinds)

    @functools.cached_property
    def _distinct(self) -> list[fx.Node]:
        return [n for n in self.forward if n in self._live and n not in self._stand_in]

    # What may be done with a value ------------------------------------------------------------------------

    def _can_be_made_again(self, node: fx.Node) -> bool:
        if node.op == "placeholder" or node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE:
            return False
        if node.op != "call_function":
            return True
        if not facts.is_pure(node) or node.target in _LOOKUPS or node.target is ops.tiled:
            return False
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in _KNOWN:
            return False  # an operator of somebody else's: what a second run takes, and gives, is not known
        if facts.sends(node) and not facts.aliased_inputs(node):
            return False  # ranks might choose differently, and nothing travels twice
        # A weight that backward does not gather anyway is not gathered for this.
        return all(self._weights[i] <= self._usable for i in node.all_input_nodes if i in self._weights)

    def savable(self, node: fx.Node) -> bool:
        """A tensor of its own: a view is made again from what it views, and a list has no bytes."""
        return isinstance(facts.value(node), torch.Tensor) and self.roots[node] == frozenset((node,))

    # What it costs ----------------------------------------------------------------------------------------

    def _number(self, cost: object) -> float:
        return at_hints(cost, self._known)

    def _us(self, node: fx.Node) -> float:
        """Time of making a value once more."""
        if node.op != "call_function" or node not in self.required or node in self._weights:
            return 0.0
        if not self.fused or self.cost.heavy(node) or node.target is ops.tiled:
            return self._number(_node_us(self.cost, node))
        return max(
            self._number(self.cost.vector_us(node)), self._pass_us(node) if self._materialised(node) else 0.0
        )

    def _pass_us(self, node: fx.Node) -> float:
        return self.bytes[node] / self.cost.spec.memory_bytes_per_us

    def _materialised(self, node: fx.Node) -> bool:
        return self.cost.heavy(node) or any(self.cost.heavy(u) for u in node.users)

    def _save_us(self, node: fx.Node) -> float:
        """Time of saving it: one that would be fused away is written, and read again."""
        if not self.fused or self._materialised(node):
            return 0.0
        return 2 * self._pass_us(node)

    # Choices ----------------------------------------------------------------------------------------------

    def at(self, us_per_byte: float) -> Choice:
        """The best choice at a price."""
        if us_per_byte not in self._at:
            if us_per_byte not in self._min_cuts:
                self._min_cuts[us_per_byte] = frozenset(n.name for n in self.cheapest(us_per_byte))
            names = self._min_cuts[us_per_byte]
            again = frozenset(n for n in self.forward if n.name in names)
            self._at[us_per_byte] = self.choice(again, self._cheaper_away(us_per_byte))
        return self._at[us_per_byte]

    def cheapest(self, us_per_byte: float) -> frozenset[fx.Node]:
        """What to make again so that time, and bytes held at a price of ``us_per_byte``, cost least together.

        One minimum cut: a value that backward wants is either saved, at the price of its bytes or of keeping it in a
        file, whichever is less, or made again, at that of its operator, from inputs that backward then wants too (the
        network of torch's `min_cut_rematerialization_partition`, with a price on what that forbids to make again). Of
        many equal layers three are in the network, and the one in the middle decides for those that are not.
        """
        net = nx.DiGraph()
        source, sink = -1, -2
        net.add_nodes_from((source, sink))
        for n in self._distinct:
            i = self.place[n]
            enter, leave = 2 * i, 2 * i + 1 if self.savable(n) or n.op == "placeholder" else 2 * i
            if n in self.forced:
                net.add_edge(enter, sink)
            elif n in self.held:
                net.add_edge(source, enter)
            elif price := round(self.us[n] * _NS):
                net.add_edge(source, enter, capacity=price)
            if leave != enter:
                held_us = us_per_byte * self.bytes[n]
                to_save = self._save_us(n) + min(held_us, self.away_us.get(n, held_us))
                net.add_edge(enter, leave, capacity=round(to_save * _NS))
            if n in self.wanted:
                net.add_edge(leave, sink)
        for u in self._distinct:
            for n in u.all_input_nodes:
                if n in self._live:
                    n = self._stand_in.get(n, n)
                    leave = 2 * self.place[n] + (self.savable(n) or n.op == "placeholder")
                    net.add_edge(leave, 2 * self.place[u])
        _, (_, again) = nx.minimum_cut(net, source, sink)
        return frozenset(
            n for n in self.forward if n in self._live and 2 * self.place[self._stand_in.get(n, n)] in again
        )

    def _cheaper_away(self, us_per_byte: float) -> frozenset[fx.Node]:
        """What is cheaper in a file than in memory."""
        return frozenset(n for n, us in self.away_us.items() if us <= us_per_byte * self.bytes[n])

    def _kind(self, node: fx.Node) -> tuple[object, ...]:
        """All that a network says of a node."""
        return (
            node.target if node.op == "call_function" else node.op,
            self.us[node],
            self._save_us(node),
            self.bytes[node],
            node in self.forced,
            node in self.held,
            node in self.wanted,
            node in self._live,
            self.savable(node),
            self.away_us.get(node),
        )

    def choice(self, again: Collection[fx.Node], away: Collection[fx.Node] = frozenset()) -> Choice:
        """What follows from making ``again`` once more, with the views and lists in between.

        Of what is saved then, ``away`` waits in files.
        """
        made: set[fx.Node] = set()
        saved: set[fx.Node] = set()
        todo = list(self.wanted)
        while todo:
            n = todo.pop()
            if n in made or n in saved:
                continue
            if n in self.forced or n not in self.held and (n in again or not self.savable(n)):
                made.add(n)
                todo += [i for i in n.all_input_nodes if i in self.place]
            else:
                saved.add(n)
        gone = {n for n in saved if n in away and n in self.away_us}
        saved -= gone
        # Exact, since sets have no order: equal choices take equal time on every rank and in every run.
        us = math.fsum([*(self.us[n] for n in made), *(self.away_us[n] for n in gone)])
        kept = sum(self.bytes[n] for n in saved)
        peak = self._peak(made, saved, gone)
        return Choice(frozenset(made), frozenset(saved), frozenset(gone), us, kept, peak)

    def _peak(self, made: Collection[fx.Node], saved: Iterable[fx.Node], away: Collection[fx.Node]) -> int:
        """Bytes at the fullest moment of backward, in the order of autograd: what is wanted is there just before."""
        late = {*made, *away}

        def behind(node: fx.Node) -> list[fx.Node]:
            return [i for i in node.all_input_nodes if i in late] if node not in away else []

        order: list[fx.Node] = []
        done: set[fx.Node] = set()
        for node in self.backward:
            todo = behind(node)
            while todo:
                n = todo[-1]
                rest = [i for i in behind(n) if i not in done] if n not in done else []
                if rest:
                    todo += rest
                    continue
                todo.pop()
                if n not in done:
                    done.add(n)
                    order.append(n)
            order.append(node)
        # While one is used, the next one is read.
        wants = [at for at, n in enumerate(order) if n in away]
        for one, following in itertools.pairwise(wants):
            order.insert(one + 1, order.pop(following))
        return fullest(order, self.roots, self.bytes, {r for s in saved for r in self.roots[s]}, away)


def storages(nodes: Iterable[fx.Node]) -> dict[fx.Node, frozenset[fx.Node]]:
    """For each node those whose storage it may share; one tensor of a list has a storage of its own."""
    roots: dict[fx.Node, frozenset[fx.Node]] = {}
    for n in nodes:
        shared = [i for i in facts.aliased_inputs(n) if i in roots]
        listed = n.target is operator.getitem and not isinstance(facts.value(n.args[0]), torch.Tensor)
        roots[n] = (
            frozenset().union(*(roots[i] for i in shared)) if shared and not listed else frozenset((n,))
        )
    return roots


def fullest(
    order: list[fx.Node],
    roots: Mapping[fx.Node, frozenset[fx.Node]],
    nbytes: Mapping[fx.Node, int],
    given: Collection[fx.Node],
    away: Collection[fx.Node] = (),
) -> int:
    """Most bytes of ``roots`` alive at once while ``order`` runs; ``given`` is alive when it begins, and ``away`` comes
    from elsewhere."""
    last: dict[fx.Node, int] = {}
    for at, n in enumerate(order):
        for used in (n, *(() if n in away else n.all_input_nodes)):
            for r in roots.get(used, ()):
                last[r] = at
    ends: dict[int, int] = {}
    for r, at in last.items():
        ends[at] = ends.get(at, 0) + nbytes[r]
    live = sum(nbytes[r] for r in given if r in last)
    peak = live
    for at, n in enumerate(order):
        if n in roots and roots[n] == frozenset((n,)) and n not in given:
            live += nbytes[n]
        peak = max(peak, live + _inside(n))
        live -= ends.get(at, 0)
    return peak


def _inside(node: fx.Node) -> int:
    """Bytes of what is made again inside of a computation that is done in tiles."""
    if node.target is not ops.tiled:
        return 0
    tiling = facts.tiling(node)
    return tiling.tile * tiling.row_bytes


def held_bytes(backward: fx.Graph) -> int:
    """Most bytes that a backward graph, with markers, holds at once of what forward made, or what it makes again."""
    tangents = facts.depends_on_tangents(backward)
    weights = facts.made_of_weights(backward)
    order = [n for n in backward.nodes if n.op == "call_function"]
    own = [n for n in backward.nodes if n not in tangents and n.op != "output"]
    roots = storages(own)
    given = {n for n in own if n.op == "placeholder"}
    tickets = {n.args[0] for n in backward.find_nodes(op="call_function", target=ops.restore)}
    free = {n for n in given if str(n.target).startswith("primals")} | set(weights) | tickets
    owner, saved = facts.saved_storages(backward)
    roots = {n: frozenset(owner.get(r, r) for r in rs) for n, rs in roots.items()}
    nbytes = {n: 0 if n in free else saved.get(n, _bytes(n)) for n in own}
    return fullest(order, roots, nbytes, given)


@dataclass(frozen=True)
class Remade:
    """A tensor that backward makes again: why, the bytes that are not held for it, and the time that is paid."""

    name: str
    op: str
    module: str
    why: str
    nbytes: int
    us: float


def remade(backward: fx.Graph, cost: CostModel, fused: bool) -> list[Remade]:
    """What a backward graph, with markers, makes again of what forward made; weights and views apart."""
    tangents = facts.depends_on_tangents(backward)
    weights = facts.made_of_weights(backward)
    known = hints(backward)
    rows = []
    for n in backward.nodes:
        val = facts.value(n)
        if n.op != "call_function" or n in tangents or n in weights or not isinstance(val, torch.Tensor):
            continue
        listed = n.target is operator.getitem
        if n.target in (ops.restore, ops.bring) or facts.aliased_inputs(n) and not listed:
            continue
        node = n.args[0] if listed else n
        light = fused and not cost.heavy(node) and node.target is not ops.tiled
        us = cost.vector_us(node) if light else _node_us(cost, node)
        paid = at_hints(us, known) if not listed or n is next(iter(node.users)) else 0.0
        rows.append(
            Remade(n.name, dump.target_text(node), facts.module_path(n), facts.reason(n), _bytes(n), paid)
        )
    return rows


def _bytes(node: fx.Node) -> int:
    val = facts.value(node)
    return facts.bytes_of(val) if isinstance(val, torch.Tensor) else 0


def _node_us(cost: CostModel, node: fx.Node) -> object:
    return facts.tiling(node).us if node.target is ops.tiled else cost.node_us(node)


def _symbolic(node: fx.Node) -> bool:
    return isinstance(facts.value(node), (torch.SymInt, torch.SymFloat, torch.SymBool))


def _behind(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """``nodes`` and all that they are made of."""
    seen: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        n = todo.pop()
        if n not in seen:
            seen.add(n)
            todo += n.all_input_nodes
    return seen
