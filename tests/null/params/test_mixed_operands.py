"""Whole tensors beside sharded parameters outside of a forward: a sentence that says what to write, and on them alone."""

from __future__ import annotations

import pytest
import torch
from null.small import batch, mlp
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication

import zero_compiler as zero
from zero_compiler.errors import ShardError

COMPUTES = {
    "add_": lambda p, w: p.data.add_(w),
    "of a copy": lambda p, w: p.data.clone().sub_(w),
    "product": lambda p, w: p.detach() * w,
    "of a loss": lambda p, w: (p * 2 + w).sum(),
    "copy_": lambda p, w: p.data.copy_(w),
    "copy_ from": lambda p, w: w.copy_(p.data),
    "average": lambda p, w: w.lerp_(p.data, 0.1),
    "comparison": lambda p, w: torch.allclose(p, w),
    "linear": lambda p, w: nn.functional.linear(w, p),
    "list": lambda p, w: torch._foreach_add_([p.data], [w]),
    "vector": lambda p, w: torch.cat([p.flatten(), w.flatten()]),
    "gradient": lambda p, w: p.grad.add_(w),
}


@pytest.mark.parametrize("name", COMPUTES)
def test_a_whole_tensor_beside_a_parameter(name):
    model = zero.shard(mlp())
    model(batch()).sum().backward()
    values = torch.ones(6, 4)
    with pytest.raises(
        ShardError, match=r"the sharded parameter '0.weight'.* of shape \[.*zero.gathered\(model, write"
    ):
        COMPUTES[name](model[0].weight, values)
    with zero.gathered(model, write=True):
        if name != "gradient":
            COMPUTES[name](model[0].weight.detach(), values)


class Merges(nn.Module):
    """As an adapter that was put around a layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.more = layer, nn.Parameter(torch.ones(6, 4))

    def merge_and_unload(self):
        self.merge()
        return self.layer

    def merge(self):
        self.layer.weight.data += self.more.data


def test_the_call_of_a_library_is_named():
    model = zero.shard(mlp())
    before = model[0].weight.full_tensor().detach().clone()
    outer = Merges(model[0])
    with pytest.raises(
        ShardError, match=r"^merge_and_unload\(\) computes with the sharded parameter '0.weight'"
    ):
        outer.merge_and_unload()
    with zero.gathered(outer, write=True):
        outer.merge_and_unload()
    assert torch.equal(model[0].weight.full_tensor(), before + 1)


def test_what_is_not_of_a_sharded_model_is_left_to_torch():
    model = zero.shard(mlp())
    mesh = model[0].weight.device_mesh
    # Of what has no graph, only its shape tells whose it may be: no parameter of a model of another test, which may
    # still live, has this one.
    for other in (torch.ones(31), torch.ones(6, 4, requires_grad=True)):
        with pytest.raises(RuntimeError, match="mixed") as error:
            DTensor.from_local(other, mesh, [Replicate()]) * torch.ones(other.shape)
        assert not isinstance(error.value, ShardError)


def test_what_torch_computes_it_still_does():
    model = zero.shard(mlp())
    param, ones = model[0].weight.detach(), torch.ones(6, 4)
    whole = param.full_tensor()
    assert torch.equal((param * torch.tensor([2.0])).full_tensor(), whole * 2)
    assert torch.equal(
        (param + DTensor.from_local(ones, param.device_mesh, [Shard(0)])).full_tensor(), whole + 1
    )
    with implicit_replication():
        assert torch.equal((param + ones).full_tensor(), whole + 1)
