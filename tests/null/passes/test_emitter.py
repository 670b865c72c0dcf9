"""What passes make new nodes with."""

import torch
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
