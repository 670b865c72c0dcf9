"""Gradients that are kept from one backward to the next, under a memory budget, on one rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import MemoryBudgetError
from zero_compiler.report.memory import Memory

WIDTH, LAYERS, ROWS = 32, 3, 64
WEIGHTS = LAYERS * WIDTH * WIDTH * 4

pytestmark = pytest.mark.slow


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def under(budget: int | None, **fields):
    torch._dynamo.reset()
    model = zero.shard(net(), stage=3, memory_budget_bytes=budget, **fields)
    return model, torch.compile(model, backend="zero", options={"compute": "aten"})


def loss(call) -> torch.Tensor:
    return call(torch.ones(ROWS, WIDTH)).square().sum()


def planned() -> Memory:
    model, call = under(None)
    loss(call).backward()
    return zero.inspect(model).memory


def waits(model) -> list[bool]:
    return ["not reduced" in repr(p.grad) for p in model.parameters()]


def test_the_report_says_what_steps_under_no_sync_take():
    model, call = under(None)
    loss(call).backward()
    told = zero.inspect(model)
    memory = told.memory
    assert memory.waiting == WEIGHTS
    assert (
        memory.accumulating_peak == memory.parameters + memory.optimizer + memory.arena + memory.accumulating
    )
    assert memory.accumulating_peak > memory.peak
    line = f"of steps under zero.no_sync {memory.accumulating_peak:>14,}   {WEIGHTS:,} of it full gradients that wait"
    assert line in str(told)
    assert told.to_dict()["memory"]["accumulating_peak_bytes"] == memory.accumulating_peak


def test_sums_are_counted_in_the_dtype_that_they_have():
    for fields, item in (({"param_dtype": "bf16"}, 2), ({"param_dtype": "bf16", "reduce_dtype": "fp32"}, 4)):
        model, call = under(None, **fields)
        assert zero.inspect(model).memory.waiting == WEIGHTS // 4 * item
        loss(call).backward()
        both = zero.inspect(model).memory
        with zero.no_sync(model):
            model.zero_grad()
            loss(call).backward()
        assert sum(p.grad.full.nbytes for p in model.parameters()) == both.waiting


def test_what_cannot_accumulate_is_refused_before_its_first_backward():
    memory = planned()
    model, call = under(memory.peak)
    loss(call).backward()  # compiled for steps that begin without gradients
    model.zero_grad()
    for _ in range(2):
        with zero.no_sync(call):
            out = loss(call)
            with pytest.raises(
                MemoryBudgetError,
                match=rf"memory_budget_bytes={memory.peak:,} is [\d,]+ bytes too small to accumulate under zero.no_sync: "
                rf"such a step needs {memory.accumulating_peak:,} bytes on rank 0 of 1, {WEIGHTS:,} of them full "
                rf"gradients .* and {memory.peak:,} are allowed; leave zero.no_sync out",
            ):
                out.backward()
        assert all(p.grad is None for p in model.parameters())
        loss(call).backward()
        model.zero_grad()


def test_what_can_is_not_refused():
    memory = planned()
    model, call = under(memory.accumulating_peak)
    for _ in range(2):
        with zero.no_sync(call):
            loss(call).backward()
            loss(call).backward()
        assert all(waits(model))
        loss(call).backward()
        assert not any(waits(model))
        model.zero_grad()


def test_a_step_that_adds_to_gradients_is_refused_before_it_passes_the_budget():
    memory = planned()
    model, call = under(memory.peak)
    for _ in range(2):
        loss(call).backward()
        with pytest.raises(
            MemoryBudgetError,
            match=rf"to keep gradients of an earlier backward: beside them this \w+ needs .* and {memory.peak:,} are "
            r"allowed; call zero_grad\(set_to_none=True\) before",
        ):
            loss(call).backward()
        model.zero_grad()
    room, call = under(memory.peak + memory.gradients)
    for _ in range(3):
        loss(call).backward()
    assert not any(waits(room))


def test_without_a_budget_nothing_is_refused():
    model, call = under(None)
    with zero.no_sync(call):
        loss(call).backward()
    loss(call).backward()
    loss(call).backward()
    assert not any(waits(model))


def test_a_part_of_a_model_is_called_and_looked_at_alone():
    """Frames of the whole reduce gradients of both shards, and are noted with one of them."""
    torch._dynamo.reset()
    whole = nn.Sequential(net(), nn.Linear(WIDTH, WIDTH, bias=False))
    for part in (whole[0], whole):
        zero.shard(part, stage=3, memory_budget_bytes=1 << 20)
    options = {"compute": "aten"}
    loss(torch.compile(whole, backend="zero", options=options)).backward()
    whole.zero_grad()
    assert zero.inspect(whole[0]).memory.waiting == WEIGHTS
    loss(torch.compile(whole[0], backend="zero", options=options)).backward()
    assert [p.grad is None for p in whole.parameters()] == [False] * LAYERS + [True]


def test_an_optimizer_that_takes_the_place_of_another_is_counted():
    """States of AdamW fill the budget; without them there is room for the gradients of an earlier backward."""
    model, call = under(planned().peak)
    optimizer = zero.optimizer(torch.optim.AdamW, model)
    loss(call).backward()
    with pytest.raises(MemoryBudgetError, match="to keep gradients of an earlier backward"):
        loss(call).backward()
    optimizer = zero.optimizer(torch.optim.SGD, model, lr=0.1)
    model.zero_grad()
    loss(call).backward()
    loss(call).backward()
    optimizer.step()
