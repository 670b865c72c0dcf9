"""Sizes that may change, as nodes that compute them."""

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from zero_compiler.ir import facts
from zero_compiler.passes.emitter import Emitter

SIZES = {
    "sum": lambda s, t: 2 * s + t - 1,
    "square": lambda s, t: s * s * t,
    "floor": lambda s, t: (s + 1) // 2 * t,
    "rest": lambda s, t: (s + t) % 4,
    "larger": lambda s, t: torch.sym_max(s, t // 2),
    "smaller": lambda s, t: torch.sym_min(s, 4),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_size_is_computed_from_the_inputs(name):
    x = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.empty(6, 10), static_shapes=False)
    size = SIZES[name](*x.shape)
    graph = fx.Graph()
    node = graph.placeholder("x")
    facts.set_value(node, x)
    made = Emitter(graph, node).number(size)
    assert facts.value(made).node.expr == size.node.expr
    graph.output(made)
    graph.lint()
    run = fx.Interpreter(fx.GraphModule({}, graph))
    for s, t in ((6, 10), (3, 17), (8, 5)):
        assert run.run(torch.empty(s, t)) == SIZES[name](s, t)
