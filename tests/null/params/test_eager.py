"""Eager gathers and reductions are differentiated again: derivatives of a higher order, beside plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from null.small import ATEN
from null.tensors.test_transforms import X, equal, tied

import zero_compiler as zero
from zero_compiler.errors import GradientError


def penalty(call: Any) -> torch.Tensor:
    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
    return call(x).square().mean() + (g.norm(dim=1) - 1).square().mean()


def steepness(call: Any) -> torch.Tensor:
    params = [p for p in call.parameters() if p.requires_grad]
    grads = torch.autograd.grad(call(X).square().mean(), params, create_graph=True)
    return sum(
        g.full_tensor().square().sum() if hasattr(g, "full_tensor") else g.square().sum() for g in grads
    )


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("loss", [penalty, steepness])
def test_second_derivatives(loss, stage):
    plain, model = tied(), zero.shard(tied(), stage=stage, device="cpu", **ATEN)
    loss(plain).backward()
    loss(model).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        equal(p.grad.full_tensor(), q.grad)
    torch._dynamo.reset()
    call = torch.compile(model, backend="zero")
    with pytest.raises(GradientError, match="call the model that was given to torch.compile"):
        loss(call).backward()
    model.zero_grad()
    with torch.compiler.set_stance("force_eager"):
        loss(call).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        equal(p.grad.full_tensor(), q.grad)


def test_a_third_derivative():
    plain, model = tied(), zero.shard(tied(), device="cpu")
    found = []
    for m in (plain, model):
        p = m.first.weight
        for _ in range(2):
            (p,) = torch.autograd.grad(
                (m(X).square().mean() if p is m.first.weight else p.square().sum()),
                m.first.weight,
                create_graph=True,
            )
        p.square().sum().backward()
        found.append(m.first.weight.grad)
    equal(found[1].full_tensor(), found[0])
