"""What one tile of some nodes of a graph computes, as a graph of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx

from zero_compiler.ir import facts
from zero_compiler.ir.facts import TileOutput

from . import row_propagation
from .row_propagation import Left, Rows, Summed

aten = torch.ops.aten
_STEPS = 32


# Long: its arguments are described one by one.
def tile_graph(
    nodes: Iterable[fx.Node],
    rows: Mapping[fx.Node, Rows],
    sums: Mapping[fx.Node, Summed],
    inputs: Iterable[tuple[fx.Node, Rows | None]],
    results: Sequence[fx.Node],
) -> tuple[fx.Graph, tuple[TileOutput, ...]]:
    """The graph, and what its outputs are.

    Args:
        nodes: in order; ``rows`` and ``sums`` say how each runs over rows.
        inputs: what they read beside each other, with the rows that they need of it (None: every tile reads all).
        results: those of ``nodes`` that are read elsewhere.

    Raises:
        Left: a node reads something in a way that is not known.
    """
    graph = fx.Graph()
    r = graph.placeholder("rows")
    names = {given: graph.placeholder(given[0].name) for given in inputs}
    made: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        form = rows[node] if node in rows else sums[node]
        needs = row_propagation.operands(node, form)
        inside = [n for n in node.all_input_nodes if n in rows and (n in made or (n, needs.get(n)) in names)]

        def tile(n: fx.Node, needs: dict[fx.Node, Rows | None] = needs) -> fx.Node:
            need = needs.get(n)
            if n not in made and (n, need) not in names:
                if not constant(n, need):
                    return n  # a size that the operator on a tile does not read; checked below
                names[n, need] = (
                    row_propagation.on_tile(graph, n, need, None, tile, r)
                    if need
                    else graph.node_copy(n, tile)
                )
            return made[n] if n in made else names[n, need]

        if node in sums and node.target in row_propagation._PRODUCTS:
            continue
        made[node] = row_propagation.on_tile(graph, node, form, rows[inside[0]] if inside else None, tile, r)
    for inner in graph.nodes:
        for n in inner.all_input_nodes:
            if n.graph is not graph:
                raise Left(f"%{n.name} is read in a way that is not known")
    outs: list[fx.Node] = []
    kinds: list[TileOutput] = []
    for node in results:
        if node in rows:
            outs.append(made[node])
            kinds.append(TileOutput(rows[node].at))
        elif node in made:
            outs.append(made[node])
            kinds.append(TileOutput(None))
        else:
            needs = row_propagation.operands(node, sums[node])
            outs += [made[n] if n in made else names[n, needs[n]] for n in node.args]
            kinds.append(TileOutput(None, product=True))
    graph.output(outs)
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    return graph, tuple(kinds)


def constant(node: fx.Node, need: Rows | None = None) -> bool:
    """Made of nothing, in a few steps, and so as well inside of a tile; with rows, where all of them are equal."""
    if need is not None and node.target is not aten.full.default:
        return False
    todo, seen = [node], {node}
    while todo:
        n = todo.pop()
        if n.op != "call_function" or not facts.is_pure(n) or len(seen) > _STEPS:
            return False
        todo += [i for i in n.all_input_nodes if i not in seen]
        seen.update(n.all_input_nodes)
    return True


def reached(start: Sequence[fx.Node]) -> set[fx.Node]:
    """``start`` and all that depends on it."""
    seen, todo = set(start), list(start)
    while todo:
        for user in todo.pop().users:
            if user not in seen:
                seen.add(user)
                todo.append(user)
    return seen


def hoist(new: Iterable[fx.Node]) -> None:
    """Move all that nodes put into a graph read, by themselves or through others, to before them."""
    todo = list(new)
    while todo:
        reader = todo.pop()
        for given in reader.all_input_nodes:
            if reader < given:
                reader.prepend(given)
                todo.append(given)
