"""Hooks that a forward registers on weights and on what it computes: given the gradients of plain PyTorch, or refused."""

from __future__ import annotations

import copy

import pytest
import torch
from null.small import ATEN
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import CaptureError, ShardError
from zero_compiler.params.modules import sharded_models_of


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))


class AfterARead(Layers):
    def forward(self, x):
        h = x @ self.weight
        self.weight.register_hook(lambda g: g * 2)
        self.weight.register_hook(lambda g: g + 1)
        return self.first(h) @ self.weight


class OfALayer(Layers):
    def forward(self, x):
        self.first.weight.register_hook(lambda g: g * 2)
        return self.first(x) @ self.weight


class BehindABreak(Layers):
    def forward(self, x):
        h = self.first(x)
        torch._dynamo.graph_break()
        self.weight.register_hook(lambda g: g * 2)
        return h @ self.weight


class OnWhatIsComputed(Layers):
    def forward(self, x):
        h = self.first(x)
        h.register_hook(lambda g: g * 2)
        return h @ self.weight


class BeforeABreak(Layers):
    def forward(self, x):
        self.weight.register_hook(lambda g: g * 2)
        torch._dynamo.graph_break()
        return self.first(x) @ self.weight


class ByEagerCode(Layers):
    @torch._dynamo.disable
    def hook(self):
        self.weight.register_hook(lambda g: g * 2)

    def forward(self, x):
        h = self.first(x)
        self.hook()
        return h @ self.weight


class ByEagerCodeAfterIt(ByEagerCode):
    def forward(self, x):
        h = self.first(x) @ self.weight
        self.hook()
        return h.relu()


def gradients(model, call):
    call(torch.ones(2, 4)).sum().backward()
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", [AfterARead, OfALayer, BehindABreak, OnWhatIsComputed])
def test_gradients_are_those_of_plain_torch(kind, compiled):
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = kind()
    model = zero.shard(copy.deepcopy(plain), **ATEN)
    call = torch.compile(model, backend="zero") if compiled else model
    for got, want in zip(gradients(model, call), gradients(plain, plain), strict=True):
        torch.testing.assert_close(got, want)
    assert not sharded_models_of(model)[
        0
    ].scope.calls  # the forward has ended, and attributes are shards again
    assert model.weight.is_leaf


@pytest.mark.slow
@pytest.mark.parametrize("kind", [BeforeABreak, ByEagerCode, ByEagerCodeAfterIt])
def test_a_hook_that_a_graph_break_would_lose_is_refused(kind):
    torch._dynamo.reset()
    plain = kind()
    model = zero.shard(copy.deepcopy(plain), **ATEN)
    with pytest.raises((CaptureError, ShardError), match="registers a hook on parameter 'weight'"):
        torch.compile(model, backend="zero")(torch.ones(2, 4))
    for got, want in zip(
        gradients(model, model), gradients(plain, plain), strict=True
    ):  # not compiled it works
        torch.testing.assert_close(got, want)
