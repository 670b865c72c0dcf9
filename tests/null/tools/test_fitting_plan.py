"""Plans for a machine: within its bytes where that can be, and else the least change that fits."""

from __future__ import annotations

import json

import pytest
import torch
from machines import machine
from torch import nn

from zero_compiler.errors import MemoryBudgetError
from zero_compiler.tools import fitting_plan
from zero_compiler.tools.fitting_plan import Asked, Change, fitting_report
from zero_compiler.tools.model_source import ModelSource

WIDTH, DEPTH = 64, 4
# Bytes of parameters; gradients are as many and the states of Adam twice as many.
PARAMETERS = DEPTH * WIDTH * WIDTH * 4


class Deep(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(DEPTH))

    def forward(self, x):
        for layer in self.h:
            x = torch.tanh(layer(x))
        return x.square().mean()


def asked(tmp_path, world=4, batch=2, width=WIDTH, **fields) -> Asked:
    """Of a machine that has ``memory_bytes`` and keeps nothing in reserve."""
    torch._dynamo.reset()
    told = {
        name: fields.pop(name)
        for name in list(fields)
        if name.endswith("memory_bytes") or name == "nvme_bytes"
    }
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine(device_reserve_bytes=0, **told)))
    source = ModelSource(Deep(width), lambda rows: (torch.ones(rows, width, device="meta"),), batch, "Deep")
    return Asked(source, world, "cpu", {"compute": "aten", "hardware": str(path), **fields}, batch)


def fitted(tmp_path, **given):
    said: list[str] = []
    report = fitting_report(asked(tmp_path, **given), said.append)
    return report, said


@pytest.mark.slow
def test_a_plan_is_made_within_the_bytes_of_the_machine_less_its_reserve(tmp_path):
    free, _ = fitted(tmp_path, memory_bytes=1 << 30)
    assert free.verdict.fits is True
    assert free.verdict.change == ""
    room = free.memory.peak - 8192  # what a plan without a need to save takes
    tight, _ = fitted(tmp_path, memory_bytes=room)
    assert tight.verdict.fits is True
    assert tight.memory.peak <= room
    assert tight.frames[0].config.memory_budget_bytes == room


def test_where_the_hardware_does_not_tell_its_bytes_there_is_no_budget(tmp_path):
    report, _ = fitted(tmp_path, memory_bytes=None)
    assert report.verdict.fits is None
    assert report.frames[0].config.memory_budget_bytes is None


@pytest.mark.slow
def test_a_higher_stage_is_the_least_change_where_it_fits(tmp_path):
    report, said = fitted(tmp_path, world=4, stage=0, memory_bytes=2 * PARAMETERS + 80_000)
    assert report.verdict.fits is False
    # Parameters, gradients and states are on every rank.
    memory = report.memory
    assert memory.parameters + memory.gradients + memory.optimizer == 4 * PARAMETERS
    assert report.verdict.change.startswith("the least change that fits: --stage 2 (")
    assert "the least change that fits: --stage 2" in report.summary().split("\n")[0]
    assert any("looking for the least change that fits: --stage 2" in line for line in said)


@pytest.mark.slow
def test_states_in_files_are_the_change_where_a_stage_is_not_enough(tmp_path):
    report, _ = fitted(tmp_path, world=1, memory_bytes=3 * PARAMETERS, nvme_bytes=1 << 40)
    assert report.verdict.change.startswith(
        "the least change that fits: --offload-optimizer nvme --nvme-dir DIR ("
    )
    assert "in files" in report.verdict.change


@pytest.mark.slow
def test_a_change_that_needs_more_than_another_tier_has_is_none(tmp_path):
    report, _ = fitted(tmp_path, world=1, memory_bytes=3 * PARAMETERS, nvme_bytes=PARAMETERS)
    # More ranks share what rests.
    assert report.verdict.change.startswith("the least change that fits: --world ")


@pytest.mark.slow
def test_a_smaller_batch_is_the_change_where_activations_are_too_much(tmp_path, monkeypatch):
    monkeypatch.setattr(
        fitting_plan, "_changes", lambda asked, rest_fits: iter([Change(batch=asked.batch // 2)] * rest_fits)
    )
    rows = 1 << 14
    report, _ = fitted(tmp_path, world=1, batch=rows, memory_bytes=20_000_000)
    assert report.verdict.fits is False
    assert report.verdict.change.startswith(f"the least change that fits: --batch {rows // 2} (")


def test_the_least_that_a_search_found_is_said_beside_the_plan_without_a_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(fitting_plan, "_changes", lambda asked, rest_fits: iter(()))
    made, least = Asked.report, []

    def report(self, budget_bytes, say):
        if budget_bytes is None:
            return made(self, None, say)
        refused = MemoryBudgetError("the search found more than there is")
        least.append(budget_bytes + 100_000)
        refused.peak_bytes = least[0]
        raise refused

    monkeypatch.setattr(Asked, "report", report)
    rows = 1 << 14
    found, said = fitted(tmp_path, world=1, batch=rows, memory_bytes=4 * PARAMETERS + rows * WIDTH * 4)
    device = found.verdict.tiers[0]
    assert device.needed_bytes == least[0]
    assert device.needed_bytes < device.unlimited_bytes == found.memory.peak
    assert "without a budget)" in found.verdict.line()
    assert "no change that was tried fits" in found.verdict.line()
    assert any("planning without a budget" in line for line in said)


@pytest.mark.slow
def test_ctrl_c_while_a_plan_is_looked_for_shows_the_one_without_a_budget(tmp_path, monkeypatch):
    made = Asked.report

    def report(self, budget_bytes, say):
        if budget_bytes is None:
            return made(self, None, say)
        raise KeyboardInterrupt

    monkeypatch.setattr(Asked, "report", report)
    found, _ = fitted(tmp_path, world=1, batch=1 << 14, memory_bytes=4 * PARAMETERS)
    assert found.verdict.fits is False
    assert found.verdict.change == "interrupted before a plan was found that fits"


@pytest.mark.slow
def test_no_more_plans_are_made_than_is_said(tmp_path, monkeypatch):
    """Every candidate's bytes at rest fit, and none of its plans does."""
    rows, made = 1 << 14, []
    changes = [Change(batch=rows)] * (fitting_plan.MOST_PLANS + 3)
    monkeypatch.setattr(fitting_plan, "_changes", lambda asked, rest_fits: iter(changes))
    plan = Asked.report
    monkeypatch.setattr(
        Asked, "report", lambda self, budget, say: made.append(budget) or plan(self, budget, say)
    )
    report, _ = fitted(tmp_path, world=1, batch=rows, memory_bytes=4 * PARAMETERS + rows * WIDTH * 4)
    assert len(made) == 2 + fitting_plan.MOST_PLANS
    assert (
        f"no change was found that fits, of {fitting_plan.MOST_PLANS} that were planned"
        in report.verdict.line()
    )


def test_an_interrupt_ends_the_search_for_a_change_alone(tmp_path, monkeypatch):
    def interrupted(asked, spec):
        raise KeyboardInterrupt

    monkeypatch.setattr(fitting_plan, "_rest_fits", interrupted)
    report, _ = fitted(tmp_path, stage=0, memory_bytes=PARAMETERS)
    assert report.verdict.fits is False
    assert report.verdict.line().endswith("interrupted before a change was found that fits")


@pytest.mark.slow
def test_a_budget_that_was_given_is_held_to(tmp_path):
    with pytest.raises(MemoryBudgetError):
        fitted(tmp_path, memory_bytes=1 << 30, memory_budget_bytes=PARAMETERS // 8)
    wide, _ = fitted(tmp_path, stage=0, memory_bytes=4 * PARAMETERS + (1 << 20), memory_budget_bytes=1 << 40)
    assert wide.verdict.fits is True
    over, _ = fitted(tmp_path, stage=0, memory_bytes=PARAMETERS, memory_budget_bytes=1 << 40)
    assert over.verdict.fits is False


@pytest.mark.slow
def test_weights_are_cut_into_tiles_where_nothing_less_fits(tmp_path):
    width = 512
    wide = {"width": width, "memory_bytes": int(5.5 * width * width * 4)}
    room = wide["memory_bytes"]
    for given in ({}, {"memory_budget_bytes": room}):
        told, _ = fitted(tmp_path, **given, **wide)
        assert told.verdict.fits is True
        assert told.memory.peak <= room
        assert any(plan.tile_rows for plan in told.frames[0].params.values())
