"""Calibration measures what a plan reads, and the plan follows it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zero_compiler.cost import hardware
from zero_compiler.cost.hardware import HardwareSpec, PythonTime
from zero_compiler.errors import ConfigError
from zero_compiler.storage import aio
from zero_compiler.tools import io_bench
from zero_compiler.tools.calibration.calibrate import calibrate, threads_of
from zero_compiler.tools.calibration.measure_links import _files, files_rank

measured = sys.modules["zero_compiler.tools.calibration.calibrate"]

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    said: list[str] = []
    found = calibrate([2], str(tmp_path_factory.mktemp("disk")), said.append, threads=1)
    assert said  # long work says where it is
    return found


def test_a_directory_that_takes_no_files_is_refused_before_anything_is_measured(tmp_path):
    file = tmp_path / "file"
    file.touch()
    said: list[str] = []
    for directory in (file, tmp_path / "none"):
        with pytest.raises(
            ConfigError, match=f"directory must be one that files can be written to; '{directory}'"
        ):
            calibrate([2], str(directory), said.append)
    assert not said


def test_a_full_disk_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 30))
    with pytest.raises(
        ConfigError, match="room for 1,610,612,736 bytes, 536,870,912 a rank; .* has 1,073,741"
    ):
        calibrate([3], str(tmp_path), said.append)
    assert not said


def test_a_rank_that_fails_leaves_no_file_of_another(tmp_path, monkeypatch):
    """The others are ended, and remove nothing themselves."""

    def rank_of_two(world, fn, directory):
        (Path(directory) / "of a rank that was ended").touch()
        raise RuntimeError("a rank failed")

    monkeypatch.setattr(measured, "in_ranks", lambda world, fn, *args: FOUND[fn](world, fn, *args))
    nothing = lambda *args: ({"": 0}, (PythonTime(0.0, 0.0),) * 2)  # noqa: E731
    FOUND = {measured._compute_rank: nothing, files_rank: rank_of_two}
    monkeypatch.setattr(measured, "copy", lambda device: None)
    monkeypatch.setattr(measured, "collectives_of", lambda world: [])
    with pytest.raises(RuntimeError, match="a rank failed"):
        calibrate([2], str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_every_rate_was_measured(spec):
    preset = hardware.load("laptop")
    rates = ["memory_bytes_per_us", "vector_per_us", "special_per_us", "kernel_us", "host_device"]
    for name in [*rates, "nvme_read", "nvme_write", "matmul_flops_per_us"]:
        assert getattr(spec, name) != getattr(preset, name), name
    for python in (spec.forward_python, spec.backward_python):
        assert 1 < python.param_us < 1000
        assert python.call_us >= 0
    assert set(spec.matmul_flops_per_us) == {"float32", "bfloat16", "float16", "float64"}
    assert spec.special_per_us < spec.vector_per_us
    for shares in (spec.vector_share, spec.special_share):
        assert set(shares) == set(spec.matmul_flops_per_us)
        assert shares["float32"] == 1
    assert torch.__version__ in spec.source
    assert "one thread a rank" in spec.source
    assert len(spec.date) == len("2026-01-01")


def test_threads_are_those_that_a_rank_will_have(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [threads_of(world) for world in (1, 2)] == [6, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    assert [threads_of(world) for world in (1, 2)] == [6, 6]


def test_collectives_of_both_transports(spec):
    found = {(c.transport, c.kind, c.world) for c in spec.collectives}
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    assert found == {(t, k, 2) for t in ("c10d", "shared") for k in kinds}
    assert all(c.link.bytes_per_us > 0 and c.link.latency_us > 0 for c in spec.collectives)


def test_the_file_gives_back_the_spec(spec, tmp_path):
    path = tmp_path / "hw.json"
    path.write_text(spec.to_json())
    again = hardware.load(str(path))
    assert again == spec
    assert again.digest() == spec.digest()
    assert HardwareSpec.from_dict(json.loads(spec.to_json())) == spec


def test_files_are_measured_as_programs_use_them(tmp_path, monkeypatch):
    """Through the engine, many blocks at once, and by all ranks in the same moment."""
    said = []

    def rate(report, path, memory, mode, block, depth, registered):
        assert os.path.getsize(path) == report.nbytes
        assert report.backend == engine.backend
        assert (block, depth) == (engine.block_bytes, engine.depth)
        assert not registered  # nor are buffers of tiers
        said.append(mode)
        return {"read": 3e9, "write": 2e9}[mode]

    with aio.Engine() as engine:
        monkeypatch.setattr(io_bench, "our_rate", rate)
        read, write = _files(tmp_path, lambda: said.append("together"))
    assert said == ["together"] * 2 + ["together", "read"] * 5 + ["together", "write"] * 5
    assert (read.bytes_per_us, write.bytes_per_us) == (3000, 2000)
    assert 0 < read.latency_us < 1e5
    assert list(tmp_path.iterdir()) == []
