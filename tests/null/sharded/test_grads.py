"""Gradients at rest: each parameter has a tensor of its own."""

from __future__ import annotations

import pytest
import torch
from null.small import batch, grads, net, use
from torch import nn

import zero_compiler as zero


class Same(nn.Module):
    """Both weights and both biases have the same gradient, which a compiler computes once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.second = nn.Linear(4, 3)

    def forward(self, x):
        return self.first(x) + self.second(x)


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_equal_gradients_are_tensors_of_their_own(how):
    plain, model = net(cls=Same), zero.shard(net(cls=Same))
    call = use(model, how)
    for i in range(3):
        plain(batch(i)).square().sum().backward()
        call(batch(i)).square().sum().backward()
    for m in (plain, model):
        torch.nn.utils.clip_grad_value_(m.parameters(), 1.5)
    for name, grad in grads(model).items():
        torch.testing.assert_close(grad, dict(plain.named_parameters())[name].grad)
    pointers = {p.grad.to_local().data_ptr() for p in model.parameters()}
    assert len(pointers) == 4


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_a_gradient_that_an_input_has_too_is_not_shared_with_it(how):
    class Add(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5, 4))

        def forward(self, x):
            return x + self.weight

    model = zero.shard(Add())
    call = use(model, how)
    x = batch().requires_grad_()
    (call(x) * 3).sum().backward()
    model.weight.grad.mul_(0)
    assert torch.equal(x.grad, torch.full((5, 4), 3.0))
