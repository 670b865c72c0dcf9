"""``parameters()`` and ``named_parameters()`` inside a forward: full weights, which train as in plain PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from compare import whole
from marks import thorough
from null.small import both_ways, use
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import zero_compiler as zero

X = torch.linspace(-1, 1, 16).view(4, 4)


def _unused_branch(m, x):
    return m.a(x) + 0.0 * sum(p.sum() for p in m.b.parameters())


def _of_weights_by_name(m, x):
    return m.a(x) + 0.1 * sum(p.square().sum() for n, p in m.named_parameters() if n.endswith("weight"))


def _tied_twice(m, x):
    named = m.named_parameters("a.prefix", remove_duplicate=False)
    return m.a(x) + 0.1 * sum(p.square().sum() for n, p in named if n.startswith("a.prefix."))


def _its_own(m, x):
    of = [*m.parameters(recurse=False), *m.c.parameters(recurse=False)]
    return m.a(x) + 0.1 * sum(p.norm() for p in of)


def _stacked(m, x):
    return m.a(x) + torch.stack([p.sum() for p in m.parameters()]).mean()


def _in_a_row(m, x):
    return m.a(x) * torch.cat([p.view(-1) for p in m.parameters()]).square().mean()


def _as_a_vector(m, x):
    return m.a(x) * nn.utils.parameters_to_vector(m.b.parameters()).square().mean()


def _in_a_dict(m, x):
    return m.a(x) + dict(m.named_parameters())["c.1"].sum() + m.get_parameter("b.bias").sum()


def _made_again(m, x):
    def region(x):
        return torch.tanh(m.a(x)) * sum(p.square().sum() for p in m.b.parameters())

    return checkpoint(region, x, use_reentrant=False)


FORMS = {f.__name__: f for f in (
    _unused_branch, _of_weights_by_name, _tied_twice, _its_own, _stacked, _in_a_row, _as_a_vector, _in_a_dict, _made_again,
)}  # fmt: skip
QUICK = ["_unused_branch", "_tied_twice", "_in_a_row"]


class Reads(nn.Module):
    def __init__(self, form, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.c = nn.ParameterList([nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(3))])
        if tied:
            self.b.weight = self.a.weight
        self.form = form

    def forward(self, x):
        return self.form(self, x)


def check(form, how, tied, **fields):
    torch._dynamo.reset()
    plain = Reads(form, tied)
    model = zero.shard(copy.deepcopy(plain), device="cpu", compute="aten", **fields)
    call = use(model, how)
    for step in range(2):
        outs = plain(X + step), call(X + step)
        torch.testing.assert_close(outs[1], outs[0])
        for out in outs:
            out.sum().backward()
    for (name, p), (same, q) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert name == same
        assert isinstance(q, DTensor)  # outside they are what they were
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(whole(q.grad), p.grad, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", FORMS)
def test_eager(name, tied):
    for stage in (0, 1, 3):
        check(FORMS[name], "eager", tied, stage=stage)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_compiled(name):
    check(FORMS[name], "compiled", tied=True)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [*thorough(False), True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_compiled(name, tied):
    for stage in (1, 3):
        check(FORMS[name], "compiled", tied, stage=stage)


@both_ways
def test_their_dtype_is_what_the_forward_computes_in(how):
    def form(m, x):
        first = next(m.parameters())
        assert first.device == x.device
        return m.a(x.double().to(first.dtype))

    model = zero.shard(Reads(form), device="cpu", compute="aten", param_dtype="bf16")
    out = use(model, how)(X)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert model.a.weight.grad is not None
    assert model.b.weight.grad is None


def test_in_gathered_they_are_whole_in_and_outside_of_a_forward():
    seen = []
    model = zero.shard(Reads(lambda m, x: seen.extend(m.parameters()) or x), device="cpu")
    with zero.gathered(model):
        model(X)
        assert all(p is q for p, q in zip(seen, model.parameters(), strict=True))
        assert not any(isinstance(p, DTensor) for p in seen)


class Made(nn.Module):
    """A parameter made of a weight in the forward, which does not train that."""

    def __init__(self, make) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(4, 4), make

    def forward(self, x):
        return torch.nn.functional.linear(x, self.make(self.layer.weight), self.layer.bias)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        nn.Parameter,
        lambda w: nn.Parameter(w, requires_grad=False),
        lambda w: nn.ParameterList([nn.Parameter(w)])[0],
        lambda w: nn.Parameter(w.detach()),
    ],
)
def test_a_parameter_that_a_forward_makes_of_a_weight(make, compiled):
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Made(make)
    model = zero.shard(copy.deepcopy(plain), device="cpu")
    call = torch.compile(model, backend="zero", options={"compute": "aten"}) if compiled else model
    for _ in range(2):
        x = torch.randn(3, 4)
        loss, want = call(x).square().mean(), plain(x).square().mean()
        torch.testing.assert_close(loss, want)
        loss.backward()
        want.backward()
    assert model.layer.weight.grad is plain.layer.weight.grad is None
    torch.testing.assert_close(model.layer.bias.grad.full_tensor(), plain.layer.bias.grad)
