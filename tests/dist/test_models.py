"""Every model, every stage: the curve of plain data-parallel PyTorch."""

from __future__ import annotations

import functools
import traceback
from typing import Any

import pytest
import torch
from compare import Twin
from dist.spawn import run_ranks
from models import FAMILIES

import zero_compiler as zero

pytestmark = [pytest.mark.dist, pytest.mark.slow]

STEPS = 20
WAY = {0: ["c10d"], 1: ["shared"], 2: ["c10d"]}
OPTIMIZERS: dict[str, Any] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    # eps=1e-3 is far above rounding: no element is noise divided by noise.
    "adamw": functools.partial(torch.optim.AdamW, lr=3e-3, eps=1e-3, weight_decay=0.1),
}


def sharded(model: torch.nn.Module, **fields: Any) -> torch.nn.Module:
    fields.setdefault("compute", "aten")
    if hasattr(model, "inner"):  # nested shards: the inner one keeps its own stage
        zero.shard(model.inner, **{**fields, "stage": (fields["stage"] + 2) % 4})
    return torch.compile(zero.shard(model, **fields), backend="zero")


def train(rank: int, world: int, names: list[str], stages: list[int], optimizers: list[str]) -> list[str]:
    """What is wrong, in sentences; one list for all cases, so that one run shows all of them."""
    errors: list[str] = []
    for name in names:
        family = FAMILIES[name]
        # Both transports at stage 3; of the other stages each has one.
        for stage, transport in [(s, t) for s in stages for t in (("c10d", "shared") if s == 3 else WAY[s])]:
            for optimizer in optimizers:
                torch._dynamo.reset()
                where = f"{name} stage {stage} {optimizer} over {transport}"
                try:
                    twin = Twin(
                        family.model(),
                        functools.partial(sharded, stage=stage, transport=transport),
                        OPTIMIZERS[optimizer],
                        where=where,
                        tol=family.tol,
                    )
                    twin.train(lambda m, i, f=family: f.loss(m, f.data(rank, i)), STEPS)
                    errors += twin.errors[:5]
                except Exception:
                    errors.append(f"{where}: {traceback.format_exc()}")
    return errors


def check(world: int, *args: Any, timeout: float = 600.0) -> None:
    for rank, errors in enumerate(run_ranks(train, world, *args, timeout=timeout, group_timeout=200.0)):
        assert not errors, f"rank {rank} of {world}:\n" + "\n".join(errors)


@pytest.mark.parametrize(
    "names",
    [["gpt2", "llama"], ["bert", "t5"], ["vit", "mixtral"], ["resnet", "lstm", "lora"]],
    ids="-".join,
)
@pytest.mark.timeout(900)
def test_architectures_on_two_ranks(names: list[str]) -> None:
    check(2, names, [0, 1, 2, 3], ["adamw"])


SMALL = ["mlp", "odd", "mixed-dtypes", "sometimes", "nested", "broken"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_odd_models_on_two_ranks(optimizer: str) -> None:
    check(2, SMALL, [0, 1, 2, 3], [optimizer])


@pytest.mark.timeout(900)
def test_on_four_ranks() -> None:
    # Not the residual network: a sum of four in another order turns one of its ReLUs on or off within 20 steps.
    check(4, ["mlp", "odd", "nested"], [0, 1, 2, 3], ["sgd"])


@pytest.mark.timeout(900)
def test_transformers_on_four_ranks() -> None:
    check(4, ["gpt2", "llama"], [3], ["adamw"])
