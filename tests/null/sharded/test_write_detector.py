"""Which classes of modules have code that writes in place, and what becomes of what a forward writes."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import zero_compiler as zero
from zero_compiler.sharded.write_detector import code_may_write, may_write, own_code_may_write


class Reads(nn.Module):
    def forward(self, x):
        return x * 2


class Writes(nn.Module):
    def forward(self, x):
        self.weight.mul_(2)
        return x


class Inherits(Writes):
    pass


class ByData(nn.Module):
    def forward(self, x):
        return self.weight.data


def test_code_with_words_that_write_is_found():
    assert [may_write(c) for c in (Reads, Writes, Inherits, ByData)] == [False, True, True, True]


def test_modules_of_torch_are_not_searched():
    assert not may_write(nn.BatchNorm1d)


def clamp(weight):
    weight.data.clamp_(-1, 1)


def clamp_by_way_of_another(weight):
    clamp(weight)


class ByFunction(nn.Module):
    def forward(self, x):
        clamp_by_way_of_another(self.weight)
        return x


class ByProperty(nn.Module):
    @property
    def clamped(self):
        return self.weight.clamp_(-1, 1)


class ByFunctionWithin(nn.Module):
    def forward(self, x):
        def clamp_now():
            self.weight.clamp_(-1, 1)

        clamp_now()
        return x


class Clamper:
    def __call__(self, module, args):
        clamp(module.weight)


def test_functions_properties_and_inner_functions_are_searched():
    assert [may_write(c) for c in (ByFunction, ByProperty, ByFunctionWithin)] == [True] * 3


class Constraints:
    @staticmethod
    def clamp(weight):
        weight.data.clamp_(-1, 1)

    def halve(self, weight):
        weight.data.mul_(0.5)

    def look(self, weight):
        return weight.norm()


constraints = Constraints()


def clamped(forward):
    @functools.wraps(forward)
    def call(self, x):
        clamp(self.weight)
        return forward(self, x)

    return call


class ByClass(nn.Module):
    def forward(self, x):
        Constraints.clamp(self.weight)
        return x


class ByObject(nn.Module):
    def forward(self, x):
        constraints.halve(self.weight)
        return x


class Looks(nn.Module):
    def forward(self, x):
        return x * constraints.look(self.weight)


class ByDecorator(nn.Module):
    @clamped
    def forward(self, x):
        return x


class ByDefault(nn.Module):
    def forward(self, x, constrain=clamp):
        constrain(self.weight)
        return x


class ByAttribute(nn.Module):
    def __init__(self, constraint):
        super().__init__()
        self.constraint = constraint

    def forward(self, x):
        self.constraint.halve(self.weight)
        return x


class ByList(nn.Module):
    def __init__(self):
        super().__init__()
        self.constraints = [clamp]


def test_methods_decorators_and_defaults_are_searched():
    classes = (ByClass, ByObject, Looks, ByDecorator, ByDefault)
    assert [may_write(c) for c in classes] == [True, True, False, True, True]


def test_objects_and_lists_of_one_module_are_searched():
    found = [own_code_may_write(m) for m in (ByAttribute(constraints), ByAttribute(3), ByList())]
    assert found == [True, False, True]


def test_hooks_and_functions_of_one_module_are_searched():
    plain, hooked, holding = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    hooked.register_forward_pre_hook(lambda module, args: clamp(module.weight))
    holding.constrain = functools.partial(clamp)
    assert [own_code_may_write(m) for m in (plain, hooked, holding)] == [False, True, True]
    assert code_may_write(Clamper())
    assert not code_may_write(Reads.forward)


class Binary(nn.Module):
    """The product is of the signs of a weight, whose values are back when the forward ends."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        weight = self.last.weight
        values = weight.data.clone()
        weight.data = weight.data.sign()
        y = F.linear(torch.relu(self.inner(x)), weight)
        weight.data = values
        return y


class Clamped(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
        return torch.relu(super().forward(x))


class Checkpointed(nn.Module):
    """A block that bounds its weight in every forward, and is made again in backward."""

    def __init__(self):
        super().__init__()
        self.first, self.block = nn.Linear(6, 6), Clamped(6, 6)

    def forward(self, x):
        return checkpoint(self.block, self.first(x), use_reentrant=False)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("made", [Binary, Checkpointed])
def test_writes_of_a_forward_where_the_copy_is_the_shard(made, stage):
    """On one rank the full weight is the memory of the parameter, and counts its writes with it."""
    results = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = made()
        if sharded:
            zero.shard(model, stage=stage, device="cpu")
        model(torch.ones(3, 6)).square().sum().backward()
        results.append({name: (whole(p), whole(p.grad)) for name, p in model.named_parameters()})
    plain, ours = results
    for name, (weight, grad) in plain.items():
        assert torch.equal(weight, ours[name][0])
        assert ours[name][1] is None if grad is None else torch.equal(grad, ours[name][1])


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value
