"""Parameters that a model keeps past the attributes of its modules, and hooks that are not the user's."""

from __future__ import annotations

import functools
import types

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


class Adapter:
    def __init__(self, w, hidden=()) -> None:
        self.w, self.hidden = w, hidden

    def apply(self, x):
        return x @ self.w


KEEPS = {
    "list": _in_a_list,
    "dict": _in_a_dictionary,
    "partial": lambda w: functools.partial(F.linear, weight=w),
    "function": lambda w: lambda x: x @ w,
    "Adapter": Adapter,
    "method": lambda w: Adapter(w).apply,
    "SimpleNamespace": lambda w: types.SimpleNamespace(of=[w]),
}


@pytest.mark.parametrize("kind", KEEPS)
def test_a_module_that_keeps_a_parameter_elsewhere_is_refused(kind):
    with pytest.raises(ShardError, match=rf"keeps parameter 'b\.a\.weight' in b\.kept, a {kind}"):
        zero.shard(nn.ModuleDict({"b": Held(KEEPS[kind])}), device="cpu")


def test_objects_that_keep_themselves_and_functions_that_are_not_made_yet_are_no_matter():
    def keep(w):
        adapter = Adapter(None)
        adapter.w = adapter

        def later():
            return made

        adapter.hidden = [later]
        if w is None:
            made = 1
        return adapter

    zero.shard(Held(keep), device="cpu")


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


KEPT_BY_THE_MODULE_OF_PYTHON = []


class Global(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 16, bias=False)
        KEPT_BY_THE_MODULE_OF_PYTHON[:] = [self.a.weight]

    def forward(self, x):
        return F.linear(x, KEPT_BY_THE_MODULE_OF_PYTHON[0]).square().mean()


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_a_forward_that_reads_one_from_elsewhere_is_refused(how):
    model = zero.shard(Global(), device="cpu")
    run = torch.compile(model, backend="zero", options={"compute": "aten"}) if how == "compiled" else model
    with pytest.raises(Exception, match=r"keeps parameter 'a\.weight' in a list, a dictionary, a closure or"):
        run(torch.ones(2, 8)).backward()


def test_a_layer_outside_that_was_tied_to_one_is_refused():
    inner, outer = nn.Linear(8, 8), nn.Linear(8, 8)
    outer.weight = inner.weight
    zero.shard(inner, device="cpu")
    with pytest.raises(ShardError, match="keeps parameter 'weight'"):
        outer(inner(torch.ones(2, 8))).sum().backward()


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
