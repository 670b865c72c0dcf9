"""A weight that compiled code reads: one node of Dynamo's graph, which means the full weight wherever it runs."""

from __future__ import annotations

import pytest
import torch
from null.small import batch, net
from torch import nn
from torch.distributed.tensor import DTensor

import zero_compiler as zero
from zero_compiler.errors import ShardError
from zero_compiler.params.weight_op import weight


def seen_by_dynamo(model, x):
    """Graphs that Dynamo captures; what it captured runs as it is."""
    torch._dynamo.reset()
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm.graph)
        return gm.forward

    return torch.compile(model, backend=backend)(x), graphs


def test_one_node_a_read():
    model = zero.shard(net(), stage=3)
    out, (graph,) = seen_by_dynamo(model, batch())
    read = [n.args[2] for n in graph.find_nodes(op="call_function", target=weight)]
    assert set(read) == {name for name, _ in model.named_parameters()}
    assert read.count("first.weight") == 1
    assert not graph.find_nodes(op="call_method", target="to_local")
    torch.testing.assert_close(out, net()(batch()), rtol=0, atol=0)


def test_it_means_the_full_weight_outside_of_a_graph():
    plain, model = net(), zero.shard(net(), stage=3)
    key = model._zero.sharded_model.key
    for name, param in model.named_parameters():
        full = weight(param, key, name)
        assert not isinstance(full, DTensor)
        assert full.requires_grad
        assert torch.equal(full, dict(plain.named_parameters())[name])
    full.sum().backward()
    assert torch.equal(param.grad._local_tensor, torch.ones_like(param._local_tensor))


def test_another_parameter_in_its_place_is_refused_by_every_backend():
    for backend in ("eager", "zero"):
        torch._dynamo.reset()
        model = zero.shard(net(), stage=3).double()
        with pytest.raises(
            ShardError, match="was sharded as torch.float32 on cpu, and is torch.float64 on cpu now"
        ):
            torch.compile(model, backend=backend)(batch().double())


def test_one_of_another_shape_under_two_names_is_refused():
    """Both names are looked at, not only the first."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False)

        def forward(self, x):
            return self.a(x) + self.b(x)

    for first, second in (("a", "b"), ("b", "a")):
        torch._dynamo.reset()
        model = zero.shard(Two(), stage=3)
        getattr(model, second)._parameters["weight"] = getattr(model, first)._parameters["weight"]
        with pytest.raises(ShardError, match=f"parameter '{second}.weight' was sharded with shape"):
            torch.compile(model, backend="zero")(torch.ones(2, 4))
