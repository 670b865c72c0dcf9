"""All passes, the verifier and emission take time near-linear in the size of the graph."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from null.graphs import Build, aten, lower, lower_joint
from torch import fx

from zero_compiler.cost import prefetch


def layered(layers: int) -> tuple[Build, Build]:
    """Forward and backward of ``layers`` layers, about 11 and 14 nodes each."""
    shapes = {f"h__{i}__{n}": s for i in range(layers) for n, s in (("w", (8, 8)), ("b", (8,)))}
    f = Build(**shapes)
    x = f.input("x", 2, 8)
    saved = []
    for i in range(layers):
        saved.append(x)
        y = f.op(aten.addmm.default, f.weight(f"h.{i}.b"), x, f.op(aten.t.default, f.weight(f"h.{i}.w")))
        for _ in range(5):
            y = f.op(aten.tanh.default, y)
        x = f.op(aten.add.Tensor, x, y)
    f.done(x, *saved[1:])
    b = Build(**shapes)
    acts = [b.input(f"act_{i}", 2, 8) for i in range(layers)]
    g = b.input("tangents_1", 2, 8)
    b.done(*backward_of(b, g, acts, lambda i: b.weight(f"h.{i}.w")))
    return f, b


def backward_of(b: Build, g: fx.Node, acts: list[fx.Node], weight: Callable[[int], fx.Node]) -> list[fx.Node]:
    """The layers' gradients, last layer first; ``weight`` gives a layer's full weight."""
    grads = []
    for i in reversed(range(len(acts))):
        d = g
        for _ in range(5):
            d = b.op(aten.mul.Tensor, d, acts[i])
        grads.append(b.reduced(f"h.{i}.w", b.op(aten.mm.default, b.op(aten.t.default, d), acts[i])))
        grads.append(b.reduced(f"h.{i}.b", b.op(aten.sum.dim_IntList, d, [0])))
        g = b.op(aten.add.Tensor, g, b.op(aten.mm.default, d, weight(i)))
    return grads


def joint(layers: int) -> Build:
    """The same layers as one graph, before it is cut into forward and backward."""
    b = Build(**{f"h__{i}__{n}": s for i in range(layers) for n, s in (("w", (8, 8)), ("b", (8,)))})
    x, g = b.input("x", 2, 8), b.input("tangents_1", 2, 8)
    acts, weights = [], []
    for i in range(layers):
        acts.append(x)
        weights.append(b.weight(f"h.{i}.w"))
        y = b.op(aten.addmm.default, b.weight(f"h.{i}.b"), x, b.op(aten.t.default, weights[i]))
        for _ in range(5):
            y = b.op(aten.tanh.default, y)
        x = b.op(aten.add.Tensor, x, y)
    b.done(x, *backward_of(b, g, acts, lambda i: weights[i]))
    return b


def seconds(layers: int) -> tuple[int, float]:
    f, b = layered(layers)
    nodes = len(f.graph.nodes) + len(b.graph.nodes)
    whole = joint(layers)
    start = time.process_time()
    lower_joint(whole)
    for build, phase in ((f, "forward"), (b, "backward")):
        build.program(lower(build, phase, bucket_bytes=256), phase)
    return nodes, time.process_time() - start


@pytest.mark.slow
def test_time_grows_with_the_graph():
    (n0, t0), (n2, t2) = (seconds(layers) for layers in (125, 700))
    assert n0 > 2500
    assert n2 > 14000
    # A step that is quadratic would take five times the nodes' ratio; three times leaves room for sorting, caches and
    # a busy machine.
    assert t2 / t0 < 3 * n2 / n0, (t0, t2)


def search_walks(units: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often the search walks the events between two boundaries, for a backward in which every 16th unit takes as
    long to gather as several to compute, with room for all."""
    lengths = [60.0 if i % 16 == 15 else 2.0 for i in range(units)]
    between: list = [[("compute", 3.0)]]
    for i in range(units):
        between.append([("compute", 8.0), *([("wait", i - 2)] if i > 1 else []), ("start", i)])
    between[-1] += [("wait", i) for i in range(units - 2, units)]
    count = 0
    walk = prefetch._walk

    def counted(*args):
        nonlocal count
        count += 1
        return walk(*args)

    with monkeypatch.context() as patch:
        patch.setattr(prefetch, "_walk", counted)
        assert (
            max(prefetch.distances(prefetch.Phase(lengths, [1] * units, between, [1.0] * units), 1 << 30)) > 2
        )
    return count


def test_the_search_for_distances_grows_with_the_units(monkeypatch):
    few, many = search_walks(400, monkeypatch), search_walks(4000, monkeypatch)
    assert many / few < 1.6 * 10, (few, many)
