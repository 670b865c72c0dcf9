"""The decisions of a report: of whole models and of parts that were sharded by themselves."""

from __future__ import annotations

import torch
from null.small import two
from torch import nn

import zero_compiler as zero
from zero_compiler.report.decisions import decisions_of, made_for, part_prefixes


def planned(model, **fields):
    torch._dynamo.reset()
    return zero.inspect(zero.shard(model, device="cpu", compute="aten", **fields), (torch.ones(5, 4),))


def test_decisions_of_a_model():
    report = planned(two(), stage=2)
    found = report.decisions
    assert found.made_for.config["stage"] == 2
    assert (found.made_for.world, found.made_for.replicas, found.made_for.tensor_ranks) == (1, 1, 1)
    assert {name: row.shape for name, row in found.weights.items()} == {
        "first.weight": (3, 4),
        "first.bias": (3,),
        "second.weight": (3, 4),
        "second.bias": (3,),
    }
    assert [(f.kind, f.inputs) for f in found.frames] == [("training", ("f32[5,4]",))]
    assert report.to_dict()["decisions"] == found.to_dict()


def test_nothing_is_decided_of_what_is_not_planned():
    model = zero.shard(two(), device="cpu")
    assert zero.inspect(model).to_dict()["decisions"] is None
    assert decisions_of([], []) is None


def test_parts_have_numbers():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    zero.shard(model[0], device="cpu", compute="aten")
    report = planned(model)
    assert sorted(report.decisions.weights) == ["0:bias", "0:weight", "1:1.bias", "1:1.weight"]
    from zero_compiler.params.modules import sharded_models_of

    parts = sharded_models_of(model)
    assert sorted(part_prefixes(parts).values()) == ["0:", "1:"]
    assert made_for(parts, report.frames[0].config).world == 1
