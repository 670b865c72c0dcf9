"""Optimizers over parameters that are no longer those of the model, in one process."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from null.small import batch, mlp
from safetensors.torch import save_file
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import OptimizerError, ShardError
from zero_compiler.sharded.grads import PendingGrad


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_made_before_the_shard(kind):
    model = mlp()
    opt = kind(model.parameters(), lr=0.1)
    zero.shard(model)
    model(batch()).sum().backward()
    for _ in range(2):
        with pytest.raises(
            ShardError, match=f"{kind.__name__} was made before zero.shard.*'0.weight'.*make the optimizer"
        ):
            opt.step()


def test_an_optimizer_that_has_stepped_before_the_shard():
    """It trained the model as it was, and an earlier shard has torch look at every optimizer."""
    zero.shard(mlp())
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for sharded in (False, True):
        if sharded:
            zero.shard(model)
        model(batch()).sum().backward()
        with pytest.raises(ShardError, match="holds the parameter '0.weight'") if sharded else nullcontext():
            opt.step()


def test_a_param_group_that_is_added_later_is_looked_at_too():
    model, other = mlp(), mlp()
    stale = list(other.parameters())
    zero.shard(model)
    zero.shard(other)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch()).sum().backward()
    opt.step()
    opt.add_param_group({"params": stale})
    with pytest.raises(ShardError, match="was made before zero.shard"):
        opt.step()


@pytest.mark.parametrize("way", ["load_safetensors", "assign", "to_empty"])
def test_an_optimizer_made_before_a_sharded_model_was_loaded(way, tmp_path):
    """Loading has given its parameters other memory, and left them the objects that they are."""
    save_file(mlp(1).state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = mlp()
    zero.shard(model, device="cpu")
    old = list(model.parameters())
    opt = (
        zero.optimizer(torch.optim.AdamW, model, lr=0.1)
        if way == "to_empty"
        else torch.optim.AdamW(old, lr=0.1)
    )
    if way == "load_safetensors":
        zero.load_safetensors(model, tmp_path)
    else:
        if way == "to_empty":
            model.to_empty(device="cpu")
        model.load_state_dict(mlp(1).state_dict(), assign=way == "assign")
    assert all(p is q for p, q in zip(model.parameters(), old, strict=True))
    plain = mlp(1)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for m, o in ((model, opt), (plain, theirs)):
        m(batch()).square().sum().backward()
        o.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q)


@pytest.mark.parametrize("way", ["load_safetensors", "assign"])
def test_an_optimizer_made_before_loading(way, tmp_path):
    """Of a plain model, or a plain part of one, loading puts other parameters in the place of those that it holds."""
    save_file({f"part.{k}": v for k, v in mlp().state_dict().items()}, tmp_path / "model.safetensors")
    model = nn.Module()
    with torch.device("meta"):
        model.part = mlp()
    if way == "assign":
        zero.shard(model, device="cpu")
        model.part[0].weight = nn.Parameter(torch.ones(6, 4))  # not sharded
    old = list(model.parameters())
    opt = torch.optim.AdamW(old, lr=0.1)
    if way == "assign":
        state = {f"part.{k}": v for k, v in mlp(1).state_dict().items()}
        model.load_state_dict(state, assign=True)
    else:
        zero.load_safetensors(model, tmp_path)
    by = r"load_state_dict\(assign=True\)" if way == "assign" else r"zero\.load_safetensors"
    expected = f"AdamW was made before {by} and holds the parameter 'part.0.weight'.*make the optimizer after {by}, from"
    for p in old:
        p.grad = torch.zeros_like(p)
    with pytest.raises(ShardError, match=expected):
        opt.step()
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    if way == "assign":  # the parameter that it has stands in the model again
        was = dict(zip((f"part.{k}" for k in mlp().state_dict()), old, strict=True))
        model.load_state_dict({**state, "part.0.weight": was["part.0.weight"]}, assign=True)
        opt.step()


def test_a_parameter_that_was_assigned_after_the_optimizer_was_made():
    model = zero.shard(mlp())
    opt = zero.optimizer(torch.optim.SGD, model, lr=0.1)
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    model(batch()).sum().backward()
    with pytest.raises(
        OptimizerError, match=r"parameter 0\.weight was replaced .*make the optimizer after that"
    ):
        opt.step()


def test_loading_in_place_keeps_the_optimizer(tmp_path):
    save_file(mlp(1).state_dict(), tmp_path / "model.safetensors")
    model = zero.shard(mlp())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    zero.load_safetensors(model, tmp_path)
    model.load_state_dict(mlp(2).state_dict())
    with pytest.raises(RuntimeError, match="size mismatch"):  # nothing was replaced
        model.load_state_dict({k: v[:1] for k, v in mlp().state_dict().items()}, assign=True)
    model(batch()).sum().backward()
    opt.step()


def test_an_optimizer_of_another_model_is_left_alone():
    zero.shard(mlp())
    other = mlp()
    opt = torch.optim.SGD(other.parameters(), lr=0.1)
    other(batch()).sum().backward()
    before = other[0].weight.detach().clone()
    opt.step()
    assert not torch.equal(other[0].weight, before)


def test_an_optimizer_that_groups_what_is_no_tensor_is_left_alone(monkeypatch):
    monkeypatch.setattr(PendingGrad, "ever_made", True)
    zero.shard(nn.Linear(4, 4), device="cpu")

    class Named(torch.optim.SGD):
        def step(self, closure=None):
            return 7

    optimizer = Named([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.param_groups[0]["params"] = [("weight", param) for param in optimizer.param_groups[0]["params"]]
    assert optimizer.step() == 7
