"""A sharded model, its steps with an optimizer, and the same parameters and states of two of them."""

import sys

import torch
from compare import local
from torch import nn

import zero_compiler as zero

O = torch.optim

MODULE = sys.modules["zero_compiler.optim.optimizer"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.last = nn.Linear(256, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.ones(7, 2), requires_grad=False)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))) * self.scale


def made(**fields):
    torch.manual_seed(0)
    return zero.shard(Net(), **fields)


def steps(model, optimizer, count=4, begin=0, forward=None, schedule=True, clip=None):
    forward = model if forward is None else forward
    scheduler = O.lr_scheduler.StepLR(optimizer, 2, 0.5) if schedule else None
    for i in range(begin, begin + count):
        torch.manual_seed(i)
        forward(torch.randn(8, 64)).square().mean().backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def assert_same(model, optimizer, other_model, other_optimizer):
    for (name, a), b in zip(model.named_parameters(), other_model.parameters(), strict=True):
        assert torch.equal(local(a), local(b)), name
    mine, theirs = optimizer.state_dict(), other_optimizer.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert sorted(mine["state"]) == sorted(theirs["state"])
    for k, states in theirs["state"].items():
        assert list(mine["state"][k]) == list(states)
        for key, value in states.items():
            have = mine["state"][k][key]
            assert type(have) is type(value), key
            assert (
                torch.equal(local(have), local(value)) if isinstance(value, torch.Tensor) else have == value
            ), key
