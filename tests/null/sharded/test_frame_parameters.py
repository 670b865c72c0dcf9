"""Parameters of a frame from call to call: a gather looks again where one lies elsewhere, and else it does not."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import zero_compiler as zero
from zero_compiler.runtime import model as runtime_model
from zero_compiler.sharded.frame_parameters import FrameParameters

ATEN = {"compute": "aten"}


def found(model: nn.Module) -> tuple[FrameParameters, tuple[Any, ...]]:
    params: tuple[Any, ...] = (model.weight, model.bias)
    return FrameParameters(params, [[(model, "weight")], [(model, "bias")]]), params


def test_they_hold_until_one_is_another_or_lies_elsewhere():
    model = zero.shard(nn.Linear(3, 2), device="cpu")
    held, params = found(model)
    assert held.hold(params)
    assert held.rows is held.rows
    params[0]._local_tensor.data = params[0]._local_tensor.clone()
    assert not held.hold(params)
    held, params = found(model)
    assert not held.hold((params[0], nn.Parameter(params[1].detach())))


def test_a_tied_parameter_is_looked_for_in_all_of_its_places():
    model = zero.shard(nn.Linear(3, 2), device="cpu")
    other = nn.Module()
    other.again = model.weight
    held = FrameParameters((model.weight,), [[(model, "weight"), (other, "again")]])
    assert held.hold((model.weight,))
    other.again = None
    assert not held.hold((model.weight,))


def test_chunks_stand_in_a_call_behind_one_that_has_looked():
    held, _ = found(zero.shard(nn.Linear(3, 2), device="cpu"))
    rests: Any = SimpleNamespace(at_rest_changes=0, stands=False)

    def run(phase: str, same: bool, changes: int = 0) -> bool:
        def do() -> bool:
            rests.at_rest_changes += changes
            return bool(rests.stands)

        return held.run(phase, [rests], same, do)

    assert not run("forward", True)
    assert run("forward", True)
    assert not run("backward", True)
    assert not run("forward", False)
    assert run("forward", True)
    rests.at_rest_changes += 1  # another frame has found a chunk elsewhere
    assert not run("forward", True, changes=1)
    assert run("forward", True)
    assert not rests.stands

    def fails() -> None:
        raise ValueError("in the call")

    with pytest.raises(ValueError, match="in the call"):
        held.run("forward", [rests], True, fails)
    assert not rests.stands


def train(step: Any, model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = step(torch.ones(2, 3)).sum()
    loss.backward()
    grad: Any = model.weight.grad
    model.zero_grad()
    assert type(grad) is DTensor
    return loss.detach()


def test_a_model_looks_at_each_chunk_until_a_call_has_and_again_once_one_was_replaced():
    model = zero.shard(nn.Linear(3, 2), device="cpu")
    step = torch.compile(model, backend="zero", options=ATEN)
    with mock.patch.object(runtime_model, "all_stand", wraps=runtime_model.all_stand) as looks:
        train(step, model)
        train(step, model)
        looks.reset_mock()
        before = train(step, model)
        assert looks.call_count == 0
        # A write in place is seen without a look; another parameter is looked for.
        with torch.no_grad():
            model.bias.add_(1)
        assert torch.equal(train(step, model), before + 4)
        weight = model.weight
        model.weight = nn.Parameter(torch.zeros_like(weight))
        assert torch.equal(train(step, model), 2 * model.bias.full_tensor().sum().detach())
        assert looks.call_count > 0
        model.weight = weight
        assert torch.equal(train(step, model), before + 4)


def test_every_backward_of_a_call_gives_all_gradients():
    model = zero.shard(nn.Linear(3, 2), device="cpu")
    step = torch.compile(model, backend="zero", options=ATEN)
    loss = step(torch.ones(2, 3)).sum()
    once = torch.autograd.grad(loss, [model.bias], retain_graph=True)[0]
    assert model.bias.grad is model.weight.grad is None
    assert torch.equal(once.full_tensor(), torch.full((2,), 2.0))
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(model.bias.grad.full_tensor(), torch.full((2,), 4.0))
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((2, 3), 4.0))


def test_a_frozen_parameter_among_others_and_a_hook():
    model = zero.shard(nn.Linear(3, 2), device="cpu")
    model.weight.requires_grad_(False)
    seen: list[Any] = []
    model.bias.register_hook(seen.append)
    step = torch.compile(model, backend="zero", options=ATEN)
    x = torch.ones(2, 3, requires_grad=True)
    step(x).sum().backward()
    assert model.weight.grad is None
    assert torch.equal(model.bias.grad.full_tensor(), torch.full((2,), 2.0))
    assert type(seen[0]) is DTensor
    assert torch.equal(x.grad, model.weight.full_tensor().sum(0).expand(2, 3))
