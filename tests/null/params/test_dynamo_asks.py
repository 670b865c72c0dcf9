"""What Dynamo asks of modules while it compiles a frame gathers nothing: ranks compile when their own inputs are new."""

from __future__ import annotations

import copy

import pytest
import torch
from null.small import ATEN
from torch import nn

import zero_compiler as zero
from zero_compiler.params import eager
from zero_compiler.sharded.sharded_model import ShardedModel


class Breaks(nn.Module):
    """What stands behind the break is a frame of its own, compiled within a forward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        h = self.first(x)
        torch._dynamo.graph_break()
        if hasattr(self.second, "weight") and getattr(self.second, "bias", None) is None:
            h = self.second(h) + 0.0 * sum(p.sum() for p in self.second.parameters())
        return h @ getattr(self.first, "weight", None)


def whole(model):
    return torch.compile(model, backend="zero", dynamic=False)


def method(model):
    model.compile(backend="zero", dynamic=False)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [whole, pytest.param(method, marks=pytest.mark.slow)])
def test_nothing_is_gathered_beside_what_programs_gather(compiled, monkeypatch):
    gathered = []
    for owner, name in ((ShardedModel, "gather_now"), (eager, "read")):
        monkeypatch.setattr(
            owner, name, lambda *given, **_: gathered.append(given) or pytest.fail("gathered")
        )
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Breaks()
    model = zero.shard(copy.deepcopy(plain), device="cpu", **ATEN)
    call = compiled(model)
    for size in (5, 6):
        x = torch.randn(size, 8)
        call(x).square().sum().backward()
        plain(x).square().sum().backward()
    assert not gathered
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)
