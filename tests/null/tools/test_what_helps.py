"""What would shorten a step, each change planned."""

from __future__ import annotations

import pytest
from null.tools.fit.alike_layers import asked

from zero_compiler.tools.fitting_plan import Asked
from zero_compiler.tools.what_helps import with_help


def silent(line: str) -> None: ...


@pytest.mark.slow
def test_replicas_and_stage_2_are_planned_where_the_link_bounds(tmp_path):
    ask = asked(tmp_path, bytes_per_us=50.0)
    report = ask.report(None, silent)
    assert report.step.bound == "device-device"
    helped = with_help(ask, report, silent).helps
    found = {line.split(":")[0]: line for line in helped}
    assert {
        *("--batch 16", "--replicas 2", "--stage 2", "--param-dtype bfloat16", "--gather-dtype int8")
    } <= set(found)
    two = asked(tmp_path, bytes_per_us=50.0, stage=2).report(None, silent)
    assert f"{(two.step_us - report.step_us) / 1e3:+,.1f} ms a step" in found["--stage 2"]
    assert "of the time a row" in found["--batch 16"]
    assert "what would help, each of them planned:" in with_help(ask, report, silent).summary()


@pytest.mark.slow
def test_an_interrupt_keeps_what_was_planned(tmp_path, monkeypatch):
    ask = asked(tmp_path)
    report = ask.report(None, silent)

    def stopped(self, budget_bytes, say):
        raise KeyboardInterrupt

    monkeypatch.setattr(Asked, "report", stopped)
    assert with_help(ask, report, silent).helps == ("the rest was not planned: interrupted",)


@pytest.mark.slow
def test_a_change_that_fits_no_budget_is_told(tmp_path):
    ask = asked(tmp_path)
    report = ask.report(None, silent)
    tight = asked(tmp_path, memory_bytes=report.memory.peak).report(report.memory.peak, silent)
    helped = with_help(ask, tight, silent).helps
    assert any("no plan of it was found that fits" in line or "on the device" in line for line in helped)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_update_is_that_of_the_optimizer_that_was_named(tmp_path, optimizer):
    report = asked(tmp_path, optimizer=optimizer).report(None, silent)
    states = {"adamw": 2, "sgd": 0}[optimizer]
    assert report.memory.optimizer == states * report.memory.parameters
    assert f"assumed: {optimizer}, fused; {states} fp32 states a parameter" in report.update.what
