"""Descriptions of machines: presets, the cache file of `zero-compiler calibrate`, and who reads it."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import machine
from torch import nn
from typer.testing import CliRunner

from zero_compiler import calibrate, hardware
from zero_compiler.cli import app
from zero_compiler.errors import ConfigError
from zero_compiler.hardware import HardwareSpec, Link, PythonTime
from zero_compiler.planning import report

KINDS = ("all_gather", "reduce_scatter", "all_reduce")


@pytest.mark.parametrize("name", hardware.presets())
def test_every_preset_loads_and_names_its_source(name):
    spec = hardware.load(name)
    assert spec.name == name
    assert len(spec.source) > 40, spec.source
    assert datetime.date.fromisoformat(spec.date) <= datetime.date.today()
    for world in (2, 3, 8, 64):
        for kind in KINDS:
            link = spec.collective(kind, world)
            assert link.latency_us > 0
            assert link.bytes_per_us > 0
    assert {"float32", "bfloat16"} <= set(spec.matmul_flops_per_us)
    rates = (spec.memory_bytes_per_us, spec.vector_per_us, spec.special_per_us, spec.kernel_us)
    assert min(*rates, *spec.matmul_flops_per_us.values(), spec.memory_bytes, spec.host_memory_bytes) > 0
    for python in (spec.forward_python, spec.backward_python):
        assert min(python.call_us, python.param_us) > 0
    assert {lane for group in spec.shared for lane in group} <= set(hardware.LANES)
    assert HardwareSpec.from_dict(json.loads(spec.to_json())) == spec


def test_the_machines_of_the_documentation_are_there():
    assert hardware.presets() == ["dgx-2-v100", "dgx-a100", "dgx-h100", "laptop"]
    with pytest.raises(
        ConfigError, match="hardware 'dgx' is neither a file nor a preset; presets: dgx-2-v100,"
    ):
        hardware.load("dgx")


def test_a_file_without_times_of_python_is_read_as_one_that_did_not_measure_them():
    spec = hardware.load("laptop")
    data = spec.to_dict()
    del data["forward_python"], data["backward_python"]
    old = HardwareSpec.from_dict(data)
    assert old == dataclasses.replace(spec, forward_python=PythonTime(0, 0), backward_python=PythonTime(0, 0))
    data["forward_python"] = {"param": 3.0}
    with pytest.raises(ConfigError, match="hardware spec: .*'param'; see `zero-compiler calibrate`"):
        HardwareSpec.from_dict(data)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.first(x)).square().mean()


def planned():
    torch._dynamo.reset()
    (frame,) = report(Net(), (torch.ones(2, 8),), 2).frames
    return frame


@pytest.fixture
def measured(monkeypatch, tmp_path) -> HardwareSpec:
    """What a measurement would find; an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    spec = HardwareSpec.from_dict(machine(latency_us=3.0, bytes_per_us=500.0))
    spec = dataclasses.replace(spec, date=datetime.date.today().isoformat())

    def measure(worlds, directory, say):
        say("something")
        assert (worlds, directory) == ([2, 4], None)
        return spec

    monkeypatch.setattr(calibrate, "calibrate", measure)
    return spec


@pytest.mark.slow
def test_what_calibrate_finds_is_kept_and_read_by_the_next_plan(measured, tmp_path):
    path = tmp_path / "cache" / "zero_compiler" / "hardware.json"
    assert hardware.cache_path() == path
    assert hardware.load() == hardware.load("laptop")
    before = planned()
    done = CliRunner().invoke(app, ["calibrate", "--world", "2", "--world", "4"])
    assert done.exit_code == 0, done.output
    assert f"kept in {path}" in done.output.replace("\n", "")
    kept = json.loads(path.read_text())
    assert kept["date"] == datetime.date.today().isoformat()
    assert hardware.load() == measured
    after = planned()
    assert (before.bucket_bytes, after.bucket_bytes) == (8 * 200 * 1200, 8 * 3 * 500)
    assert after.timelines["forward"].total_us != before.timelines["forward"].total_us
    # A plan that names its machine takes no notice.
    torch._dynamo.reset()
    (frame,) = report(Net(), (torch.ones(2, 8),), 2, hardware="laptop").frames
    assert frame.timelines["forward"].total_us == before.timelines["forward"].total_us


def test_calibrate_writes_elsewhere_where_it_is_told_to(measured, tmp_path):
    path = tmp_path / "sub" / "mine.json"
    done = CliRunner().invoke(app, ["calibrate", "--world", "2", "--world", "4", "--output", str(path)])
    assert done.exit_code == 0, done.output
    assert hardware.load(str(path)) == measured
    assert not hardware.cache_path().exists()


def test_doctor_says_which_machine_plans_are_made_for(measured):
    said = CliRunner().invoke(app, ["doctor"]).output
    assert "laptop of 2026-11-21 (preset)" in said
    CliRunner().invoke(app, ["calibrate", "--world", "2", "--world", "4"])
    said = CliRunner().invoke(app, ["doctor"]).output
    assert f"test of {measured.date}" in said
    assert "(preset)" not in said


# What calibration makes of its measurements ----------------------------------------------------------------

SIZES = list(calibrate._SIZES)


@pytest.mark.parametrize("spoiled", range(len(SIZES)))
@pytest.mark.parametrize("times", [0.2, 1.5, 20])
@pytest.mark.parametrize("link", [Link(200.0, 1200.0), Link(20.0, 10_000.0), Link(20.0, 360_000.0)])
def test_one_spoiled_measurement_moves_no_link(link, times, spoiled):
    measured = [link.us(size) for size in SIZES]
    measured[spoiled] *= times
    found = calibrate._fit(SIZES, measured)
    assert found.latency_us == pytest.approx(link.latency_us, rel=1e-6)
    assert found.bytes_per_us == pytest.approx(link.bytes_per_us, rel=1e-6)


@given(st.lists(st.floats(0.95, 1.05), min_size=len(SIZES), max_size=len(SIZES)))
@settings(max_examples=200, deadline=None)
def test_small_errors_of_all_measurements_stay_small(errors):
    """Within 5 % of the truth. The line through the smallest and the largest size is as near to it everywhere, and so at
    most 0.103 (in logarithms) from each of the three other measurements, of which one does not count; the line that is
    taken is no further off in sum, hence at four sizes by no more than 2 x 0.103 + 0.051 = 0.26."""
    link = Link(200.0, 1200.0)
    found = calibrate._fit(SIZES, [link.us(n) * e for n, e in zip(SIZES, errors, strict=True)])
    off = sorted(abs(math.log(found.us(n) / link.us(n))) for n in SIZES)
    assert off[-2] <= 0.26


def test_two_sizes_are_met_exactly():
    link = Link(8.0, 50_000.0)
    found = calibrate._fit([1 << 12, 1 << 26], [link.us(1 << 12), link.us(1 << 26)])
    assert (found.latency_us, found.bytes_per_us) == pytest.approx((8.0, 50_000.0))


def test_times_that_fall_with_size_still_make_a_link():
    found = calibrate._fit(SIZES, [50.0, 40.0, 30.0, 20.0, 10.0])
    assert found.latency_us > 0
    assert found.bytes_per_us > 0


def test_two_models_tell_what_a_call_takes_and_what_a_parameter():
    found = calibrate._python_time((16, 64), [16 * 20.0 + 700.0, 64 * 20.0 + 700.0])
    assert (found.call_us, found.param_us) == (pytest.approx(700.0), pytest.approx(20.0))
    assert found.us(100) == pytest.approx(2700.0)
    # Times that something else spoiled: never less than nothing.
    assert calibrate._python_time((16, 64), [900.0, 800.0]) == PythonTime(900.0, 0.0)
    assert calibrate._python_time((16, 64), [100.0, 4900.0]) == PythonTime(0.0, 100.0)
