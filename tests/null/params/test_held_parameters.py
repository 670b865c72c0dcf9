"""Parameters that a model keeps past the attributes of its modules, and hooks that are not the user's."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import ShardError


class Held(nn.Module):
    def __init__(self, how) -> None:
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.kept = how(self.a.weight)

    def forward(self, x):
        return F.linear(x, self.a.weight, self.a.bias)


def _in_a_list(w):
    return [w]


def _in_a_dictionary(w):
    return {"w": (w, 3)}


@pytest.mark.parametrize("how", [_in_a_list, _in_a_dictionary])
def test_a_module_that_keeps_a_parameter_in_a_container_is_refused(how):
    with pytest.raises(ShardError, match=r"keeps parameter 'b\.a\.weight' in b\.kept, a (list|dict)"):
        zero.shard(nn.ModuleDict({"b": Held(how)}), device="cpu")


class Mandatory(dict):
    """As configurations are that raise for what nobody has given."""

    def values(self):
        raise RuntimeError("missing")

    __iter__ = __getitem__ = values


def test_a_dictionary_that_raises_is_no_matter():
    class Configured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.cfg = nn.Linear(8, 8), Mandatory(a=1)

    zero.shard(Configured(), device="cpu")


def test_what_is_no_parameter_may_be_kept():
    model = zero.shard(Held(lambda w: [w.detach().clone()]), device="cpu")
    model(torch.ones(2, 8)).sum().backward()
    assert model.a.weight.grad is not None


class Closure(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 16, bias=False)
        self.run = functools.partial(F.linear, weight=self.a.weight)

    def forward(self, x):
        return self.run(x).square().mean()


def test_a_compiled_forward_that_reads_one_from_a_closure_is_refused():
    model = zero.shard(Closure(), device="cpu")
    run = torch.compile(model, backend="zero", options={"compute": "aten"})
    with pytest.raises(Exception, match=r"keeps parameter 'a\.weight' in a list, a dictionary or a closure"):
        run(torch.ones(2, 8))


@pytest.mark.parametrize("called", [False, True])
def test_a_model_may_be_compiled_before_it_is_sharded(called):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    run = torch.compile(model, backend="zero", options={"compute": "aten"})
    if called:
        run(torch.ones(2, 8)).sum().backward()
        model.zero_grad()
    want = [torch.autograd.grad(model(torch.ones(2, 8)).sum(), p)[0] for p in model.parameters()]
    zero.shard(model, stage=3, device="cpu")
    run(torch.ones(2, 8)).sum().backward()
    for p, grad in zip(model.parameters(), want, strict=True):
        assert torch.equal(p.grad._local_tensor, grad)


def test_a_hook_of_the_user_is_refused_still():
    model = nn.Linear(8, 4)
    run = torch.compile(model, backend="zero", options={"compute": "aten"})
    run(torch.ones(2, 8)).sum().backward()
    model.weight.register_hook(lambda grad: grad)
    with pytest.raises(ShardError, match="weight has a hook for its gradient"):
        zero.shard(model, device="cpu")
