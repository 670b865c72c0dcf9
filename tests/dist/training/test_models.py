"""Every model: the curve of plain data-parallel PyTorch.

Stages 1 and 2 are one plan (tests/null/ir/test_program.py holds their Programs equal) and take turns. Small models meet
every plan on two ranks, and some of them on four; each architecture meets stage 3 on two ranks. Thoroughly the others of
the former meet every plan on four, and architectures every plan on two, and on four stage 3 and one plan more, in turn.
Optimizers and transports take turns over stages, and what stands against a stage on two ranks does not on four: each
model meets both optimizers, and at stage 3 both transports.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from compare import Twin, local
from curves import Case, captured, check
from dist.spawn import run_ranks
from marks import thorough
from models import FAMILIES

pytestmark = [pytest.mark.dist, pytest.mark.slow]

ARCHITECTURES = ["gpt2", "llama", "bert", "t5", "vit", "mixtral", "lora", "resnet", "lstm"]
SMALL = ["mlp", "odd", "mixed-dtypes", "sometimes", "nested", "broken"]
NAMES = ARCHITECTURES + SMALL


def plans(world: int, name: str) -> list[int]:
    """A stage of each plan."""
    return [0, 1 + (NAMES.index(name) + world // 2) % 2, 3]


def cases(world: int, name: str, stages: Iterable[int] | None = None) -> list[Case]:
    turn = NAMES.index(name) + world // 2
    return [
        Case(
            name,
            stage,
            "sgd" if (stage + world // 2) % 2 else "adamw",
            "shared" if stage and (stage + turn) % 2 else "c10d",
        )
        for stage in stages or plans(world, name)
    ]


@pytest.mark.parametrize("names", [ARCHITECTURES[i : i + 3] for i in range(0, 9, 3)], ids="-".join)
@pytest.mark.timeout(900)
def test_architectures_on_two_ranks(names: list[str]) -> None:
    check(2, [case for name in names for case in cases(2, name, [3])])


@pytest.mark.thorough
@pytest.mark.parametrize("names", [ARCHITECTURES[i : i + 3] for i in range(0, 9, 3)], ids="-".join)
@pytest.mark.timeout(900)
def test_architectures_at_other_stages_on_two_ranks(names: list[str]) -> None:
    check(2, [case for name in names for case in cases(2, name, plans(2, name)[:2])])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("names", [SMALL[:3], SMALL[3:]], ids="-".join)
def test_odd_models_on_two_ranks(names: list[str]) -> None:
    other = {"c10d": "shared", "shared": "c10d"}
    for_each = [case for name in names for case in cases(2, name)]
    check(2, for_each + [Case(c.name, 3, "sgd", other[c.transport]) for c in for_each if c.stage == 3])


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "names",
    [*thorough(["lora"], ["gpt2"], ["llama", "bert"], ["vit", "t5"], ["mixtral", "lstm"])],
    ids="-".join,
)
def test_architectures_on_four_ranks(names: list[str]) -> None:
    # One that comes even gets the first of its plans, the other the second.
    both = [(name, (plans(4, name)[i % 2], 3)) for i, name in enumerate(names)]
    check(4, [case for name, stages in both for case in cases(4, name, stages)])


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "names", [["mlp", "odd"], *thorough(["nested", "sometimes", "broken"])], ids="-".join
)
def test_odd_models_on_four_ranks(names: list[str]) -> None:
    check(4, [case for name in names for case in cases(4, name)])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [*thorough("resnet"), "mixed-dtypes"])
def test_models_that_round_on_four_ranks(name: str) -> None:
    # The residual network's ReLUs turn on or off with the last bit, and a sum in bf16 is rounded to few: in these
    # dtypes they hold where four gradients are summed in the order of ranks, as those that are cut are. At stage 0 gloo
    # adds them up in an order of its own; see below.
    check(4, cases(4, name, plans(4, name)[1:]))


@pytest.mark.timeout(900)
def test_a_network_of_relus_on_four_ranks_at_stage_0() -> None:
    # In float64 another order of sums turns no ReLU: the last bits are a billion times smaller.
    check(4, [Case("resnet", 0, optimizer, "c10d", double=True) for optimizer in ("sgd", "adamw")])


def gradients_in_bf16(rank: int, world: int) -> list[str]:
    """Of one step at stage 0, beside the gradients of every rank by itself."""
    family = FAMILIES["mixed-dtypes"]
    twin = Twin(family.model(), Case("mixed-dtypes", 0).sharded, reference=captured)
    batch = family.data(rank, 0)
    for call in (twin.call, twin.plain_call):
        family.loss(call, batch).backward()
    errors = []
    for name, p, q in twin.pairs():
        if p.grad is None:
            continue
        each = [torch.empty_like(q.grad) for _ in range(world)]
        dist.all_gather(each, q.grad)
        exact = torch.stack(each).double().mean(0)
        size = torch.stack(each).double().abs().mean(0)
        # Three sums in any order, and the division: each rounds by half a unit of what has been summed so far.
        bound = world * torch.finfo(q.dtype).eps / 2 * 1.01 * size
        ours = local(p.grad).double()
        if not (ours - exact).abs().le(bound).all():
            errors.append(f"gradient of {name}: off by {float((ours - exact).abs().max()):.2e}")
    return errors


def test_dtypes_together_on_four_ranks_at_stage_0() -> None:
    assert run_ranks(gradients_in_bf16, 4, timeout=200) == [[], [], [], []]
