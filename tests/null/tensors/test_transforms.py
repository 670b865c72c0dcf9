"""torch.func's transforms, forward mode and second derivatives over a sharded model, one process, beside plain PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from marks import thorough
from null.small import ATEN
from torch import nn
from torch.autograd import forward_ad
from torch.autograd import functional as classic
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    vjp,
    vmap,
)

import zero_compiler as zero
from zero_compiler.errors import GradientError, ShardError

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
ONE = X[0].clone()


class Tied(nn.Module):
    """A weight that is read twice, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale


def tied() -> Tied:
    torch.manual_seed(0)
    return Tied()


def squared(call: Any) -> Any:
    return lambda v: call(v).square().sum()


def tangent_of(call: Any) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(call(forward_ad.make_dual(ONE, torch.ones(4)))).tangent


INPUTS = {
    "grad": lambda call: grad(squared(call))(ONE),
    "grad_and_value": lambda call: grad_and_value(squared(call))(ONE),
    "vjp": lambda call: vjp(call, ONE)[1](torch.ones(4)),
    "jacrev": lambda call: jacrev(call)(ONE),
    "vmap": lambda call: vmap(call)(X),
    "vmap(grad)": lambda call: vmap(grad(squared(call)))(X),
    "jvp": lambda call: jvp(call, (ONE,), (torch.ones(4),)),
    "jacfwd": lambda call: jacfwd(call)(ONE),
    "hessian": lambda call: hessian(squared(call))(ONE),
    "grad(grad)": lambda call: grad(lambda v: grad(squared(call))(v).sum())(ONE),
}
EAGER = {
    **INPUTS,
    "linearize": lambda call: linearize(call, ONE)[1](torch.ones(4)),
    "forward_ad": tangent_of,
    "functional.jacobian": lambda call: classic.jacobian(call, ONE),
    "functional.hessian": lambda call: classic.hessian(squared(call), ONE),
    "functional.jvp": lambda call: classic.jvp(call, ONE, torch.ones(4)),
    "vectorized": lambda call: classic.jacobian(call, ONE, vectorize=True),
    "of a buffer": lambda call: grad(lambda b: functional_call(call, {"scale": b}, (ONE,)).sum())(
        torch.ones(4)
    ),
}


def equal(found: Any, want: Any) -> None:
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)


# At the stages between, transforms meet nothing else than at these.
@pytest.mark.parametrize("stage", [0, 3, *thorough(1, 2)])
@pytest.mark.parametrize(
    "name", [n if n != "linearize" else pytest.param(n, marks=pytest.mark.slow) for n in EAGER]
)
def test_a_transform_with_respect_to_inputs(name, stage):
    model = zero.shard(tied(), stage=stage, device="cpu")
    equal(EAGER[name](model), EAGER[name](tied()))
    with torch.no_grad():
        found = EAGER[name](model)
        equal(found, EAGER[name](tied()))


@pytest.mark.slow
@pytest.mark.parametrize("name", INPUTS)
def test_a_transform_of_a_compiled_model_and_a_compiled_transform(name):
    model = zero.shard(tied(), device="cpu", **ATEN)
    want = INPUTS[name](tied())
    torch._dynamo.reset()
    equal(INPUTS[name](torch.compile(model, backend="zero")), want)
    for recorded in (True, False):
        torch._dynamo.reset()
        with torch.set_grad_enabled(recorded):
            equal(torch.compile(lambda: INPUTS[name](model), backend="zero", fullgraph=True)(), want)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_gradients_of_parameters_by_way_of_a_transform(how):
    """A loss of derivatives with respect to inputs, as that of an equation of physics."""

    def loss(model: nn.Module) -> torch.Tensor:
        return vmap(grad(squared(model)))(X).square().sum()

    torch._dynamo.reset()
    plain, model = tied(), zero.shard(tied(), device="cpu", **ATEN)
    loss(plain).backward()
    (torch.compile(loss, backend="zero") if how == "compiled" else loss)(model).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            equal(p.grad.full_tensor(), q.grad)


def per_sample(model: nn.Module, params: Any) -> Any:
    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return functional_call(model, params, (x,)).float().square().sum()

    return vmap(grad(loss), in_dims=(None, 0))(params, X)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_gradients_of_each_sample(dtype):
    plain, model = tied(), zero.shard(tied(), device="cpu", param_dtype=dtype)
    want = per_sample(plain, {n: p.detach() for n, p in plain.named_parameters()})
    for shards in (dict(model.named_parameters()), {n: p.detach() for n, p in model.named_parameters()}):
        with pytest.raises(ShardError, match=r"'first.weight' as an argument.*full_tensor.* zero.gathered"):
            per_sample(model, shards)
    found = per_sample(model, {n: p.full_tensor().detach() for n, p in model.named_parameters()})
    torch.testing.assert_close(found, want, **({} if dtype is None else {"rtol": 0.1, "atol": 0.1}))
    with zero.gathered(model):
        equal(per_sample(model, dict(model.named_parameters())), want)
    some = {"first.bias": plain.first.bias.detach()}
    torch.testing.assert_close(
        per_sample(model, some),
        per_sample(plain, some),
        **({} if dtype is None else {"rtol": 0.1, "atol": 0.1}),
    )


@pytest.mark.slow
def test_a_backward_of_several_gradients_at_once():
    model = zero.shard(tied(), device="cpu", **ATEN)
    out = model(ONE)
    with pytest.raises(
        GradientError, match=r"parameter '\w+.\w+', which is sharded.* several gradients at once"
    ):
        torch.autograd.grad(out, list(model.parameters()), torch.eye(4), is_grads_batched=True)
    torch._dynamo.reset()
    with pytest.raises(GradientError, match="a compiled model was given several gradients at once"):
        classic.jacobian(torch.compile(model, backend="zero"), ONE, vectorize=True)


def test_a_graph_of_gradients_under_no_sync():
    model = zero.shard(tied(), device="cpu")
    with zero.no_sync(model), pytest.raises(GradientError, match="outside zero.no_sync"):
        model(X).square().mean().backward(create_graph=True)


@pytest.mark.slow
def test_a_model_of_a_compiled_and_transformed_call_is_trained_as_before():
    plain, model = tied(), zero.shard(tied(), device="cpu", **ATEN)
    torch._dynamo.reset()
    call = torch.compile(model, backend="zero")
    want = copy.deepcopy(plain)
    for _ in range(2):
        equal(grad(squared(call))(ONE), grad(squared(plain))(ONE))
        model.zero_grad()
        call(X).square().mean().backward()
    want(X).square().mean().backward()
    for p, q in zip(model.parameters(), want.parameters(), strict=True):
        equal(p.grad.full_tensor(), q.grad)
