"""Models with fewer of the layers that are alike."""

from __future__ import annotations

import torch
from torch import nn

from zero_compiler.tools.fit.shallow import kind_of, shallow, stacks_of


class Tower(nn.Module):
    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.first = nn.Linear(4, widths[0])
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(w, w), nn.Linear(w, w)) for w in widths)
        self.tied = self.first

    def forward(self, x):
        x = self.first(x)
        for layer in self.h:
            x = layer(x)
        return x


def test_only_layers_that_are_alike_are_a_stack():
    (stack,) = stacks_of(Tower([8] * 5))
    assert (stack.path, stack.count) == ("h", 5)
    assert stacks_of(Tower([8, 8, 8, 8, 16])) == []
    # Two leave nothing out.
    assert stacks_of(Tower([8, 8])) == []


def test_what_lies_in_a_layer_is_no_stack_of_its_own():
    layers = nn.ModuleList(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))) for _ in range(4))
    model = nn.Module()
    model.h = layers
    assert [s.path for s in stacks_of(model)] == ["h"]


def test_fewer_layers_are_those_of_the_front_and_the_model_stays_as_it_is():
    model = Tower([8] * 5)
    two = shallow(model, {"h": 2})
    assert (len(two.h), len(model.h)) == (2, 5)
    x = torch.randn(3, 4)
    want = model.h[1](model.h[0](model.first(x)))
    assert torch.equal(two(x), want)
    assert two.tied is two.first
    assert two.first is not model.first


def test_kinds_tell_shapes_and_dtypes_apart():
    assert kind_of(nn.Linear(4, 8)) == kind_of(nn.Linear(4, 8))
    assert kind_of(nn.Linear(4, 8)) != kind_of(nn.Linear(8, 4))
    assert kind_of(nn.Linear(4, 8)) != kind_of(nn.Linear(4, 8, dtype=torch.bfloat16))
    assert kind_of(nn.ReLU()) != kind_of(nn.GELU())
