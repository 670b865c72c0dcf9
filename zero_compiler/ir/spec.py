"""The verifier: what must be true of a graph at each level of lowering. A break is a bug in a pass.

Levels, in order: ``captured`` (markers as traced), ``merged`` (one marker per weight and gradient),
``lowered`` (transfers in place of markers), ``scheduled`` (releases placed; final order).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from typing import NoReturn, Protocol

import torch
from torch import fx

from ..errors import VerifyError
from . import facts, ops
from .facts import ParamRef

Roots = Mapping[fx.Node, frozenset[fx.Node]]  # of every node, the nodes whose storage it may share
LEVELS = ("captured", "merged", "lowered", "scheduled")


class Planned(Protocol):
    """What the plan of a weight says of its transfers."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def gather_dtype(self) -> torch.dtype: ...
    @property
    def reduce_dtype(self) -> torch.dtype: ...
    @property
    def sharded(self) -> bool: ...
    @property
    def world(self) -> int: ...
    @property
    def released(self) -> bool: ...


def verify(
    graph: fx.Graph, level: str, params: Mapping[ParamRef, Planned], reduced: Set[ParamRef] | None = None
) -> None:
    """Prove the facts of ``level``.

    Args:
        params: plan of every managed parameter.
        reduced: parameters whose gradient the graph must reduce (see :func:`reduced_by`); None: not checked.

    Raises:
        VerifyError: naming the node and the fact that it breaks.
    """
    at = LEVELS.index(level)
    _in_order(graph)
    if reduced is not None:
        _none_lost(graph, reduced)
    if at == LEVELS.index("merged"):
        _one_marker_each(graph)
        _columns_agree(graph)
    if at >= LEVELS.index("lowered"):
        _no_markers(graph)
        _transfers_match_plan(graph, params)
        _waited_once(graph)
        _one_reduction_each(graph)
        roots = facts.alias_roots(graph)
        _weights_do_not_leave(graph, roots)
        _storage_in_use_is_not_written(graph, roots)
    if at >= LEVELS.index("scheduled"):
        _released_once(graph, params)
        _released_together(graph)
        _uses_inside_life(graph, roots)


def verify_partition(forward: fx.Graph, num_outputs: int, backward: fx.Graph) -> None:
    """Prove that no full weight crosses from forward to backward, and that backward takes what forward gives.

    Args:
        forward: the forward graph of a partition, with markers.
        num_outputs: how many of its outputs come before the values that it saves for backward.
        backward: takes them in the same order; symbolic sizes stand apart.

    Raises:
        VerifyError: a saved value is a full weight, or was made of full weights alone; or it is taken as another one.
    """
    (output,) = forward.find_nodes(op="output")
    saved = {n for n in output.args[0][num_outputs:] if isinstance(n, fx.Node)}
    for node, weights in facts.made_of_weights(forward).items():
        if node in saved:
            (first, *_) = sorted(str(w.args[4]) for w in weights)
            _fail(node, f"is saved for backward, but is nothing but the full weight {first!r}")
    given, taken = (
        [n for n in nodes if isinstance(n, fx.Node) and isinstance(facts.value(n), torch.Tensor)]
        for nodes in (output.args[0][num_outputs:], backward.find_nodes(op="placeholder"))
    )
    if len(taken) < len(given):
        _fail(given[len(taken)], "is saved for backward, which does not take it")
    for here, there in zip(given, taken, strict=False):
        a, b = (f"{v.dtype} {list(v.shape)}" for v in (facts.value(here), facts.value(there)))
        if a != b:  # as text: a comparison of symbolic sizes would become a guard
            _fail(here, f"is saved for backward as {a}, which takes %{there.name} as {b}")


def reduced_by(graph: fx.Graph) -> frozenset[ParamRef]:
    """Parameters whose gradient the graph reduces, by markers or by transfers."""
    refs: set[ParamRef] = set()
    for node in graph.find_nodes(op="call_function", target=ops.reduce_grad):
        refs.add(ParamRef(node.args[3], node.args[4]))
    for node in graph.find_nodes(op="call_function", target=ops.reduce):
        refs.update(facts.params(node))
    return frozenset(refs)


def _none_lost(graph: fx.Graph, want: Set[ParamRef]) -> None:
    have = reduced_by(graph)
    for ref in sorted(want - have):
        _fail(None, f"the gradient of {ref.name} reaches no reduction")
    for ref in sorted(have - want):
        _fail(None, f"the gradient of {ref.name} is reduced, and was not before")


def _fail(node: fx.Node | None, fact: str) -> NoReturn:
    where = f"%{node.name} ({node.target})" if node is not None else "the graph"
    raise VerifyError(f"{where}: {fact}")


def _in_order(graph: fx.Graph) -> None:
    """Every value stands before its readers, in this graph, under a name of its own. As ``fx.Graph.lint``, which takes
    a multiple of the time for what else it checks: the manager calls that once, when all passes have run."""
    seen: set[fx.Node] = set()
    names: set[str] = set()
    for node in graph.nodes:
        for used in node.all_input_nodes:
            if used not in seen:
                _fail(node, f"reads %{used.name}, which does not stand before it")
        seen.add(node)
        names.add(node.name)
    if len(names) < len(seen):
        _fail(None, "two nodes have one name")


def _one_marker_each(graph: fx.Graph) -> None:
    for target, what in ((ops.unshard, "gathered"), (ops.reduce_grad, "reduced")):
        nodes = list(graph.find_nodes(op="call_function", target=target))
        counts = Counter((n.args[3], n.args[4]) for n in nodes)
        for node in nodes:
            if counts[(node.args[3], node.args[4])] > 1:
                _fail(node, f"parameter {node.args[4]!r} is {what} more than once")


def _columns_agree(graph: fx.Graph) -> None:
    """What may be done for a tile of a weight has as many columns as that has rows, wherever it is split or laid."""
    for node in graph.find_nodes(op="call_function", target=ops.tiled):
        tiling = facts.tiling(node)
        columns = tiling.columns
        if columns is None:
            continue
        for given, row, column in zip(node.args[0], tiling.inputs, columns.inputs, strict=True):
            if row is not None and column is not None:
                _fail(node, f"cuts %{given.name} by tokens and by rows of the weight")
            if column is not None and facts.value(given).shape[column] != columns.size:
                _fail(
                    node, f"cuts %{given.name} along dimension {column}, which has no {columns.size} columns"
                )
        for i, (val, how) in enumerate(zip(facts.value(node), columns.outputs, strict=True)):
            if isinstance(how, int) and val.shape[how] != columns.size:
                _fail(node, f"lays result {i} along dimension {how}, which has no {columns.size} columns")


def _no_markers(graph: fx.Graph) -> None:
    for target in (ops.unshard, ops.reduce_grad):
        for node in graph.find_nodes(op="call_function", target=target):
            _fail(node, "a marker is left after lowering")


def _transfers_match_plan(graph: fx.Graph, params: Mapping[ParamRef, Planned]) -> None:
    for node in _transfers(graph):
        refs, vals = facts.params(node), facts.value(node)
        shapes = ops.unflat_sizes(node.args[1], node.args[2])
        if not len(refs) == len(vals) == len(shapes):
            _fail(node, f"moves {len(refs)} parameters but has {len(vals)} values and {len(shapes)} shapes")
        if node.target is ops.reduce:
            _reduction_matches_plan(node, params)
            continue
        for ref, val in zip(refs, vals, strict=True):
            plan = params[ref]
            if tuple(val.shape) != _moved(node, plan) or val.dtype != plan.gather_dtype:
                _fail(
                    node,
                    f"gathers {ref.name} as {dumped(val)}, its plan says {_moved(node, plan)} {plan.gather_dtype}",
                )
            if not plan.sharded:
                _fail(node, f"gathers {ref.name}, which every rank holds whole")


def _transfers(graph: fx.Graph) -> list[fx.Node]:
    targets = (ops.gather, ops.reduce)
    return [n for target in targets for n in graph.find_nodes(op="call_function", target=target)]


def _reduction_matches_plan(node: fx.Node, params: Mapping[ParamRef, Planned]) -> None:
    refs = facts.params(node)
    added_up_in = params[refs[0]].reduce_dtype  # a bucket is reduced as its first gradient is
    for grad, ref, val in zip(node.args[0], refs, facts.value(node), strict=True):
        plan = params[ref]
        what = f"the gradient of {ref.name}"
        if tuple(facts.value(grad).shape) != _moved(node, plan):
            _fail(node, f"{what} has shape {tuple(facts.value(grad).shape)}")
        if added_up_in != plan.reduce_dtype:
            _fail(node, f"adds up {what} in {added_up_in}, its plan says {plan.reduce_dtype}")
        for dtype in (val.dtype, node.args[3]):
            if dtype != plan.dtype:
                _fail(node, f"gives {what} as {dtype}, its plan says {plan.dtype}")
        if node.args[4] == plan.sharded:
            _fail(
                node,
                f"gives every rank {'all' if plan.sharded else 'its part'} of {what}, its plan says otherwise",
            )


def _moved(node: fx.Node, plan: Planned) -> tuple[int, ...]:
    """Shape of what a transfer moves of a parameter."""
    tile = facts.tile(node)
    return plan.shape if tile is None else (plan.world * tile.rows, *plan.shape[1:])


def dumped(val: object) -> str:
    return f"{tuple(val.shape)} {val.dtype}" if isinstance(val, torch.Tensor) else str(val)


def _waited_once(graph: fx.Graph) -> None:
    for node in _transfers(graph):
        users = list(node.users)
        if len(users) != 1 or users[0].target is not ops.wait:
            _fail(
                node, f"a transfer has exactly one wait and no other reader, found {[u.name for u in users]}"
            )
    for node in graph.find_nodes(op="call_function", target=ops.wait):
        for user in node.users:
            if not facts.is_element(user):
                _fail(user, "reads a wait as a whole")


def _one_reduction_each(graph: fx.Graph) -> None:
    seen: dict[tuple[ParamRef, int], fx.Node] = {}
    returned = {n for out in graph.find_nodes(op="output") for n in out.all_input_nodes}
    for node in graph.find_nodes(op="call_function", target=ops.reduce):
        tile = facts.tile(node)
        for ref in facts.params(node):
            key = (ref, -1 if tile is None else tile.begin)
            other = seen.get(key) or seen.get((ref, -1))
            if other is not None:
                _fail(node, f"gradient of {ref.name} is reduced twice, first by %{other.name}")
            seen[key] = node
        if tile is not None and not tile.last:
            continue  # the wait for the last one gives the gradient
        (wait,) = node.users
        elements = {u.args[1] for u in wait.users if u in returned}
        for i, ref in enumerate(facts.params(node)):
            if i not in elements:
                _fail(node, f"the reduced gradient of {ref.name} is not returned")


def _weights_do_not_leave(graph: fx.Graph, roots: Roots) -> None:
    for out in graph.find_nodes(op="output"):
        for node in out.all_input_nodes:
            for root in roots[node]:
                if facts.is_weight(root):
                    _fail(node, f"returns storage of the gathered weight %{root.name}")


def _storage_in_use_is_not_written(graph: fx.Graph, roots: Roots) -> None:
    """Nothing writes to a gathered weight, nor to a gradient once its reduction has begun, which would lack that."""
    sent: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.target is ops.reduce:
            sent |= {root: node for grad in node.args[0] for root in roots[grad]}
        elif node.target is not ops.release:
            for written in facts.written_inputs(node):
                for root in roots[written]:
                    if facts.is_weight(root):
                        _fail(node, f"writes to the gathered weight %{root.name}")
                    if root in sent:
                        _fail(node, f"writes to %{root.name}, which %{sent[root].name} has sent")


def _released_together(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=ops.release):
        waits = {w.args[0] for w in node.args[0]}
        if len(waits) != 1 or set(node.args[0]) != set(next(iter(waits)).users):
            _fail(node, "releases something else than the weights of one gather")


def _released_once(graph: fx.Graph, params: Mapping[ParamRef, Planned]) -> None:
    released = Counter(n for r in graph.find_nodes(op="call_function", target=ops.release) for n in r.args[0])
    for node in graph.nodes:
        if not facts.is_weight(node):
            if node in released:
                _fail(node, "is released but is no gathered weight")
            continue
        ref = facts.params(node.args[0].args[0])[node.args[1]]
        want = 1 if params[ref].released else 0
        if released[node] != want:
            _fail(node, f"gathered weight {ref.name} is released {released[node]} times, expected {want}")
    for gather in graph.find_nodes(op="call_function", target=ops.gather):
        (wait,) = gather.users
        named = {u.args[1] for u in wait.users}
        for i, ref in enumerate(facts.params(gather)):
            if i not in named and params[ref].released:
                _fail(gather, f"{ref.name} is gathered, but nothing names or releases it")


def _uses_inside_life(graph: fx.Graph, roots: Roots) -> None:
    order = {n: i for i, n in enumerate(graph.nodes)}
    end = {n: order[r] for r in graph.find_nodes(op="call_function", target=ops.release) for n in r.args[0]}
    for node in graph.nodes:
        if node.target is ops.release:
            continue
        for used in node.all_input_nodes:
            for root in roots[used]:
                if root in end and order[node] > end[root]:
                    _fail(node, f"uses the gathered weight %{root.name} after its release")
