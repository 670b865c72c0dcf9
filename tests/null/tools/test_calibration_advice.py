"""What a report says of calibration."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import zero_compiler as zero
from zero_compiler.cost import hardware, processors
from zero_compiler.tools import inspect
from zero_compiler.tools.planning import report


@pytest.fixture
def planned(monkeypatch, tmp_path):
    """Plans of a linear layer on this machine, which is of some kind and was not calibrated."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def plan(kind: str, **fields) -> inspect.Report:
        monkeypatch.setattr(processors, "here", lambda: kind)
        torch._dynamo.reset()
        model = zero.shard(nn.Linear(256, 256), device="cpu", **fields)
        return zero.inspect(model, (torch.ones(512, 256),))

    return plan


def test_of_an_unknown_processor_it_is_not_known_how_much_it_helps(planned):
    said = planned("").calibration
    assert re.match(
        "calibration may help: this machine was not calibrated, and nothing is known of its", said
    )
    assert re.search(r"float32 products are \d+% of the [\d.]+ ms predicted for a step", said)
    assert "0.49 to 1.18 of the time" in said


def test_where_oneDNN_is_left_out_on_a_processor_that_is_known_it_is_said_how_much(planned):
    whole = planned("AMD Zen 5", hardware="laptop")
    said = whole.calibration
    assert "hardware 'laptop' says nothing of oneDNN, which on AMD Zen 5 takes 0.49 of the time" in said
    # Forward, and the gradient of the weight: the input needs none.
    us = 2 * 2 * 512 * 256 * 256 / hardware.load("laptop").matmul_flops_per_us["float32"]
    assert f"about {us * (1 - 112 / 229) / 1e3:,.1f} ms would be saved" in said
    assert said in str(whole)
    assert whole.to_dict()["calibration"] == said


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("AMD Zen 5", {}),  # its rates are known
        ("AMD Zen 5", {"hardware": "laptop", "kernels": "torch"}),
        ("AMD Zen 5", {"hardware": "laptop", "compute": "aten"}),
        ("AMD Zen 5", {"hardware": "laptop", "param_dtype": torch.bfloat16}),
        ("Intel Xeon with AMX", {"hardware": "laptop"}),  # its BLAS is the faster one
        ("", {"hardware": "laptop"}),
    ],
)
def test_nothing_is_said_where_nothing_would_change(planned, kind, fields):
    found = planned(kind, **fields)
    assert found.calibration == ""
    assert "calibration" not in found.to_dict()


def test_a_plan_for_another_machine_says_nothing():
    torch._dynamo.reset()
    assert report(nn.Linear(256, 256), (torch.ones(512, 256),), 2, compute="aten").calibration == ""
