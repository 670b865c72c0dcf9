"""Modes that a user enters around an uncompiled sharded model see the operators of the model, and keep no whole weight."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from dist.cases import Cases
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import zero_compiler as zero

pytestmark = pytest.mark.dist
cases = Cases(__name__)

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
asked: Counter[str] = Counter()


class Net(nn.Module):
    """A function of it is a checkpoint of its own, which saves what ``saved`` says."""

    def __init__(self, saved: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.saved = nn.Linear(6, 6), nn.Linear(6, 6), saved

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x)))) @ self.first.weight

    def policy(self, ctx: object, op: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
        asked[str(op)] += 1
        return CheckpointPolicy.MUST_SAVE if self.saved(op) else CheckpointPolicy.PREFER_RECOMPUTE

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(
            self.part,
            x,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(self.policy),
        )


def everything(op: object) -> bool:
    return True


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Of the mean loss of all ranks, of which each has the same ``x``."""
    model(x).square().mean().backward()
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]


@cases.add
def selective_checkpoints_of_a_function_of_the_model(rank: int) -> list[str]:
    errors = []
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    for saved in (PRODUCTS.__contains__, everything):
        asked.clear()
        wanted = gradients(Net(saved), x)
        of_the_model = dict(asked)
        for stage in range(4):
            asked.clear()
            found = gradients(zero.shard(Net(saved), stage=stage, device="cpu"), x)
            if not all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, wanted, strict=True)):
                errors.append(f"stage {stage}: other gradients")
            if dict(asked) != of_the_model:
                errors.append(f"stage {stage}: the policy was asked of {dict(asked)}, not of {of_the_model}")
    return errors


class Refuses(TorchDispatchMode):
    """What compares or copies is refused."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket in (torch.ops.aten.ne, torch.ops.aten.any, torch.ops.aten.stack):
            raise AssertionError(f"{func} is seen")
        return func(*args, **kwargs or {})


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[getattr(func, "__name__", str(func))] += 1
        return func(*args, **kwargs or {})


@cases.add
def comparisons_of_copies_are_not_seen(rank: int) -> list[str]:
    model = zero.shard(nn.Linear(6, 6), stage=3, device="cpu")
    with Refuses(), Functions() as functions:
        model(torch.ones(2, 6)).sum().backward()
    return [f"{name} is seen" for name in ("ne", "any", "stack") if functions.seen[name]]


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Any:
        self.layer.weight.numpy(force=True)[...] = 0
        return self.layer(x)


@cases.add
def a_write_is_found_inside_a_mode(rank: int) -> list[str]:
    with Refuses():
        try:
            zero.shard(Writes(), stage=3, device="cpu")(torch.ones(2, 6))
        except zero.errors.ShardError as error:
            return [] if "writes to parameter 'layer.weight'" in str(error) else [str(error)]
    return ["no error"]


@pytest.mark.parametrize("name", cases.names)
def test_modes_around_an_uncompiled_model(name: str) -> None:
    cases.check(name)
