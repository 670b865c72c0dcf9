"""Passes that only budgets and options ask for take steps near-linear in the number of layers: calls are counted."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from machines import machine
from null.graphs import Build, aten, lower, lower_joint
from null.passes.test_partition_activations import Graphs
from torch import fx, nn

from zero_compiler.compile.phase_lowering import Lowering
from zero_compiler.cost.hardware import HardwareSpec
from zero_compiler.emit.emit import emit
from zero_compiler.errors import MemoryBudgetError
from zero_compiler.ir import facts, ops
from zero_compiler.passes import TileMlp, phase_passes, run_passes
from zero_compiler.tools.planning import report


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


def mlps(layers: int, tokens: int = 64) -> Build:
    """Joint graph of MLPs one after the other, with the gradients of their weights."""
    b = Build(**{f"h__{i}__{n}": s for i in range(layers) for n, s in (("u", (8, 4)), ("d", (4, 8)))})
    x, g = b.input("x", tokens, 4), b.input("tangents_1", tokens, 4)
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


@pytest.mark.slow
def test_mlps_in_tiles():
    def made(layers: int) -> Callable[[], Any]:
        b = mlps(layers)
        lower_joint(b, "tile-loss")
        spec = HardwareSpec.from_dict(machine())
        context = b.context("joint", machine=spec)

        def run() -> None:
            TileMlp(True, mlp_bytes=1).run(b.graph, context)
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


def in_tiles(tokens: int) -> Build:
    b = mlps(2, tokens)
    lower_joint(b, tile_mlp=True, mlp_bytes=1)
    return b


# 4, 14 (of which the last one is smaller) and 64 tiles.
@pytest.mark.parametrize("tokens", [64, 211, 1024])
def test_of_tiles_that_are_alike_some_tell_the_bytes_of_all(tokens):
    programs = []
    for bytes_only in (False, True):
        b = in_tiles(tokens)
        programs.append(b.program(lower(b, "forward", bytes_only=bytes_only), "forward")[0])
    every, some = programs
    assert len(some.instrs) < len(every.instrs)
    assert (max(some.live), some.buffer_bytes) == (max(every.live), every.buffer_bytes)


def test_more_tiles_take_no_longer_where_only_bytes_are_asked():
    def lowering(tokens: int) -> int:
        b = in_tiles(tokens)
        return calls(lambda: b.program(lower(b, "forward", bytes_only=True), "forward"))

    few, many = lowering(64), lowering(1024)
    assert many < 3 * few, (few, many)  # of sixteen times the tiles


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(16, 64) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(64, 16) for _ in range(2))
        self.head = nn.Linear(16, 64)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(F.gelu(up(x)))
        return F.cross_entropy(self.head(x), y)


@pytest.mark.slow
def test_what_a_budget_tries_takes_the_bytes_of_what_would_run(monkeypatch):
    tried, trial = [], Lowering._trial

    def both(self: Lowering, gm: fx.GraphModule, phase: str) -> Any:
        program, context = trial(self, gm, phase), self.state.context(phase)
        pipeline = phase_passes(self.state.options(phase))
        copy = facts.copy_module(gm)
        run_passes(copy.graph, pipeline, context, trial=True)
        whole = emit(copy, self.state.params, phase, self.state.loader.kept_offsets(), trial=True).program
        tried.append(len(program.instrs) < len(whole.instrs))
        if self.counts_some_tiles({phase: gm}):
            near = [max(p.live) for p in (program, whole)]
            assert near[0] == pytest.approx(near[1], rel=0.1)
            return program
        assert (max(program.live), program.buffer_bytes, program.host_bytes) == (
            max(whole.live),
            whole.buffer_bytes,
            whole.host_bytes,
        )
        return program

    monkeypatch.setattr(Lowering, "_trial", both)
    batch = torch.randn(128, 16), torch.randint(64, (128,))
    given = {"hardware": "laptop", "compute": "aten"}
    with pytest.raises(MemoryBudgetError) as refused:
        report(Net(), batch, 2, memory_budget_bytes=1, **given)
    rest = int(re.search(r"([\d,]+) bytes are at rest", str(refused.value)).group(1).replace(",", ""))
    torch._dynamo.reset()
    with contextlib.suppress(MemoryBudgetError):  # all is tried where nothing fits
        report(Net(), batch, 2, memory_budget_bytes=rest + 4096, **given)
    assert any(tried)
