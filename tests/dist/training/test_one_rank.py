"""One process and no process group: the same bits as plain PyTorch captured the same way."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare import Twin
from dist.spawn import run_ranks
from models import FAMILIES, MLP

import zero_compiler as zero


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch.set_num_threads(threads)


def sharded(model: torch.nn.Module, stage: int, compute: str = "aten") -> torch.nn.Module:
    if hasattr(model, "inner"):
        zero.shard(model.inner, stage=(stage + 2) % 4, compute=compute)
    return torch.compile(zero.shard(model, stage=stage, compute=compute), backend="zero")


def bitwise(name: str, stage: int, steps: int = 20) -> None:
    family = FAMILIES[name]
    twin = Twin(
        family.model(),
        functools.partial(sharded, stage=stage),
        functools.partial(torch.optim.AdamW, lr=1e-2),
        reference=lambda m: torch.compile(m, backend="aot_eager"),
    )
    twin.train(lambda m, i: family.loss(m, family.data(0, i)), steps, exact=True)
    assert not twin.errors, "\n".join(twin.errors)
    assert not dist.is_initialized()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "name", ["mlp", "odd", "mixed-dtypes", "sometimes", "nested", "broken", "resnet", "lstm"]
)
def test_bits_of_small_models(name: str, stage: int) -> None:
    bitwise(name, stage)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])  # a stage of each plan: 1 and 2 are one
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "vit", "mixtral", "lora"])
def test_bits_of_transformers(name: str, stage: int) -> None:
    bitwise(name, stage)


def in_a_group(rank: int, world: int) -> list[str]:
    """The same in a process group that has no other member."""
    torch.set_num_threads(1)
    errors = []
    for name, stage, compiled in itertools.product(("odd", "resnet"), (0, 1, 3), (True, False)):
        torch._dynamo.reset()
        family = FAMILIES[name]
        twin = Twin(
            family.model(),
            functools.partial(sharded, stage=stage)
            if compiled
            else functools.partial(zero.shard, stage=stage),
            functools.partial(torch.optim.AdamW, lr=1e-2),
            reference=(lambda m: torch.compile(m, backend="aot_eager")) if compiled else (lambda m: m),
            where=f"{name} stage {stage} {'compiled' if compiled else 'eager'}",
        )
        twin.train(lambda m, i, f=family: f.loss(m, f.data(0, i)), 20, exact=compiled)
        errors += twin.errors[:2]
    return errors


@pytest.mark.slow
@pytest.mark.dist
def test_a_group_of_one_rank() -> None:
    assert run_ranks(in_a_group, 1, timeout=200) == [[]]


def test_a_difference_is_seen() -> None:
    # The comparison itself must be able to fail: one row of one weight is off by one unit in the last place.
    family = FAMILIES["mlp"]

    def wrong(model: torch.nn.Module) -> torch.nn.Module:
        model = zero.shard(model, stage=3)
        with torch.no_grad():
            row = model.layers[0].weight._local_tensor[3]
            row.copy_(torch.nextafter(row, row + 1))
        return model

    twin = Twin(MLP(), wrong)
    twin.train(lambda m, i: family.loss(m, family.data(0, i)), 1, exact=True)
    assert any("parameter layers.0.weight" in e for e in twin.errors)


@pytest.mark.slow
def test_inductor_is_close() -> None:
    family = FAMILIES["odd"]
    twin = Twin(family.model(), functools.partial(sharded, stage=3, compute="inductor"))
    twin.train(lambda m, i: family.loss(m, family.data(0, i)), 20)
    assert not twin.errors, "\n".join(twin.errors)
