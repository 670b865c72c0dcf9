"""Small models of one process, in eager use and compiled, and their values and gradients whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

ATEN = {"compute": "aten"}

both_ways = pytest.mark.parametrize("how", ["eager", "compiled"])


class Net(nn.Module):
    """Two layers; the forward also reads a child's weight by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.first(x))
        return self.second(h) * self.scale + (h @ self.second.weight.t()) * 0.5


class Two(nn.Module):
    """`second` is used only where `both` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.second = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        out = self.first(x)
        return (out + self.second(x) if both else out).square().mean()


def net(seed: int = 0, cls: type[nn.Module] = Net) -> Any:
    torch.manual_seed(seed)
    return cls()


def two() -> Any:
    return net(cls=Two)


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def batch(seed: int = 1) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))


def compiled(model: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="zero", options={**ATEN, **options})


def use(model: nn.Module, how: str, **options: Any) -> Any:
    """What is called: the model itself, or compiled."""
    return compiled(model, **options) if how == "compiled" else model


def full(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: full(p).detach().clone() for n, p in model.named_parameters()}


def grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {n: None if p.grad is None else full(p.grad).clone() for n, p in model.named_parameters()}


def same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], msg=lambda m, name=name: f"{name}: {m}")


def train(model: nn.Module, call: Any = None, steps: int = 3, lr: float = 0.1) -> list[float]:
    opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    call = model if call is None else call
    losses = []
    for i in range(steps):
        loss = call(batch(i)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


# Losses of a plain Net.
REFERENCE = train(net())
