"""Full weights that a forward keeps, and a later one computes with."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import ShardError

KEEPS = {
    "weight": lambda module: module.weight,
    "view": lambda module: module.weight.t(),
    "detached": lambda module: module.weight.detach(),
    "data": lambda module: module.weight.data,
}


class KeepsFirst(nn.Module):
    """Computes with what its first forward has read."""

    def __init__(self, keep="weight"):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.keep, self.kept = KEEPS[keep], []

    def forward(self, x):
        if not self.kept:
            self.kept.append(self.keep(self.second))
        return self.first(x) @ self.kept[0]


class ReadsAnew(nn.Module):
    """Keeps a weight, computes with it behind a graph break of the same forward, and returns it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        self.last = self.second.weight
        turned = self.last.t()
        torch._dynamo.graph_break()
        return self.first(x) @ self.last + x @ turned, self.second.weight


def _compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, backend="zero", options={"compute": "aten"})


@pytest.mark.parametrize("stage", [0, 3])
def test_a_compiled_forward_refuses_a_weight_that_gives_no_gradient(stage):
    model = zero.shard(KeepsFirst(), stage=stage)
    call, x = _compiled(model), torch.ones(2, 4)
    with torch.no_grad():
        first = call(x)
        assert torch.equal(call(x), first)  # unchanged, and nobody asks for a gradient
    with pytest.raises(
        ShardError, match=r"weight 'second\.weight' as an earlier forward has read and kept it"
    ):
        call(x)


@pytest.mark.parametrize("keep", KEEPS)
def test_a_compiled_forward_refuses_what_is_stale(keep):
    model = zero.shard(KeepsFirst(keep), stage=3)
    call, x = _compiled(model), torch.ones(2, 4)
    with torch.no_grad():
        call(x)
        model.second.weight.mul_(2)
        with pytest.raises(ShardError, match=r"weight 'second\.weight' as an earlier forward"):
            call(x)


@pytest.mark.parametrize("keep", KEEPS)
def test_an_eager_forward_says_once_that_memory_is_held(keep, caplog):
    # Computed in another dtype, so that one rank has copies too.
    model = zero.shard(KeepsFirst(keep), stage=3, param_dtype=torch.bfloat16)
    x = torch.ones(2, 4)
    with caplog.at_level(logging.WARNING), torch.no_grad():
        model(x)
        model(x)
        assert caplog.messages == []
        for param in model.parameters():
            param.mul_(2)
        model(x)
        model.second.weight.mul_(2)
        model(x)
    (said,) = caplog.messages
    assert "memory of weight 'second.weight' that an earlier forward has read is still held" in said


def test_a_compiled_forward_refuses_what_was_said_of_eager_code(caplog):
    model = zero.shard(KeepsFirst(), stage=3, param_dtype=torch.bfloat16)
    x = torch.ones(2, 4)
    with torch.no_grad():
        model(x)
        model.second.weight.mul_(2)
        model(x)
        assert "still held" in caplog.text
        with pytest.raises(ShardError, match=r"weight 'second\.weight' as an earlier forward"):
            _compiled(model)(x)


@pytest.mark.parametrize("compiled", [False, True])
def test_weights_that_are_read_anew_train_as_in_plain_pytorch(compiled, caplog):
    plain = ReadsAnew()
    model = zero.shard(copy.deepcopy(plain), stage=3)
    call = _compiled(model) if compiled else model
    with caplog.at_level(logging.WARNING):
        for of, fn in ((plain, plain), (model, call)):
            with torch.no_grad():
                fn(torch.ones(2, 4))
            opt = torch.optim.SGD(of.parameters(), lr=0.1)
            of.losses = []
            for step in range(3):
                out, weight = fn(torch.full((2, 4), step + 1.0))
                loss = out.square().mean() + weight.square().sum()
                loss.backward()
                opt.step()
                opt.zero_grad()
                of.losses.append(loss.item())
                del out, weight, loss
                of.last = None
    assert model.losses == pytest.approx(
        plain.losses, rel=1e-6
    )  # gradients of two uses add up in another order
    assert "still held" not in caplog.text
