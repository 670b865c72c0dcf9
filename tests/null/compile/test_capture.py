"""Within a forward a weight is a parameter: what a forward does with one trains as in plain PyTorch."""

from __future__ import annotations

import copy
import gc
import logging
import weakref

import pytest
import torch
from compare import whole
from marks import thorough
from null import forms
from null.forms import FORMS, Weights
from null.small import ATEN, both_ways
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_compiler as zero
from zero_compiler.compile import capture
from zero_compiler.errors import ShardError

X = torch.linspace(-1, 1, 12).view(3, 4)


def called(model, how="eager", **fields):
    """The sharded model, ready to be called."""
    torch._dynamo.reset()
    model = zero.shard(model, **fields)
    return torch.compile(model, backend="zero", options=ATEN) if how == "compiled" else model


def check(name, how, tied=False, dtype=None, stage=3):
    """Two backwards of the form, beside plain PyTorch: output and gradients, missing ones too."""
    plain = Weights(FORMS[name], tied)
    model = copy.deepcopy(plain)
    call = called(model, how, stage=stage, param_dtype=dtype)
    plain = plain.to(dtype or torch.float32)
    close = (
        {"rtol": 0.05, "atol": 0.05} if dtype else {}
    )  # plain PyTorch adds both gradients in half precision
    for step in range(2):
        x = X + step
        outs = plain(x.to(dtype or x.dtype)), call(x)
        torch.testing.assert_close(outs[1], outs[0])
        for out in outs:
            out.float().square().sum().backward()
    # A second name of a weight that plain PyTorch has registered is the same parameter.
    for (n, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), n
        if p.grad is not None:
            torch.testing.assert_close(whole(q.grad), p.grad.float(), **close, msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", FORMS)
def test_eager(name, tied):
    for stage in range(4):
        check(name, "eager", tied, stage=stage)
    check(name, "eager", tied, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", ["all_of_a_list", pytest.param("a_copied_model", marks=pytest.mark.slow)])
def test_compiled(name):
    check(name, "compiled", tied=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if k % 3 == 0 else thorough(n)[0] for k, n in enumerate(FORMS)])
def test_compiled_at_stages_and_in_half_precision(name):
    check(name, "compiled", tied=True)
    check(name, "compiled", stage=0)
    check(name, "compiled", stage=1, dtype=torch.bfloat16)


def test_what_a_weight_is_in_an_eager_forward():
    def form(m, x):
        w = m.own
        assert isinstance(
            w, nn.Parameter
        )  # of a class that says what is written to it, since this code reads .data
        assert w.requires_grad
        assert not w.grad_fn
        assert type(w @ w) is type(w.detach()) is type(w.t()) is torch.Tensor
        seen = {id(m.a.weight): 1}
        assert id(m.b.weight) in seen
        return x @ w

    called(Weights(form, tied=True))(X).sum().backward()


@pytest.mark.slow
@both_ways
def test_a_frozen_weight_is_a_parameter_without_gradient(how):
    def form(m, x):
        assert isinstance(m.own, nn.Parameter)
        assert not m.own.requires_grad
        return forms.through(x, nn.ParameterList([m.own, m.a.weight]))

    model = Weights(form)
    model.own.requires_grad_(False)
    called(model, how)(X).sum().backward()
    assert model.own.grad is None
    assert model.a.weight.grad is not None


@pytest.mark.slow
def test_a_weight_lives_as_long_as_the_call_that_read_it():
    """Without gradients nothing else holds it: an evaluation of many layers needs one of them at a time."""
    read = []

    class Layer(nn.Linear):
        def forward(self, x):
            gc.collect()
            alive = [r() for r in read]
            assert all(a is None for a in alive)
            read.append(weakref.ref(self.weight))
            assert read[-1]() is self.weight
            return super().forward(x)

    model = zero.shard(nn.Sequential(*(Layer(4, 4) for _ in range(3))))
    with torch.no_grad():
        model(X)
    assert len(read) == 3


def test_a_weight_that_was_written_to_is_read_anew():
    def form(m, x):
        before = m.own.sum().item()
        with torch.no_grad():
            m._parameters["own"].add_(1)
        assert abs(m.own.sum().item() - before - 16) < 1e-4
        return x @ m.own

    called(Weights(form), param_dtype=torch.float64)(X)


def test_what_is_lent_to_a_layer_ends_no_graph():
    def form(m, x):
        return torch.func.functional_call(m.a, {"weight": m.own * 2}, (x,))

    model = zero.shard(Weights(form))
    torch._dynamo.reset()
    torch.compile(model, backend="zero", options=ATEN, fullgraph=True)(X).sum().backward()
    assert model.own.grad is not None
    assert model.a.weight.grad is None


def test_what_is_done_behind_a_forward_in_parts_is_not_compiled():
    counters = torch._dynamo.utils.counters
    counters.clear()
    called(Weights(FORMS["across_a_graph_break"]), "compiled")(X).sum().backward()
    breaks = [reason for reason in counters["graph_break"] if "grad_fn" in reason]
    assert not breaks


@pytest.mark.slow
@both_ways
def test_a_weight_in_the_place_of_another_parameter_is_refused(how):
    def form(m, x):
        m.b.weight = m.own
        return m.b(x)

    with pytest.raises(
        ShardError, match=r"assigns a full weight to parameter 'b\.weight': tie parameters before"
    ):
        called(Weights(form), how)(X)


@pytest.mark.slow
@both_ways
def test_another_name_is_none_of_the_model(how):
    model = Weights(FORMS["another_name"])
    call = called(model, how)
    names = [n for n, _ in model.named_parameters()]
    call(X)
    assert [n for n, _ in model.named_parameters()] == names


# What is not to be reported: the gradient is missing in plain PyTorch too, or is not missing.
SILENT = {
    "all of it": lambda m, x: x @ m.own,
    "detached": lambda m, x: x @ m.own.detach() + x @ m.a.weight,
    "values": lambda m, x: x @ m.own.data + x @ m.a.weight,
    "not used": lambda m, x: (m.own.sum() * 0, x @ m.a.weight)[1],
    "not differentiable": lambda m, x: x @ m.a.weight + m.own.argmax(),
    "two outputs": lambda m, x: (x @ m.a.weight, x @ m.own),
    "checkpoint": lambda m, x: checkpoint(lambda y: m.a(y).relu(), x, use_reentrant=False) @ m.own,
    "under no_grad": FORMS["read_under_no_grad"],
    "around one": FORMS["a_parameter_around_one"],
    "behind a break": FORMS["across_a_graph_break"],
}


def reports(caplog):
    return [r.getMessage() for r in caplog.records if "would give it a gradient" in r.getMessage()]


@pytest.mark.slow
@pytest.mark.parametrize("name", SILENT)
def test_nothing_is_reported_of_what_plain_pytorch_does_too(name, caplog):
    with caplog.at_level(logging.WARNING, "zero_compiler"):
        model = Weights(SILENT[name])
        model.b.weight.requires_grad_(False)
        call = called(model, "compiled")
        x = X.clone().requires_grad_()

        def loss():
            out = call(x)
            return (out[0] if isinstance(out, tuple) else out).sum()

        with torch.no_grad():
            loss()
        with zero.no_sync(model):
            loss().backward()
        loss().backward()
        torch.autograd.grad(loss(), x)
        first = loss()
        first.backward(retain_graph=True)
        first.backward()
    assert not reports(caplog)


@pytest.mark.slow
def test_a_gradient_that_capture_loses_is_reported(caplog, monkeypatch):
    monkeypatch.setattr(capture, "_read_with_gradients", lambda gm: None)
    with caplog.at_level(logging.WARNING, "zero_compiler"):
        called(Weights(FORMS["read_under_no_grad"]), "compiled")(X).sum().backward()
    (said,) = reports(caplog)
    assert "parameter 'own'" in said
