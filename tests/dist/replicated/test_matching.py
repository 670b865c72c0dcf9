"""Which replicated parameter of one rank is which of another, where ranks have done different things before."""

from __future__ import annotations

import copy
import gc
import itertools

import pytest
import torch
from dist.averages import (
    Parts,
    compare_and_clear,
    compiled,
    rows,
    same_gradients,
    square,
)
from dist.spawn import run_ranks
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import RankMismatchError

pytestmark = pytest.mark.dist


def trained_apart_before(rank, world):
    """Modules that were trained each by itself, then as parts of one model, accumulating."""
    torch.manual_seed(0)
    holder = Parts(nn.Linear(4, 4), nn.Linear(4, 4))
    twins = copy.deepcopy(holder.parts)
    for call, ours, twin in zip(holder.calls, holder.parts, twins, strict=True):
        square(call(rows(rank))).backward()
        square(twin(rows(rank))).backward()
        compare_and_clear(ours, twin, "apart")
    head = nn.Linear(4, 1)
    whole, twin = nn.Sequential(*holder.parts, head), nn.Sequential(*twins, copy.deepcopy(head))
    call = compiled(whole)
    for step in range(2):
        with zero.no_sync(whole):
            for k in (1, 2):
                square(call(rows(rank, 3 * step + k))).backward()
        square(call(rows(rank, 3 * step))).backward()
        for k in range(3):
            square(twin(rows(rank, 3 * step + k))).backward()
        compare_and_clear(whole, twin, f"step {step}")
    return True


def test_modules_that_were_trained_apart_before():
    assert run_ranks(trained_apart_before, 2, timeout=200) == [True, True]


def a_part_first(rank, world):
    """One rank alone calls a part of the model before, with gradients, and runs no backward."""
    torch.manual_seed(0)
    holder = Parts(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)))
    twin = copy.deepcopy(holder.parts[0])

    def look():
        part = holder.parts[0][1]
        compiled(part)(rows(rank))

    if rank == 1:
        look()
    square(holder.calls[0](rows(rank))).backward()
    square(twin(rows(rank))).backward()
    same_gradients(holder.parts[0], twin)
    return True


def test_a_rank_that_called_a_part_before():
    assert run_ranks(a_part_first, 2, timeout=200) == [True, True]


def skipped(rank, world):
    """Blocks that are compiled each by itself, of which ranks skip different ones."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
    twin = copy.deepcopy(model)
    for i, block in enumerate(model):
        model[i] = compiled(block)

    def loss_of(blocks, skip, x):
        for i, block in enumerate(blocks):
            if i != skip:
                x = block(x)
        return square(x)

    for step in range(3):
        for blocks in (model, twin):
            loss_of(blocks, (step + rank) % 4, rows(rank, step)).backward()
        compare_and_clear(model, twin, f"step {step}")
    return True


def test_blocks_of_which_ranks_skip_different_ones():
    assert run_ranks(skipped, 2, timeout=200) == [True, True]


def one_each(rank, world):
    """Ranks that train different models of one class, which have equal values or others: of each the gradient is zero
    where it was not used."""
    for equal in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        holder = Parts(nn.Linear(4, 2), nn.Linear(4, 2))
        if equal:
            holder.parts[1].load_state_dict(holder.parts[0].state_dict())
        twins = copy.deepcopy(holder.parts)
        for step in range(3):
            for i in (0, 1) if step == 1 or equal else ((rank + step) % 2,):
                square(holder.calls[i](rows(rank, step))).backward()
                square(twins[i](rows(rank, step))).backward()
            for i, (ours, twin) in enumerate(zip(holder.parts, twins, strict=True)):
                compare_and_clear(ours, twin, f"equal: {equal}, step {step}, model {i}")
    return True


def test_ranks_that_train_different_models():
    assert run_ranks(one_each, 2, timeout=200) == [True, True]


def not_told_apart(rank, world):
    """Of two models with equal values and names each rank trains another one first."""
    holder = Parts(*(nn.Linear(4, 2) for _ in range(2)))
    for part in holder.parts:
        nn.init.zeros_(part.weight)
        nn.init.zeros_(part.bias)
    with pytest.raises(RankMismatchError, match="nothing says which of them is which on another rank"):
        square(holder.calls[rank](rows(rank))).backward()
    return True


def test_copies_that_nothing_tells_apart():
    assert run_ranks(not_told_apart, 2, timeout=200) == [True, True]


def one_rank_does_more(rank, world):
    """A rank alone keeps a module around the model, trains a copy under zero.no_sync, and validates with gradients."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    twin, copied = copy.deepcopy(ours), copy.deepcopy(ours)
    call, other = compiled(ours), compiled(copied)
    around = nn.Sequential(ours, nn.Softmax(-1)) if rank == 0 else None
    if around is not None:
        with zero.no_sync(copied):
            square(other(rows(rank))).backward()
        copied.zero_grad()
        compiled(around)(rows(rank, 5)[:2])
    for step in range(2):
        if rank == 1:
            call(rows(rank, 7)[:1])
        (square(call(rows(rank, step))) + 2 * square(other(rows(rank, step)))).backward()
        square(twin(rows(rank, step))).backward()
        same_gradients(ours, twin, f"step {step}")
        for q in twin.parameters():
            q.grad *= 2
        same_gradients(copied, twin, f"step {step}, copy")
        for module in (ours, copied, twin):
            module.zero_grad()
    return True


def test_what_a_rank_does_besides():
    assert run_ranks(one_rank_does_more, 2, timeout=200) == [True, True]


def other_values(rank, world):
    for change in ("order", "place"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        if rank:
            with torch.no_grad():
                w = model.weight
                w.copy_(w.flip(0).clone() if change == "order" else w.t().clone())
        with pytest.raises(RankMismatchError, match="different values of parameter 'weight'"):
            square(compiled(model)(rows(rank))).backward()
    return True


def test_the_same_numbers_in_other_places_are_other_values():
    assert run_ranks(other_values, 2, timeout=200) == [True, True]


class Rare(nn.Module):
    """One of its layers is used on request."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rare = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, rare):
        y = self.layer(x)
        return y + self.rare(y) if rare else y


def copies_beside(rank, world):
    """Copies that are evaluated: of one rank, of both; made of what is compiled, or compiled themselves. Where both have
    one, the first average is of the same parameters on both."""
    cases = [(rank == 0, 0), (rank == 0, 1), (True, 1)]
    for how, (here, rare_at) in itertools.product(("copied", "compiled"), cases):
        torch.manual_seed(0)
        ours = Rare()
        twin, call = copy.deepcopy(ours), compiled(ours)
        if here:
            average = copy.deepcopy(call) if how == "copied" else compiled(copy.deepcopy(ours))
            with torch.set_grad_enabled(how == "compiled"):
                average(rows(0, 99), True)
        for step in range(3):
            rare = rank == 1 and step >= rare_at
            square(call(rows(rank, step), rare)).backward()
            square(twin(rows(rank, step), rare)).backward()
            compare_and_clear(ours, twin, f"{how} {step}")
        ours = call = average = None  # or the next ones would be equal to these
        torch._dynamo.reset()
        gc.collect()
    return True


def test_copies_that_are_only_evaluated():
    assert run_ranks(copies_beside, 2) == [True, True]
