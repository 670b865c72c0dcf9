"""What is chosen for a frame before any search: small blocks share a unit, and so a compiled segment."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import zero_compiler as zero
from zero_compiler.ir.instructions import Compute
from zero_compiler.report.report import Report
from zero_compiler.tools.planning import report


def segments_of(found: Report) -> dict[str, int]:
    """How many segments each phase runs."""
    (frame,) = found.frames
    return {phase: sum(isinstance(i, Compute) for i in p.instrs) for phase, p in frame.programs.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "count"), [({}, 1), ({"compute": "aten"}, 6), ({"memory_budget_bytes": 1 << 30}, 6)]
)
def test_small_blocks_share_a_segment_where_operators_are_fused(given, count):
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(6)))
    model = zero.shard(copy.deepcopy(plain), stage=3)
    x = torch.randn(3, 4)
    torch.compile(model, backend="zero", options=given)(x).square().sum().backward()
    plain(x).square().sum().backward()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), want.grad)
    runs = {"forward": count, "backward": count + 1}  # which begins with what needs no weight
    assert segments_of(zero.inspect(model)) == runs
    assert segments_of(report(plain, (x,), **given)) == runs, "what is planned alone is not what runs"
