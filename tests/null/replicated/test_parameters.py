"""What is kept of plain parameters that nobody averages any longer."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

import zero_compiler as zero
from zero_compiler.replicated.parameters import known_of


@pytest.mark.parametrize("change", ["shard", "assign", "module"])
def test_a_parameter_that_was_replaced_is_not_held(change):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    call = torch.compile(model, backend="zero", options={"compute": "aten"})
    call(torch.randn(2, 4)).sum().backward()
    old = weakref.ref(model[0].weight)
    if change == "shard":
        zero.shard(model, stage=3, device="cpu")
    elif change == "assign":
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    else:
        model[0] = nn.Linear(4, 4)
        call(torch.randn(2, 4)).sum().backward()
    torch._dynamo.reset()
    gc.collect()
    assert old() is None


def test_a_copy_takes_nothing_along():
    model = nn.Linear(4, 4)
    call = torch.compile(model, backend="zero", options={"compute": "aten"})
    call(torch.randn(2, 4)).sum().backward()
    assert known_of(model.weight) is not None
    file = io.BytesIO()
    torch.save(model.weight, file)
    file.seek(0)
    saved = nn.Linear(4, 4)
    saved.weight = torch.load(file)  # with weights alone, as by default
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), saved):
        assert known_of(again.weight) is None
        assert torch.equal(again.weight, model.weight)
        torch.compile(again, backend="zero", options={"compute": "aten"})(torch.randn(2, 4)).sum().backward()
        assert known_of(again.weight) is not None


def test_frozen_parameters_stay_frozen():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    model.register_parameter("whole", nn.Parameter(torch.arange(3), requires_grad=False))
    torch.compile(model, backend="zero", options={"compute": "aten"})(torch.randn(2, 4)).sum().backward()
    assert [p.requires_grad for p in model.parameters()] == [False, False, False, True, True]
    assert model[0].weight.grad is None


class MakesALayer(nn.Module):
    """Its forward makes modules, of which torch tells whoever asked to be told."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * nn.ParameterList([self.weight])[0]


def test_modules_that_a_forward_makes_break_no_graph():
    torch._dynamo.reset()
    model = MakesALayer()
    call = torch.compile(model, backend="zero", fullgraph=True, options={"compute": "aten"})
    call(torch.ones(2, 4)).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((4,), 2.0))


def test_a_function_that_lets_go_of_its_model_and_batch_frees_them():
    torch._dynamo.reset()
    model, batch = nn.Linear(4, 4), torch.randn(2, 4)
    call = torch.compile(model, backend="zero", options={"compute": "aten"})
    call(batch).sum().backward()
    kept = [weakref.ref(model), weakref.ref(batch)]
    model = batch = call = None
    torch._dynamo.reset()
    gc.collect()
    assert [ref() for ref in kept] == [None, None]
