"""Second derivatives and transforms of uncompiled models on two ranks, and parameters that are given other memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import whole
from dist.cases import Cases
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.func import functional_call, grad, hessian, jacrev, vmap

import zero_compiler as zero
from zero_compiler.errors import ShardError

pytestmark = [pytest.mark.dist, pytest.mark.slow]

cases = Cases(__name__)


class Net(nn.Module):
    """Rows that do not divide, a tied weight and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x))))) * self.scale


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def data(rank: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))


def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Of a critic: the norm of its gradient with respect to its input is to be 1."""
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return model(x).square().mean() + (g.norm(dim=1) - 1).square().mean()


def physics(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (
        vmap(hessian(lambda v: model(v).sum()))(x).square().sum()
        + vmap(grad(lambda v: model(v).square().sum()))(x).square().mean()
    )


def check(where: str, model: nn.Module, plain: nn.Module) -> list[str]:
    errors = []
    for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        got, want = p.grad, q[1].grad
        if (got is None) != (want is None):
            errors.append(f"{where}: {name} has {'no' if got is None else 'a'} gradient")
        elif want is not None and not torch.allclose(whole(got), want, rtol=1e-4, atol=1e-5):
            errors.append(
                f"{where}: gradient of {name} is {whole(got).flatten()[:3]}, not {want.flatten()[:3]}"
            )
    return errors


@cases.add
def a_loss_of_derivatives(rank: int) -> list[str]:
    errors = []
    for stage in range(4):
        for loss in (penalty, physics):
            plain, model = net(), zero.shard(net(), stage=stage)
            (sum(loss(plain, data(r)) for r in range(2)) / 2).backward()
            with zero.no_sync(model):
                loss(model, data(rank)).backward()
            model.zero_grad()
            loss(model, data(rank)).backward()
            errors += check(f"stage {stage}: {loss.__name__}", model, plain)
    return errors


@cases.add
def a_loss_of_gradients_of_parameters(rank: int) -> list[str]:
    """Of their mean over ranks; once more derived from, too."""
    errors = []

    def steepness(model: nn.Module, mean: torch.Tensor) -> torch.Tensor:
        grads = torch.autograd.grad(mean, list(model.parameters()), create_graph=True)
        total = sum((whole_of(g) ** 2).sum() for g in grads)
        again = torch.autograd.grad(total, model.last.weight, create_graph=True)[0]
        return mean + total + (whole_of(again) ** 2).sum()

    for stage in range(4):
        plain, model = net(), zero.shard(net(), stage=stage)
        steepness(plain, sum(plain(data(r)).square().mean() for r in range(2)) / 2).backward()
        steepness(model, model(data(rank)).square().mean()).backward()
        errors += check(f"stage {stage}", model, plain)
    return errors


def whole_of(g: torch.Tensor) -> torch.Tensor:
    return g.full_tensor() if isinstance(g, DTensor) else g


@cases.add
def a_loss_after_a_step(rank: int) -> list[str]:
    """Meta-learning: each rank's loss is that of its own data, with weights that the mean of gradients has stepped."""
    errors = []

    def averaged(t: torch.Tensor) -> torch.Tensor:
        return t.full_tensor(grad_placements=[Partial("avg")]) if isinstance(t, DTensor) else t

    def stepped(model: nn.Module, mean: torch.Tensor) -> dict[str, torch.Tensor]:
        params = dict(model.named_parameters())
        grads = torch.autograd.grad(mean, list(params.values()), create_graph=True)
        return {n: averaged(p) - 0.1 * averaged(g) for (n, p), g in zip(params.items(), grads, strict=True)}

    def after(model: nn.Module, params: dict[str, torch.Tensor], r: int) -> torch.Tensor:
        return functional_call(model, params, (data(r + 2),)).square().mean()

    for stage in range(4):
        plain, model = net(), zero.shard(net(), stage=stage)
        params = stepped(plain, sum(plain(data(r)).square().mean() for r in range(2)) / 2)
        (sum(after(plain, params, r) for r in range(2)) / 2).backward()
        after(model, stepped(model, model(data(rank)).square().mean()), rank).backward()
        errors += check(f"stage {stage}", model, plain)
    return errors


@cases.add
def transforms_of_inputs(rank: int) -> list[str]:
    errors = []
    x = data(rank)
    ways: dict[str, Callable[[Any], Any]] = {
        "grad": lambda call: grad(lambda v: call(v).sum())(x[0]),
        "vmap(grad)": lambda call: vmap(grad(lambda v: call(v).sum()))(x),
        "jacrev": lambda call: jacrev(call)(x[0]),
    }
    plain = net()
    for stage in (0, 2, 3):
        torch._dynamo.reset()
        model = zero.shard(net(), stage=stage, compute="aten")
        calls = {"eager": lambda way, m=model: way(m)}
        if stage == 3:
            calls["compiled"] = lambda way, m=model: torch.compile(lambda: way(m), backend="zero")()
        for how, call in calls.items():
            for name, way in ways.items():
                if not torch.allclose(call(way), way(plain), rtol=1e-4, atol=1e-5):
                    errors.append(f"stage {stage}, {how}: {name} differs")
    return errors


@cases.add
def gradients_of_each_sample(rank: int) -> list[str]:
    """Of this rank's samples, with respect to whole weights: they are its own, and no rank waits for another one."""
    errors, x, names = [], data(rank), [name for name, _ in net().named_parameters()]

    def of_each(model: nn.Module, params: dict[str, torch.Tensor]) -> Any:
        return vmap(grad(lambda params, v: functional_call(model, params, (v,)).square().sum()), (None, 0))(
            params, x
        )

    plain = net()
    want = of_each(plain, {name: plain.get_parameter(name).detach() for name in names})
    for stage in (0, 3):
        model = zero.shard(net(), stage=stage)
        full = {name: whole(model.get_parameter(name)).detach() for name in names}
        found = [of_each(model, full) if rank == 0 or stage == 3 else want]  # of stage 0 one rank alone
        if stage == 3:
            try:
                of_each(model, {name: model.get_parameter(name) for name in names})
                errors.append("gradients with respect to shards")
            except ShardError as error:
                errors += [] if "full_tensor" in str(error) else [str(error)]
        with zero.gathered(model):
            found.append(of_each(model, dict(model.named_parameters())))
        for each in found:
            for name in names:
                if not torch.allclose(each[name], want[name], rtol=1e-4, atol=1e-5):
                    errors.append(f"stage {stage}: {name} is {each[name].flatten()[:3]}")
        model(x).sum().backward()
    return errors


@cases.add
def other_memory(rank: int) -> list[str]:
    """Whoever refers to a parameter goes on with it."""
    errors = []
    values = {k: v.clone() for k, v in net().state_dict().items()}
    for stage in range(4):
        torch._dynamo.reset()
        with torch.device("meta"):
            model = Net()
        for p in model.parameters():
            assert p.is_meta
        zero.shard(model, stage=stage, device="cpu", compute="aten")
        params = list(model.parameters())
        refs, opt = [weakref.ref(p) for p in params], torch.optim.SGD(params, lr=0.1)
        model.to_empty(device="cpu")
        model.load_state_dict(values)
        plain, call = net(), torch.compile(model, backend="zero")
        theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
        for how in ("to_empty", "assign", "assign of whole DTensors"):
            where = f"stage {stage}, {how}"
            plain.load_state_dict(values)
            if how == "assign":
                model.load_state_dict({k: v.clone() for k, v in values.items()}, assign=True)
            elif how != "to_empty":
                mesh = params[0].device_mesh
                state = {k: distribute_tensor(v.clone(), mesh, [Replicate()]) for k, v in values.items()}
                model.load_state_dict(state, assign=True)
            if any(p is not r() for p, r in zip(model.parameters(), refs, strict=True)):
                errors.append(f"{where}: a parameter is another object")
            if model.first.weight is not model.second.weight:
                errors.append(f"{where}: tied weights are not tied any more")
            for run in (model, call):
                (sum(plain(data(r)).square().mean() for r in range(2)) / 2).backward()
                run(data(rank)).square().mean().backward()
                errors += check(where, model, plain)
                for o in (opt, theirs):
                    o.step()
                    o.zero_grad()
        for run in (model, call):
            loss = run(data(rank)).square().mean()
            model.load_state_dict({k: v.clone() for k, v in values.items()}, assign=True)
            try:
                loss.backward()
                errors.append(f"stage {stage}: a backward of weights that were replaced")
            except ShardError as error:
                if "was replaced between forward and backward" not in str(error):
                    errors.append(str(error))
    return errors


@pytest.mark.parametrize("name", cases.names)
def test_derivatives_and_memory_are_those_of_plain_pytorch(name):
    cases.check(name)
