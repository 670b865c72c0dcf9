"""What tests of replicated parameters on several ranks compare: gradients, with those of a plain twin averaged by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn


def compiled(what):
    return torch.compile(what, backend="zero", options={"compute": "aten"})


def rows(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def square(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def same_gradients(ours: nn.Module, twin: nn.Module, where: str = "", averaged: bool = True) -> None:
    """Of ``ours`` those of ``twin``, whose mean over the ranks they are unless not ``averaged``."""
    for (name, p), q in zip(ours.named_parameters(), twin.parameters(), strict=True):
        want = torch.zeros_like(q) if q.grad is None else q.grad.clone()
        if averaged:
            dist.all_reduce(want)
            want /= dist.get_world_size()
        mine = torch.zeros_like(want) if p.grad is None else p.grad
        mine = mine.full_tensor() if isinstance(mine, torch.distributed.tensor.DTensor) else mine
        torch.testing.assert_close(mine, want, msg=lambda m, n=name: f"{where} {n}: {m}")


def compare_and_clear(ours: nn.Module, twin: nn.Module, where: str = "") -> None:
    same_gradients(ours, twin, where)
    ours.zero_grad()
    twin.zero_grad()


def steps(ours: nn.Module, call: Callable[..., torch.Tensor], twin: nn.Module, rank: int, where: str) -> None:
    for step in range(2):
        x = rows(rank, step)
        call(x).backward()
        twin(x).backward()
        compare_and_clear(ours, twin, f"{where}, step {step}:")


class Parts:
    """No module, so that none is a variable of the function that calls it."""

    def __init__(self, *parts: nn.Module) -> None:
        self.parts = parts
        self.calls = [compiled(part) for part in parts]


def gradients_are_means(ours, twin, group=None):
    """Of ``ours`` those of ``twin``, which are summed over the ranks for that."""
    for p, q in zip(ours.parameters(), twin.parameters(), strict=True):
        dist.all_reduce(q.grad, group=group)
        torch.testing.assert_close(p.grad, q.grad / dist.get_world_size(group))
