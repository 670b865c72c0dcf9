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


def to_the_input(loss, x):
    loss.backward(inputs=[x], retain_graph=True)


def of_the_input(loss, x):
    torch.autograd.grad(loss, [x], retain_graph=True)


def of_all(loss, x):
    loss.backward(retain_graph=True)


@pytest.mark.parametrize("backward", [of_all, of_the_input, to_the_input])
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
@pytest.mark.parametrize("how", ["plain", "eager", "compiled"])
def test_whatever_a_backward_is_to_give_it_computes_with_the_weights_of_its_forward(how, frozen, backward):
    model = net() if how == "plain" else zero.shard(net(), stage=3)
    model.second.requires_grad_(not frozen)
    x = batch().requires_grad_()
    loss = use(model, how)(x).square().mean()
    with torch.no_grad():
        model.second.weight.mul_(2)
    for _ in range(2):  # a graph that is kept is asked each time
        with pytest.raises(RuntimeError, match="modified"):
            backward(loss, x)


class Momentum(torch.nn.Module):
    """Another copy of a layer gives the targets, under no_grad."""

    def __init__(self):
        super().__init__()
        self.online, self.target = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        with torch.no_grad():
            targets = self.target(x)
        return (self.online(x) - targets).square().mean()


@pytest.mark.parametrize("how", ["plain", "eager", "compiled"])
def test_what_backward_does_not_compute_with_may_be_written_to(how):
    model = net() if how == "plain" else zero.shard(net(), stage=3)
    model.first.requires_grad_(False)
    loss = use(model, how)(batch()).square().mean()
    with torch.no_grad():
        model.first.weight.mul_(2)
    loss.backward()
    torch.manual_seed(0)
    model = Momentum() if how == "plain" else zero.shard(Momentum(), stage=3)
    loss = use(model, how)(torch.ones(2, 4))
    with torch.no_grad():
        model.target.weight.lerp_(model.online.weight, 0.1)
    loss.backward()
    assert model.target.weight.grad is None
    assert model.online.weight.grad is not None


class Whole(torch.nn.Module):
    """At stage 0, or as a scalar at any, a weight is whole on every rank and is not gathered."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = torch.nn.Linear(4, 4), torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return (self.layer(x).tanh() * self.scale).square().mean()


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
@pytest.mark.parametrize(("stage", "name"), [(0, "layer.weight"), (0, "scale"), (1, "scale"), (3, "scale")])
@pytest.mark.parametrize("how", ["plain", "eager", "compiled"])
def test_weights_that_are_not_gathered(how, stage, name, frozen):
    model = Whole() if how == "plain" else zero.shard(Whole(), stage=stage)
    model.requires_grad_(not frozen)
    x = torch.ones(2, 4, requires_grad=True)
    loss = use(model, how)(x)
    with torch.no_grad():
        model.get_parameter(name).mul_(2)
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()


class Results(torch.nn.Module):
    """Results of a call that autograd knows by other nodes than the one that the call has made."""

    def __init__(self, of):
        super().__init__()
        self.of, self.layer, self.last = of, torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        y = self.last(self.layer(x * 1.0).tanh())
        return self.of(x, y)


def views(x, y):
    return y.view(-1), y.t()


def chunks(x, y):
    return y.chunk(2, -1)


def written(x, y):
    x.add_(y)
    return (x,)


def written_alone(x, y):
    x.add_(y)


@pytest.mark.parametrize("of", [views, chunks, written, written_alone])
@pytest.mark.parametrize("how", ["plain", "eager", "compiled"])
def test_results_that_are_written_to(how, of):
    model = Results(of) if how == "plain" else zero.shard(Results(of), stage=3)
    x = torch.ones(2, 4, requires_grad=True) * 2
    made = use(model, how)(x)
    out = x if made is None else made[0]
    if of is not chunks:  # of which autograd lets none be written to
        out.add_(1)
    with torch.no_grad():
        model.last.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified"):
        out.square().sum().backward()


@pytest.mark.parametrize("result", ["the input", "a view of it"])
@pytest.mark.parametrize("how", ["plain", "eager", "compiled"])
def test_a_result_that_is_an_input_is_not_held_to_the_weights(how, result):
    """What the input was made by outlives the call."""

    def same(x, y):
        return (x if result == "the input" else x.view(-1)), y

    model = Results(same) if how == "plain" else zero.shard(Results(same), stage=3)
    x = torch.ones(2, 4, requires_grad=True) * 2
    for _ in range(2):
        given, y = use(model, how)(x)
        y.sum().backward(retain_graph=True)
        with torch.no_grad():
            model.last.weight.mul_(2)
        given.sum().backward(retain_graph=True)


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
