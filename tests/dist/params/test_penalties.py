"""Terms of a loss outside of the model's forward."""

from __future__ import annotations

import pytest
import torch
from dist.spawn import run_ranks
from torch import nn
from torch.distributed.tensor import Partial

import zero_compiler as zero

pytestmark = pytest.mark.dist


class Weighted(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l = nn.Linear(4, 4)
        self.v = nn.Parameter(torch.ones(shape))

    def forward(self, x):
        return self.l(x).square().mean()


def _rank(rank, world, shape, stage):
    want, model = Weighted(shape), zero.shard(Weighted(shape), stage=stage, device="cpu")
    step = torch.compile(model, backend="zero", options={"compute": "aten"})
    xs = [torch.randn(3, 4, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    v = model.v.full_tensor(grad_placements=[Partial("avg")])
    (step(xs[rank]) * torch.exp(-v).sum() + v.sum()).backward()
    for x in xs:
        ((want(x) * torch.exp(-want.v).sum() + want.v.sum()) / world).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), want.get_parameter(name).grad)


@pytest.mark.parametrize("shape", [(), (1,), (4, 5)])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_learned_weight_of_the_loss(shape, stage):
    run_ranks(_rank, 2, shape, stage)
