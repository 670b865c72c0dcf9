"""What passes make new nodes with."""

import random

import torch
from null.graphs import Build, aten
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from zero_compiler.ir import facts
from zero_compiler.passes import emitter


def test_an_emitter_looks_at_no_more_of_a_longer_graph(monkeypatch):
    """A pass makes one for every layer that it rewrites."""

    def deep(x):
        for _ in range(100):
            x = torch.sin(x)
        return x

    mode = FakeTensorMode()
    with mode:
        x = torch.empty(4)
    graph = make_fx(deep)(x).graph
    looked = []
    value = facts.value
    monkeypatch.setattr(emitter.facts, "value", lambda n: looked.append(n) or value(n))
    made = emitter.Emitter(graph, next(iter(graph.nodes)))
    assert made.mode is mode
    assert len(looked) == 1


def test_equal_operators_on_operands_of_one_layout_share_a_value_where_that_is_asked():
    """To run an operator on fake values takes longer than all else that is done for a node."""
    b = Build(w=(4, 3))
    x, y = b.input("x", 4, 3), b.input("y", 4, 3)
    b.done(x, y)
    results: facts.Results = {}
    facts.share_results(b.graph, results)
    emit = emitter.Emitter(b.graph, x)
    with b.graph.inserting_before(next(iter(b.graph.find_nodes(op="output")))):
        one, other = (emit(aten.add.Tensor, n, 1) for n in (x, y))
        assert facts.value(one) is facts.value(other)
        assert facts.value(emit(aten.add.Tensor, x, 1.0)) is not facts.value(one)
        turned = emit(aten.t.default, x)
        assert facts.value(emit(aten.add.Tensor, turned, 1)).shape == (3, 4)
    assert len(results) == 4


def test_a_view_is_tried_where_torch_makes_one():
    """Of tensors of random sizes and strides; a copy is made at once where torch would refuse."""
    draw = random.Random(0)
    found = set()
    for _ in range(2000):
        shape = [draw.choice((1, 2, 3, 4)) for _ in range(draw.randint(0, 4))]
        base = torch.empty([n + draw.randint(0, 1) for n in shape])
        x = base[tuple(slice(n) for n in shape)].permute(draw.sample(range(len(shape)), len(shape)))
        left, sizes = x.numel(), []
        while left > 1 or draw.random() < 0.2:
            sizes.append(draw.choice([n for n in (1, 2, 3, 4, 6, 12, left) if left % n == 0]))
            left //= sizes[-1]
        try:
            x.view(sizes)
            made = True
        except RuntimeError:
            made = False
        assert emitter._is_view(x, sizes) == made, (x.shape, x.stride(), sizes)
        found.add(made)
    assert found == {True, False}
