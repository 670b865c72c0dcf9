"""Curves of training: families on several ranks, each case beside plain data-parallel PyTorch."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from compare import Twin
from dist.spawn import run_ranks
from models import FAMILIES
from torch.utils._pytree import tree_map_only

import zero_compiler as zero

OPTIMIZERS: dict[str, Any] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    # eps=1e-3 is far above rounding: no element is noise divided by noise.
    "adamw": functools.partial(torch.optim.AdamW, lr=3e-3, eps=1e-3, weight_decay=0.1),
}


def captured(model: torch.nn.Module) -> torch.nn.Module:
    """The plain model's operators as AOTAutograd captures them, which are those that segments run node by node."""
    return torch.compile(model, backend="aot_eager")


@dataclass(frozen=True)
class Case:
    """A family of models, how it is sharded and compiled, and how long it trains; ``double``: in float64."""

    name: str
    stage: int
    optimizer: str = "adamw"
    transport: str = "auto"
    compute: str = "aten"
    steps: int = 20
    double: bool = False

    def __str__(self) -> str:
        return f"{self.name} stage {self.stage} {self.optimizer} over {self.transport} by {self.compute}"

    def sharded(self, model: torch.nn.Module) -> torch.nn.Module:
        fields: dict[str, Any] = {"transport": self.transport, "compute": self.compute}
        if hasattr(model, "inner"):  # nested shards: the inner one keeps its own stage
            zero.shard(model.inner, stage=(self.stage + 2) % 4, **fields)
        return torch.compile(zero.shard(model, stage=self.stage, **fields), backend="zero")

    def errors(self, rank: int) -> list[str]:
        family = FAMILIES[self.name]

        def batch(step: int) -> Any:
            given = family.data(rank, step)
            return tree_map_only(torch.Tensor, _doubled, given) if self.double else given

        twin = Twin(
            family.model().double() if self.double else family.model(),
            self.sharded,
            OPTIMIZERS[self.optimizer],
            reference=captured if family.rounds else lambda m: m,
            where=str(self),
        )
        twin.train(lambda m, i: family.loss(m, batch(i)), self.steps)
        return twin.errors[:5]


def _doubled(t: torch.Tensor) -> torch.Tensor:
    return t.double() if t.is_floating_point() else t


def train(rank: int, world: int, cases: Sequence[Case]) -> list[str]:
    """What is wrong, in sentences; one list for all cases, so that one run shows all of them."""
    errors: list[str] = []
    for case in cases:
        torch._dynamo.reset()
        try:
            errors += case.errors(rank)
        except Exception:
            errors.append(f"{case}: {traceback.format_exc()}")
    return errors


def check(world: int, cases: Sequence[Case], timeout: float = 600.0) -> None:
    for rank, errors in enumerate(run_ranks(train, world, cases, timeout=timeout, group_timeout=200.0)):
        assert not errors, f"rank {rank} of {world}:\n" + "\n".join(errors)
