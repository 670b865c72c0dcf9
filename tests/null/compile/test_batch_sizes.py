"""Which collectives run does not depend on how many rows a batch has, one alone among them: ranks may have different
ones, and the last batch of an epoch is what is left."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from zero_compiler.tools.planning import plan


class Attention(nn.Module):
    """Whose products torch writes in other ways for one row than for several."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.of = nn.Linear(16, 16), nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        x = self.inp(x)
        return self.of(x, x, x, need_weights=False)[0].square().mean()


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return torch.tanh(self.b(self.a(x).transpose(0, 1))).square().mean()


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 100)

    def forward(self, x):
        x = torch.tanh(self.body(x[:, 0]))
        return F.cross_entropy(self.head(x), x.new_zeros(x.shape[0], dtype=torch.long))


class Experts(nn.Module):
    """A weight that is expanded over the batch, larger than a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.w = nn.Linear(16, 16), nn.Parameter(torch.randn(64, 16, 1024))

    def forward(self, x):
        return torch.matmul(self.inp(x).unsqueeze(1), self.w).square().mean()


class TiedEnds(nn.Module):
    """One weight at both ends, which is read with a bias there."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.body, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.out.weight = self.inp.weight

    def forward(self, x):
        x = checkpoint(lambda h: torch.tanh(self.body(h)), self.inp(x[:, 0]), use_reentrant=False)
        return self.out(x).square().mean()


def _planned(model, rows, **fields):
    torch._dynamo.reset()
    with torch.device("meta"):
        made, x = model(), torch.empty(rows, 5, 16)
    return plan(made, x, 2, compute="aten", **fields)


def _collectives(frames) -> str:
    return "\n".join(p.collectives() for f in frames for p in f.programs.values())


@pytest.mark.slow
@pytest.mark.parametrize("model", [Attention, TimeFirst, Classifier, Experts, TiedEnds])
def test_collectives_are_those_of_a_batch_of_one(model):
    assert _collectives(_planned(model, 1)) == _collectives(_planned(model, 3))


@pytest.mark.slow
@pytest.mark.parametrize("model", [Attention, Classifier, Experts])
def test_collectives_are_those_of_symbolic_sizes(model):
    (one,), (other,) = _planned(model, 3), _planned(model, 3, dynamic=True)
    assert _collectives([one]) == _collectives([other])
    weight = 64 * 16 * 1024 * 4
    # The whole weight would be as many bytes, and be there for each row.
    assert other.saved_bytes < weight
