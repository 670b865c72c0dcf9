"""Steps of fused Adam on shards: torch's own results in one call of the kernel, and what the class is left to do."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import zero_compiler as zero

KINDS = [
    (torch.optim.AdamW, {}),
    (torch.optim.Adam, {"weight_decay": 0.1, "maximize": True}),
    (torch.optim.Adam, {"decoupled_weight_decay": True}),
]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def backward(m: nn.Module, seed: int) -> torch.Tensor:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
    loss: torch.Tensor = m(x).square().sum()
    loss.backward()
    return loss


def sharded(cls: Any = torch.optim.AdamW, **kw: object) -> tuple[nn.Module, Any]:
    """A model and its optimizer after the step in which states are made."""
    model = zero.shard(net(), device="cpu")
    opt = cls(model.parameters(), lr=0.1, fused=True, **kw)
    backward(model, 0)
    opt.step()
    opt.zero_grad()
    return model, opt


@contextlib.contextmanager
def asked(opt: Any) -> Iterator[list[int]]:
    """How many parameters the class of the optimizer asks for their gradients, at each group of a step."""
    out: list[int] = []
    own = type(opt)._init_group

    def init_group(self: Any, group: Any, *lists: Any) -> Any:
        out.append(len(group["params"]))
        return own(self, group, *lists)

    with mock.patch.object(type(opt), "_init_group", init_group):
        yield out


@pytest.mark.parametrize(("cls", "kw"), KINDS)
def test_the_same_bits_as_plain_parameters(cls, kw):
    plain, (model, opt) = net(), sharded(cls, **kw)
    other = cls(plain.parameters(), lr=0.1, fused=True, **kw)
    backward(plain, 0)
    other.step()
    other.zero_grad()
    for i in range(1, 4):
        for group in (*opt.param_groups, *other.param_groups):
            group["lr"] = 0.1 / i
        backward(plain, i)
        other.step()
        other.zero_grad()
        versions = [p._version for p in model.parameters()]
        backward(model, i)
        with asked(opt) as seen:
            opt.step()
        assert seen == []
        assert all(p._version > v for p, v in zip(model.parameters(), versions, strict=True))
        assert all(p.grad is not None for p in model.parameters())
        opt.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q)
        for key, value in opt.state[p].items():
            whole = value.full_tensor() if key != "step" else value
            assert torch.equal(whole, other.state[q][key])


def test_states_that_were_loaded_are_found():
    model, opt = sharded()
    backward(model, 1)
    opt.step()
    opt.load_state_dict(opt.state_dict())
    opt.state[model[0].weight]["exp_avg"] = torch.zeros_like(model[0].weight)
    before = opt.state[model[0].weight]["exp_avg"]
    opt.step()
    assert before.to_local().abs().sum() > 0
    assert all(int(s["step"]) == 3 for s in opt.state.values())


def test_groups_that_the_kernel_may_not_be_called_for_are_left_to_the_class():
    model, opt = sharded()
    opt.add_param_group({"params": [nn.Parameter(torch.ones(2))], "fused": False})
    opt.param_groups[1]["params"][0].grad = torch.ones(2)
    backward(model, 1)
    with asked(opt) as seen:
        opt.step()
    assert seen == [1]
    assert len(opt.param_groups) == 2
    assert opt.param_groups[1]["params"][0].sum() < 2


def _closure(model: nn.Module, opt: Any) -> dict[str, Any]:
    return {"closure": lambda: backward(model, 1)}


def _hook(model: nn.Module, opt: Any) -> dict[str, Any]:
    opt.register_step_pre_hook(lambda *_: None)
    return {}


def _later_hook(model: nn.Module, opt: Any) -> dict[str, Any]:
    opt.handle = register_optimizer_step_pre_hook(lambda *_: None)
    return {}


def _no_gradient(model: nn.Module, opt: Any) -> dict[str, Any]:
    model[0].weight.grad = None
    return {}


def _loss_scale(model: nn.Module, opt: Any) -> dict[str, Any]:
    opt.grad_scale, opt.found_inf = torch.tensor(1.0), torch.tensor(0.0)
    return {}


def _tensor_lr(model: nn.Module, opt: Any) -> dict[str, Any]:
    opt.param_groups[0]["lr"] = torch.tensor(0.1)
    return {}


@pytest.mark.parametrize("how", [_closure, _hook, _later_hook, _no_gradient, _loss_scale, _tensor_lr])
def test_a_step_of_another_kind_is_left_to_the_class(how):
    model, opt = sharded()
    backward(model, 1)
    kw = how(model, opt)
    with asked(opt) as seen:
        opt.step(**kw)
    if hasattr(opt, "handle"):
        opt.handle.remove()
    assert seen == [4]
    steps = {int(s["step"]) for s in opt.state.values()}
    assert steps == ({1, 2} if how is _no_gradient else {2})


def test_hooks_behind_a_step_see_the_optimizer_and_its_gradients():
    model, opt = sharded()
    backward(model, 1)
    seen: list[object] = []
    opt.register_step_post_hook(lambda o, *_: seen.append(o.param_groups[0]["params"][0].grad))
    opt.step()
    assert seen == [model[0].weight.grad]
