"""zero-compiler io-bench: it measures what it says, beside fio where there is one, and leaves no file behind."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from typer.testing import CliRunner

from zero_compiler.errors import ConfigError
from zero_compiler.tools import cli, io_bench


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(io_bench, "BLOCKS", (256 << 10, 1 << 20))
    monkeypatch.setattr(io_bench, "DEPTHS", (2,))


@pytest.mark.slow
def test_a_small_run(quick, tmp_path):
    path = tmp_path / "out.json"
    arguments = ["io-bench", str(tmp_path), "--bytes", str(32 << 20), "--seconds", "0.05", "--rounds", "2"]
    done = CliRunner().invoke(cli.app, [*arguments, "--json", str(path)])
    assert done.exit_code == 0, done.output
    assert os.listdir(tmp_path) == ["out.json"]
    made = json.loads(path.read_text())
    assert [row["mode"] for row in made["rows"]] == ["read", "write", "both"]
    assert all(row["ours"] > 1e6 for row in made["rows"])
    for name in ("read", "write", "both at once"):
        assert name in done.output
    sides = 2 if shutil.which("fio") and made["direct"] else 1
    assert len(made["points"]) == sides * 3 * (2 + 2 * 2)  # two points of the grid, then both in two rounds
    if sides == 2:
        assert all(0.01 < row["ratio"] < 100 for row in made["rows"])
    else:
        assert all(row["fio"] is None for row in made["rows"])
        assert "not" in made["fio"]


def test_without_fio_it_says_so(quick, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    made = io_bench.bench(tmp_path, nbytes=32 << 20, seconds=0.02, rounds=1)
    assert made.fio == "not installed"
    assert {point.by for point in made.points} == {"zero"}


def test_one_lucky_measurement_chooses_nothing(tmp_path, monkeypatch):
    """Blocks of 1 MiB do best, but for the first measurement of another point."""
    met = set()

    def rate(report, path, memory, mode, block, depth):
        lucky = (block, depth) == (4 << 20, 4) and mode not in met
        met.update([mode] if lucky else [])
        return 9.0 if lucky else 5.0 if block == 1 << 20 else 3.0

    monkeypatch.setattr(io_bench, "our_rate", rate)
    monkeypatch.setenv("PATH", "/nonexistent")  # no fio
    made = io_bench.bench(tmp_path, nbytes=32 << 20, seconds=0.02, rounds=3)
    assert [(row.ours, row.block_bytes) for row in made.rows] == [(5.0, 1 << 20)] * 3
    assert len(made.points) == 3 * (9 + 3 * io_bench.FINALISTS)


def test_bytes_are_counted_once(quick, tmp_path):
    """The disk cannot have moved fewer bytes than were counted: the system's own counter is the judge."""

    def moved(name: str) -> int:
        with open("/proc/self/io") as lines:
            return {key: int(value) for key, value in (line.split(": ") for line in lines)}[name]

    if os.major(os.stat(tmp_path).st_dev) == 0:
        pytest.skip(f"{tmp_path} lies on no block device, and the system counts only those")
    path = tmp_path / "file"
    path.write_bytes(bytes(32 << 20))
    report = io_bench.DiskReport(str(tmp_path), 32 << 20, 0.2, "threads", True, "")
    memory = io_bench.aio.buffer(io_bench.memory_bytes(1 << 20, 2))
    for mode, reads, writes in (("read", 1, 0), ("write", 0, 1), ("both", 0.5, 0.5)):
        before = moved("read_bytes"), moved("write_bytes")
        rate = io_bench.our_rate(report, path, memory, mode, 1 << 20, 2)
        assert moved("read_bytes") - before[0] >= 0.9 * reads * rate * report.seconds
        assert moved("write_bytes") - before[1] >= 0.9 * writes * rate * report.seconds


@pytest.mark.slow
def test_what_cannot_be_measured(tmp_path):
    with pytest.raises(ConfigError, match="needs an existing directory"):
        io_bench.bench(tmp_path / "no")
    with pytest.raises(ConfigError, match="bytes must be a multiple of 8388608, at least 16777216, not 5"):
        io_bench.bench(tmp_path, nbytes=5)
    with pytest.raises(ConfigError, match="seconds must be above 0"):
        io_bench.bench(tmp_path, seconds=0)
    with pytest.raises(ConfigError, match="backend must be one of"):
        io_bench.bench(tmp_path, nbytes=32 << 20, backend="aio")
    assert os.listdir(tmp_path) == []
