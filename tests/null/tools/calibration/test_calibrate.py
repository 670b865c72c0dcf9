"""What `zero-compiler calibrate` makes of its measurements, where it keeps them, and who reads them."""

from __future__ import annotations

import dataclasses
import datetime
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from machines import machine
from null.cost.test_hardware import Net
from typer.testing import CliRunner

from zero_compiler.cost import hardware, processors
from zero_compiler.cost.hardware import HardwareSpec, PythonTime
from zero_compiler.tools.calibration import calibrate
from zero_compiler.tools.cli import app
from zero_compiler.tools.planning import report


def planned():
    torch._dynamo.reset()
    (frame,) = report(Net(), (torch.ones(2, 8),), 2).frames
    return frame


CALIBRATE = ["calibrate", "--world", "2", "--world", "4", "--threads", "3"]


@pytest.fixture
def measured(monkeypatch, tmp_path) -> HardwareSpec:
    """What a measurement would find; an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(processors, "here", lambda: "")  # of no known kind
    spec = HardwareSpec.from_dict(machine(latency_us=3.0, bytes_per_us=500.0))
    spec = dataclasses.replace(spec, date=datetime.date.today().isoformat())

    def measure(worlds, directory, say, threads):
        say("something")
        assert (worlds, directory, threads) == ([2, 4], None, 3)
        return spec

    monkeypatch.setattr(calibrate, "calibrate", measure)
    return spec


@pytest.mark.slow
def test_what_calibrate_finds_is_kept_and_read_by_the_next_plan(measured, tmp_path):
    path = tmp_path / "cache" / "zero_compiler" / "hardware.json"
    assert hardware.cache_path() == path
    assert hardware.load() == hardware.load("laptop")
    before = planned()
    done = CliRunner().invoke(app, CALIBRATE)
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
    done = CliRunner().invoke(app, [*CALIBRATE, "--output", str(path)])
    assert done.exit_code == 0, done.output
    assert hardware.load(str(path)) == measured
    assert not hardware.cache_path().exists()


@pytest.mark.parametrize(("rate", "library"), [(1.05, "torch's BLAS"), (2.0, "oneDNN")])
def test_calibrate_says_which_library_large_products_go_to(measured, monkeypatch, rate, library):
    found = {"float32": rate * measured.matmul_flops_per_us["float32"]}
    spec = dataclasses.replace(measured, onednn_flops_per_us=found)
    monkeypatch.setattr(calibrate, "calibrate", lambda *_: spec)
    said = " ".join(CliRunner().invoke(app, CALIBRATE).output.split())
    assert f"large products, float32, go to {library}" in said


@pytest.mark.parametrize("option", ["--world", "--threads"])
def test_there_are_no_ranks_or_threads_below_one(option):
    done = CliRunner().invoke(app, ["calibrate", option, "0"])
    assert done.exit_code == 2
    assert option in done.output


def test_doctor_says_which_machine_plans_are_made_for(measured):
    said = CliRunner().invoke(app, ["doctor"]).output
    assert "laptop of 2026-11-21 (preset)" in said
    CliRunner().invoke(app, CALIBRATE)
    said = CliRunner().invoke(app, ["doctor"]).output
    assert f"test of {measured.date}" in said
    assert "(preset)" not in said


def products(rows, side):
    return calibrate._Products(lambda: None, 6 * rows * side**2, 12 * (2 * rows + side) * side)


SQUARE, THIN = (products(*shape) for shape in (calibrate._SQUARE, calibrate._THIN))


def spent_us(work, rate, traffic, memory):
    return work.flops / rate + traffic * work.nbytes / memory


@given(st.floats(1e3, 1e6), st.floats(0, 4), st.floats(1e3, 1e5))
def test_a_square_and_a_thin_product_tell_rate_and_traffic(rate, traffic, memory):
    long, short = (spent_us(work, rate, traffic, memory) for work in (SQUARE, THIN))
    found = calibrate._traffic(SQUARE, long, THIN, short, memory)
    most = memory * long / (2 * SQUARE.nbytes)  # half of the square product
    assert found == pytest.approx(min(traffic, most), rel=1e-6, abs=1e-9 * memory)
    if traffic <= most:
        assert calibrate._rate(SQUARE, long, found / memory) == pytest.approx(rate, rel=1e-6)
    # The square one is always met, and another dtype's rate with the same traffic.
    again = calibrate._rate(SQUARE, long, found / memory)
    assert spent_us(SQUARE, again, found, memory) == pytest.approx(long)


def test_disturbed_times_make_no_rate_that_cannot_be():
    assert calibrate._traffic(SQUARE, 8000.0, THIN, 100.0, 3e4) == 0
    assert calibrate._rate(SQUARE, 8000.0, 0.0) == SQUARE.flops / 8000
    much = calibrate._traffic(SQUARE, 8000.0, THIN, 1e9, 3e4)
    assert calibrate._rate(SQUARE, 8000.0, much / 3e4) == pytest.approx(2 * SQUARE.flops / 8000)
    assert calibrate._rate(SQUARE, 10.0, much / 3e4) == 2 * SQUARE.flops / 10


def test_two_models_tell_what_a_call_takes_and_what_a_parameter():
    found = calibrate._python_time((16, 64), [16 * 20.0 + 700.0, 64 * 20.0 + 700.0])
    assert (found.call_us, found.param_us) == (pytest.approx(700.0), pytest.approx(20.0))
    assert found.us(100) == pytest.approx(2700.0)
    # Times that something else spoiled: never less than nothing.
    assert calibrate._python_time((16, 64), [900.0, 800.0]) == PythonTime(900.0, 0.0)
    assert calibrate._python_time((16, 64), [100.0, 4900.0]) == PythonTime(0.0, 100.0)
