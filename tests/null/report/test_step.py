"""A whole step: micro-batches, rates, and what bounds it."""

from __future__ import annotations

import pytest
import torch
from machines import machine
from torch import nn

from zero_compiler.report.step import MicroBatches, StepTime, step_of
from zero_compiler.tools import planning


def planned(tmp_path, micro_batches=1, rows=8, **told):
    import json

    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine(**told)))
    torch._dynamo.reset()
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    inputs = (torch.ones(rows, 64, device="meta"),)
    return planning.report(model, inputs, 4, micro_batches=micro_batches, hardware=str(path), compute="aten")


def test_work_is_that_of_three_products_a_weight(tmp_path):
    step = planned(tmp_path).step
    # The gradient of the input is not asked for.
    assert step.flops == 2 * 8 * 64 * 64 * (3 + 3 + 2)
    assert step.done == (8 * 4, "rows")
    assert step.flops_per_us == pytest.approx(step.flops / step.us)
    assert step.us == step.forward_us + step.backward_us + step.update_us
    assert step.update_us > 0


def test_micro_batches_send_gradients_once_where_there_is_room(tmp_path):
    one = planned(tmp_path, bytes_per_us=10.0)
    many = planned(tmp_path, 4, bytes_per_us=10.0)
    assert many.given.waits
    assert many.step.forward_us == pytest.approx(4 * one.step.forward_us)
    assert many.step.backward_us < 4 * one.step.backward_us
    assert many.step.bound == "device-device"
    assert many.peak_bytes == many.memory.accumulating_peak
    between = (one.memory.peak + one.memory.gradients + one.memory.accumulating_peak) // 2
    tight = planned(tmp_path, 4, bytes_per_us=10.0, memory_bytes=between, device_reserve_bytes=0)
    assert not tight.given.waits
    assert tight.step.backward_us == pytest.approx(4 * one.step.backward_us)
    assert tight.peak_bytes == one.memory.peak + one.memory.gradients


def test_lines_and_values():
    step = StepTime(1e3, 2e3, 1e3, 4, 1e9, 1e3, {"compute": 3e3, "python": 1e2}, MicroBatches(2, 8, 512), "m")
    lines = step.lines()
    assert lines[0].startswith(
        "predicted step: 4.00 ms (forward 1.00, backward 2.00, update 1.00) for 2 micro-batches"
    )
    assert (
        lines[1]
        == "1,024,000 tokens/s on all ranks; 0.5 TFLOP/s a device, 50% of what m does in matrix products alone"
    )
    assert lines[2] == "bound by compute, which has 3.00 ms to do (others: python 0.10 ms)"
    assert step.to_dict()["tokens_per_second"] == pytest.approx(1_024_000)
    nothing = step_of([], None, MicroBatches(), 1, "m")
    assert (nothing.us, nothing.us_each, nothing.share_of_peak) == (0.0, 0.0, 0.0)
