"""The areas of the picture add up to the peak that the report states."""

from __future__ import annotations

import pytest
import torch
from marks import slow
from null.offloaded import planned
from torch import nn

from zero_compiler.report.lifetimes import lifetimes
from zero_compiler.report.memory_areas import AREAS, areas_of, at_rest
from zero_compiler.tools.planning import report


def rows_of(told):
    return {
        phase: areas_of(program, told.memory, lifetimes(program))
        for frame in told.frames
        for phase, program in frame.programs.items()
    }


def most(told):
    return max(sum(row) for rows in [*rows_of(told).values(), [at_rest(told.memory)]] for row in rows)


def net():
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 31))


@pytest.mark.parametrize(
    "fields", [{"stage": 3}, *slow({"stage": 0}, {"stage": 1}, {"stage": 3, "bucket_bytes": 0})], ids=str
)
def test_the_highest_point_is_the_predicted_peak(fields):
    torch._dynamo.reset()
    told = report(net(), (torch.zeros(16, 64),), 2, compute="aten", **fields)
    assert most(told) == told.memory.peak
    assert all(n >= 0 for rows in rows_of(told).values() for row in rows for n in row)


@pytest.mark.slow
def test_so_it_is_where_tiers_are_used(with_files_anywhere):
    files = {f"offload_{what}": "nvme" for what in ("params", "grads", "optimizer")}
    fields = with_files_anywhere(**files)
    told = planned(fields, compute="aten")
    assert most(told) == told.memory.peak


def test_each_area_is_what_its_name_says():
    torch._dynamo.reset()
    model = net()
    told = report(model, (torch.zeros(16, 64),), 2, compute="aten", bucket_bytes=0)
    forward, backward = rows_of(told).values()
    area = {name: k for k, name in enumerate(AREAS)}
    largest = 4 * 64 * 96
    gathered = [row[area["gathered weights"]] for row in forward]
    assert max(gathered) >= largest
    assert gathered[-1] <= 4 * 31 * 96 + 4 * 32 * 96  # the last one alone, padded
    assert max(row[area["full gradients"]] for row in backward) >= largest
    assert max(row[area["full gradients"]] for row in forward) == 0
    gradients = [row[area["gradients, this rank's rows"]] for row in backward]
    assert gradients == sorted(gradients)
    assert gradients[-1] == told.memory.gradients
    assert max(row[area["gradients, this rank's rows"]] for row in forward) == 0
    assert {row[area["shards of parameters"]] for row in [*forward, *backward]} == {told.memory.parameters}
