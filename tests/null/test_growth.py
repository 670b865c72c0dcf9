"""Passes that only budgets and options ask for take steps near-linear in the number of layers: calls are counted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from machines import machine
from null.graphs import Build, aten
from null.test_partition_activations import Graphs
from torch import fx

from zero_compiler.hardware import HardwareSpec
from zero_compiler.ir import ops
from zero_compiler.passes import JOINT, TileMlp, run_passes


def calls(run: Callable[[], Any]) -> int:
    """How many calls of Python functions it makes, steps of generators among them."""
    count = 0

    def seen(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


def check_linear(made: Callable[[int], Callable[[], Any]]) -> None:
    """A part that is quadratic, and takes a tenth of the calls at few layers, takes eight times them all at many."""
    few, many = calls(made(20)), calls(made(160))
    assert many < 1.3 * 8 * few, (few, many)


def mlps(layers: int) -> Build:
    """Joint graph of MLPs one after the other, with the gradients of their weights."""
    b = Build(**{f"h__{i}__{n}": s for i in range(layers) for n, s in (("u", (8, 4)), ("d", (4, 8)))})
    x, g = b.input("x", 64, 4), b.input("tangents_1", 64, 4)
    known: list[tuple[fx.Node, ...]] = []
    for i in range(layers):
        up, down = b.weight(f"h.{i}.u"), b.weight(f"h.{i}.d")
        h = b.op(aten.mm.default, x, b.op(aten.t.default, up))
        a = b.op(aten.gelu.default, h)
        known.append((x, h, a, up, down))
        x = b.op(aten.mm.default, a, b.op(aten.t.default, down))
    grads = []
    for i, (given, h, a, up, down) in reversed(list(enumerate(known))):
        grads.append(b.reduced(f"h.{i}.d", b.op(aten.mm.default, b.op(aten.t.default, g), a)))
        dh = b.op(aten.gelu_backward.default, b.op(aten.mm.default, g, down), h)
        grads.append(b.reduced(f"h.{i}.u", b.op(aten.mm.default, b.op(aten.t.default, dh), given)))
        g = b.op(aten.mm.default, dh, up)
    b.done(x, *grads, g)
    return b


def test_mlps_in_tiles():
    def made(layers: int) -> Callable[[], Any]:
        b = mlps(layers)
        names = [p.name for p, _ in JOINT]
        run_passes(b.graph, JOINT[: names.index("tile-mlp")], b.context("joint"))
        spec = HardwareSpec.from_dict(machine())
        context = b.context("joint", tile_mlp=True, mlp_bytes=1, machine=spec)

        def run() -> None:
            TileMlp().run(b.graph, context)
            assert len(b.graph.find_nodes(op="call_function", target=ops.tiled)) == 2 * layers

        return run

    check_linear(made)


def test_activations_in_parts():
    def made(layers: int) -> Callable[[], Any]:
        g = Graphs()
        x, saved = g.input(g.forward, "x", 32, 32), []
        for _ in range(layers):
            x = g.op(g.forward, aten.tanh.default, g.reduced(x))
            saved.append(x)
        g.end(g.op(g.forward, aten.exp.default, x), *saved)

        def run() -> None:
            g.run()
            assert len(g.parts()) == layers

        return run

    check_linear(made)
