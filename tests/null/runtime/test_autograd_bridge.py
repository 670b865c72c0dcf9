"""Between autograd and a compiled frame: hooks, `autograd.grad`, and weights that change before backward."""

from __future__ import annotations

import contextlib

import pytest
import torch
from null.small import batch, net, use

import zero_compiler as zero


@pytest.mark.parametrize("how", ["plain", "eager", "compiled"])
def test_a_weight_changed_between_forward_and_backward_is_an_error(how):
    model = net() if how == "plain" else zero.shard(net(), stage=3)
    call = use(model, how)
    loss = call(batch()).square().mean()
    with torch.no_grad():
        model.second.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()


@pytest.mark.parametrize("how", ["plain", "compiled"])
def test_a_frozen_weight_may_change_where_backward_does_not_compute_with_it(how):
    for read_in_backward in (True, False):
        model = net() if how == "plain" else zero.shard(net(), stage=3)
        frozen = model.second if read_in_backward else model.first
        frozen.requires_grad_(False)
        loss = use(model, how)(batch()).square().mean()
        with torch.no_grad():
            frozen.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified") if read_in_backward else contextlib.nullcontext():
            loss.backward()


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_hooks_and_autograd_grad_mean_what_they_always_do(how):
    plain, model = net(), zero.shard(net())
    call = use(model, how)
    model.first.weight.register_hook(lambda g: g * 2)
    loss = call(batch()).square().mean()
    grads = torch.autograd.grad(loss, list(model.parameters()))
    expected = torch.autograd.grad(plain(batch()).square().mean(), list(plain.parameters()))
    for (name, p), grad, want in zip(model.named_parameters(), grads, expected, strict=True):
        assert p.grad is None
        torch.testing.assert_close(grad.full_tensor(), want * 2 if name == "first.weight" else want)
    call(batch()).square().mean().backward(inputs=[model.second.weight])
    assert [n for n, p in model.named_parameters() if p.grad is not None] == ["second.weight"]


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_freezing_between_forward_and_backward(how):
    """As in plain PyTorch, what is frozen when its gradient comes gets none."""
    for quiet in (False, True):
        model = zero.shard(net())
        call = use(model, how)
        loss = call(batch()).sum()
        model.first.weight.requires_grad_(False)
        with zero.no_sync(model) if quiet else contextlib.nullcontext():
            loss.backward()
        assert [n for n, p in model.named_parameters() if p.grad is None] == ["first.weight"]
