"""Every model, every stage: the curve of plain data-parallel PyTorch."""

from __future__ import annotations

import pytest
from curves import Case, check

pytestmark = [pytest.mark.dist, pytest.mark.slow]

WAY = {0: "c10d", 1: "shared", 2: "c10d"}
SMALL = ["mlp", "odd", "mixed-dtypes", "sometimes", "nested", "broken"]


def on_every_stage(names: list[str], optimizer: str) -> list[Case]:
    """Both transports at stage 3; of the other stages each has one."""
    ways = [*WAY.items(), (3, "c10d"), (3, "shared")]
    return [Case(name, stage, optimizer, way) for name in names for stage, way in ways]


@pytest.mark.parametrize(
    "names",
    [["gpt2", "llama"], ["bert", "t5"], ["vit", "mixtral"], ["resnet", "lstm", "lora"]],
    ids="-".join,
)
@pytest.mark.timeout(900)
def test_architectures_on_two_ranks(names: list[str]) -> None:
    ways = [(stage, "adamw", way) for stage, way in WAY.items()] + [
        (3, "adamw", "c10d"),
        (3, "sgd", "shared"),
    ]
    check(2, [Case(name, *way) for name in names for way in ways])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_odd_models_on_two_ranks(optimizer: str) -> None:
    check(2, on_every_stage(SMALL, optimizer))


@pytest.mark.timeout(900)
def test_on_four_ranks() -> None:
    check(4, on_every_stage(["mlp", "odd", "nested"], "sgd"))


@pytest.mark.timeout(900)
def test_other_odd_models_on_four_ranks() -> None:
    names = ["mixed-dtypes", "sometimes", "broken", "lstm"]
    check(4, [Case(n, *way) for n in names for way in ((1, "sgd", "shared"), (3, "adamw", "c10d"))])


@pytest.mark.timeout(900)
def test_a_residual_network_on_four_ranks() -> None:
    # Its ReLUs turn on or off with the last bit: it holds where four gradients are summed in the order of ranks, as
    # those that are cut are, and not at stage 0, where gloo adds them up in an order of its own.
    check(4, [Case("resnet", 1, "adamw", "shared"), Case("resnet", 3, "sgd", "c10d")])


@pytest.mark.parametrize(
    "cases",
    [
        [Case("gpt2", 0, "sgd", "c10d"), Case("gpt2", 2, "sgd", "c10d")],
        [Case(n, 3, "adamw", way) for n in ("gpt2", "llama") for way in ("c10d", "shared")],
        [Case("bert", 1, "sgd", "shared"), Case("bert", 3, "adamw", "c10d")],
        [Case("t5", 1, "adamw", "shared"), Case("t5", 3, "sgd", "c10d")],
        [Case("vit", 1, "sgd", "shared"), Case("vit", 3, "adamw", "c10d")],
        [Case("mixtral", 1, "adamw", "shared"), Case("mixtral", 3, "sgd", "c10d")],
        [Case("lora", 1, "sgd", "shared"), Case("lora", 3, "adamw", "c10d")],
    ],
    ids=["gpt2", "gpt2-llama", "bert", "t5", "vit", "mixtral", "lora"],
)
@pytest.mark.timeout(900)
def test_transformers_on_four_ranks(cases: list[Case]) -> None:
    check(4, cases)
