"""Segments whose code holds for some sizes alone: others get code of their own."""

from __future__ import annotations

import copy

import pytest
import torch
from marks import thorough
from torch import nn

import zero_compiler as zero
from zero_compiler.emit.segments import SegmentCompiler
from zero_compiler.params.modules import sharded_models_of


class Pooled(nn.Module):
    """Inductor takes windows of a pooling for numbers, and tells Dynamo so."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(3)
        self.head = nn.Linear(36, 5)

    def forward(self, x):
        return self.head(self.pool(torch.relu(self.conv(x))).flatten(1))


class Enlarged(nn.Module):
    """And sizes of what the backward of an enlargement sums."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x):
        return self.last(nn.functional.interpolate(torch.relu(self.conv(x)), scale_factor=2.0))


@pytest.mark.slow
@pytest.mark.parametrize("make", [Pooled, *thorough(Enlarged)])
def test_images_of_many_sizes(make):
    """The third size ran code that was made for the second."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = make()
    model = zero.shard(copy.deepcopy(plain))
    step = torch.compile(model, backend="zero")
    for size in (7, 11, 13, 9, 11):
        x = torch.randn(2, 3, size, size)
        for m, call in ((model, step), (plain, plain)):
            m.zero_grad()
            call(x).square().sum().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_layers_of_any_batch_still_share_code():
    torch._dynamo.reset()
    model = zero.shard(nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6))))
    step = torch.compile(model, backend="zero")
    compiled = []
    for batch in (2, 3, 5, 7):
        step(torch.randn(batch, 16)).sum().backward()
        (sharded_model,) = sharded_models_of(model)
        (compiler,) = sharded_model.compilers.values()
        assert isinstance(compiler, SegmentCompiler)
        compiled.append(compiler.compiled)
    assert compiled[1] == compiled[2] == compiled[3]  # one for any batch
    assert compiled[1] - compiled[0] <= compiled[0] < 12
