"""GradScaler on gradients of several placements: what overflows in any of them skips the step."""

from __future__ import annotations

import pytest
import torch
from null.small import batch, grads, net

import zero_compiler as zero


@pytest.mark.parametrize("name", [None, "scale", "first.weight"])
def test_any_gradient_that_is_not_finite_skips_the_step(name):
    """The scalar is whole on every rank; the rows of the others are cut."""
    model = zero.shard(net())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(batch()).sum()).backward()
    scaled = grads(model)
    if name is not None:
        dict(model.named_parameters())[name].grad.to_local().fill_(float("inf"))
    before = {n: p.full_tensor().clone() for n, p in model.named_parameters()}
    scaler.unscale_(opt)
    if name is None:
        for n, grad in grads(model).items():
            torch.testing.assert_close(grad, scaled[n] / 4)
    scaler.step(opt)
    scaler.update()
    moved = [n for n, p in model.named_parameters() if not torch.equal(p.full_tensor(), before[n])]
    assert bool(moved) == (name is None)
    assert scaler.get_scale() == (4.0 if name is None else 2.0)
