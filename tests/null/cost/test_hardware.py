"""Descriptions of machines: presets, the cache file of `zero-compiler calibrate`, and who reads it."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math

import pytest
from machines import machine
from torch import nn
from typer.testing import CliRunner

import zero_compiler as zero
from zero_compiler.config import Config
from zero_compiler.cost import hardware
from zero_compiler.cost.hardware import HardwareSpec, PythonTime
from zero_compiler.errors import ConfigError
from zero_compiler.tools.cli import app

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
    rates = (
        spec.memory_bytes_per_us,
        spec.checksum_bytes_per_us,
        spec.vector_per_us,
        spec.special_per_us,
        spec.kernel_us,
    )
    assert min(*rates, *spec.matmul_flops_per_us.values(), spec.memory_bytes, spec.host_memory_bytes) > 0
    for python in (spec.forward_python, spec.backward_python):
        assert min(python.call_us, python.param_us) > 0
    assert {lane for group in spec.shared for lane in group} <= set(hardware.LANES)
    assert HardwareSpec.from_dict(json.loads(spec.to_json())) == spec


def test_lanes_that_share_are_known_ones():
    data = hardware.load("laptop").to_dict() | {"shared": [["compute", "nvme-host"]]}
    with pytest.raises(ConfigError, match="a lane in `shared` must be one of compute, .*, not 'nvme-host'"):
        HardwareSpec.from_dict(data)


def test_the_machines_of_the_documentation_are_there():
    assert hardware.presets() == [
        "dgx-2-v100",
        "dgx-a100",
        "dgx-h100",
        "laptop",
        "p3dn-24xlarge",
        "pcie-8x-rtx-4090",
    ]
    with pytest.raises(
        ConfigError, match="hardware 'dgx' is neither a file nor a preset; presets: dgx-2-v100,"
    ):
        hardware.load("dgx")


LINK = {"latency_us": 1.0, "bytes_per_us": 1.0}
ROW = {"kind": "all_gather", "transport": "c10d", "world": 2, "link": LINK}
WRONG = [
    ({"memory_bytes_per_us": 0}, "memory_bytes_per_us must be a number > 0, not 0"),
    ({"vector_per_us": "9"}, "vector_per_us must be a number > 0, not '9'"),
    ({"special_per_us": math.nan}, "special_per_us must be a number > 0, not nan"),
    ({"memory_bytes": "80 GB"}, "memory_bytes must be a number > 0, not '80 GB'"),
    ({"nvme_bytes": 0}, "nvme_bytes must be a number > 0, not 0"),
    ({"device_reserve_bytes": -1}, "device_reserve_bytes must be a number >= 0, not -1"),
    ({"host_memory_bytes": True}, "host_memory_bytes must be a number > 0, not True"),
    ({"kernel_us": -1}, "kernel_us must be a number >= 0, not -1"),
    ({"matmul_traffic": -0.5}, "matmul_traffic must be a number >= 0, not -0.5"),
    ({"matmul_traffic": "2"}, "matmul_traffic must be a number >= 0, not '2'"),
    ({"matmul_traffic": None}, "matmul_traffic must be a number >= 0, not None"),
    ({"matmul_flops_per_us": 5}, "matmul_flops_per_us must give a rate for 'float32', .*, not 5"),
    ({"matmul_flops_per_us": {"bfloat16": 5}}, "matmul_flops_per_us must give a rate for 'float32'"),
    (
        {"matmul_flops_per_us": {"float32": 0}},
        r"matmul_flops_per_us\['float32'\] must be a number > 0, not 0",
    ),
    (
        {"vector_share": {"float32": 1, "bfloat16": 0}},
        r"vector_share\['bfloat16'\] must be a number > 0, not 0",
    ),
    ({"special_share": {"bfloat16": 1}}, "special_share must give a rate for 'float32'"),
    ({"onednn_flops_per_us": {"bfloat16": 5}}, "onednn_flops_per_us must give a rate for 'float32'"),
    ({"nvme_read": LINK | {"bytes_per_us": 0}}, "bytes_per_us of a link must be a number > 0, not 0"),
    ({"nvme_read": LINK | {"latency_us": -1}}, "latency_us of a link must be a number >= 0, not -1"),
    ({"nvme_read": 5}, "nvme_read must be an object of fields, not 5"),
    (
        {"collectives": [ROW | {"kind": "gather"}]},
        "kind of a collective must be one of all_gather, .*'gather'",
    ),
    (
        {"collectives": [ROW | {"transport": "tcp"}]},
        "transport of a collective must be one of c10d, shared, not",
    ),
    ({"collectives": [ROW | {"world": 1}]}, "world of a collective must be a number >= 2, not 1"),
    ({"collectives": [ROW | {"size": 1}]}, r"there is no field 'size' of collectives\[0\]"),
    ({"shared": [["compute", "disk"]]}, "a lane in `shared` must be one of compute, .*, not 'disk'"),
    ({"speed": 1}, "there is no field 'speed'"),
]


@pytest.mark.parametrize(("fields", "said"), WRONG)
def test_what_no_machine_can_have_is_refused_before_a_plan_is_made_with_it(fields, said, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(machine(**fields)))
    again = f"; `zero-compiler calibrate --output {file}` writes one for this machine"
    with pytest.raises(ConfigError, match=f"^{file}: hardware spec: .*{said}.*{again}$"):
        hardware.load(str(file))


def test_a_field_that_is_missing_is_named(tmp_path):
    for name in ("collectives", "nvme_write", "kernel_us"):
        file = tmp_path / "mine.json"
        file.write_text(json.dumps({k: v for k, v in machine().items() if k != name}))
        with pytest.raises(ConfigError, match=name):
            hardware.load(str(file))


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe\x00", b"3", b"[1]"])
def test_a_file_that_is_no_description_says_which_it_is_and_what_to_do(text, tmp_path, monkeypatch):
    file = tmp_path / "mine.json"
    file.write_bytes(text)
    with pytest.raises(
        ConfigError, match=f"^{file}: .*; `zero-compiler calibrate --output {file}` writes one"
    ):
        zero.shard(Net(), hardware=str(file))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cached = hardware.cache_path()
    cached.parent.mkdir()
    cached.write_bytes(text)
    with pytest.raises(
        ConfigError, match=f"^{cached}: .*; run `zero-compiler calibrate` again, or remove it$"
    ):
        zero.shard(Net())
    said = CliRunner().invoke(app, ["doctor"])
    assert said.exit_code == 1
    assert "run `zero-compiler calibrate` again" in " ".join(said.output.split())


def test_paths_are_taken_as_text_and_nothing_else_is(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(machine()))
    config = Config(hardware=file, nvme_dir=tmp_path)
    assert json.loads(config.to_json())["hardware"] == str(file)
    assert json.loads(config.to_json())["nvme_dir"] == str(tmp_path)
    for name in ("hardware", "nvme_dir"):
        with pytest.raises(ConfigError, match=f"{name} must be a str or None, not 3"):
            Config(**{name: 3})


def test_a_machine_measured_with_one_rank_says_what_more_ranks_need():
    with pytest.raises(
        ConfigError, match="no all_gather over c10d, which 4 ranks need; `zero-compiler calibrate --world 4`"
    ):
        HardwareSpec.from_dict(machine(collectives=[])).collective("all_gather", 4)


def test_a_file_without_times_of_python_is_read_as_one_that_did_not_measure_them():
    spec = hardware.load("laptop")
    data = spec.to_dict()
    del data["forward_python"], data["backward_python"]
    old = HardwareSpec.from_dict(data)
    assert old == dataclasses.replace(spec, forward_python=PythonTime(0, 0), backward_python=PythonTime(0, 0))
    data["forward_python"] = {"param": 3.0}
    with pytest.raises(ConfigError, match="hardware spec: .*'param'"):
        HardwareSpec.from_dict(data)


def test_a_file_without_traffic_of_products_is_read_as_one_that_hides_it():
    spec = hardware.load("laptop")
    data = spec.to_dict()
    assert data.pop("matmul_traffic") == 0
    assert HardwareSpec.from_dict(data) == spec


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.first(x)).square().mean()


# What calibration makes of its measurements ----------------------------------------------------------------


DEEP = "[" * 100_000 + "]" * 100_000
HUGE = "9" * 400


@pytest.mark.parametrize(
    ("field", "text", "said"),
    [
        ("memory_bytes", "Infinity", "memory_bytes must be a finite number, not inf"),
        ("memory_bytes", "1e400", "memory_bytes must be a finite number, not inf"),
        ("memory_bytes", HUGE, r"memory_bytes must be a finite number, not 9+\.\.\.9+"),
        ("host_memory_bytes", "-Infinity", "host_memory_bytes must be a number > 0, not -inf"),
        ("kernel_us", "Infinity", "kernel_us must be a finite number, not inf"),
        ("kernel_us", HUGE, "kernel_us must be a finite number, not 9"),
        ("vector_per_us", "NaN", "vector_per_us must be a number > 0, not nan"),
        ("vector_per_us", HUGE, "vector_per_us must be a finite number, not 9"),
        ("vector_per_us", "[[[[[[[[[]]]]]]]]]", "vector_per_us must be a number > 0, not "),
        (
            "nvme_read",
            '{"latency_us": 1e400, "bytes_per_us": 1}',
            "nvme_read: latency_us of a link must be a finite number, not inf",
        ),
        ("nvme_read", '{"latency_us": 1}', "'bytes_per_us' of nvme_read is missing"),
        (
            "nvme_read",
            '{"latency_us": 1, "speed": 1}',
            "there is no field 'speed' of nvme_read",
        ),
        ("collectives", "5", "collectives must be a list, not 5"),
        ("collectives", "[5]", r"collectives\[0\] must be an object of fields, not 5"),
        ("shared", "[5]", "a group in `shared` must be a list, not 5"),
        ("name", "7", "name must be a text, not 7"),
        ("memory_bytes", DEEP, "cannot be read as JSON: it is nested too deeply"),
        ("memory_bytes", "9" * 5000, "cannot be read as JSON: Exceeds the limit"),
    ],
    ids=lambda value: value[:20],
)
def test_numbers_and_nesting_that_no_file_should_have(field, text, said, tmp_path):
    path = tmp_path / "machine.json"
    whole = json.dumps(hardware.load("laptop").to_dict() | {field: "HERE"})
    path.write_text(whole.replace('"HERE"', text))
    with pytest.raises(ConfigError, match=rf"^{path}: (hardware spec: )?{said}") as raised:
        hardware.load(str(path))
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 600


def test_of_a_device_a_part_is_left_free_as_the_file_says_or_else_one_in_sixteen():
    spec = HardwareSpec.from_dict(machine(memory_bytes=1 << 30, device_reserve_bytes=1 << 20))
    assert (spec.reserve_bytes, spec.plannable_bytes) == (1 << 20, (1 << 30) - (1 << 20))
    spec = dataclasses.replace(spec, device_reserve_bytes=None)
    assert (spec.reserve_bytes, spec.plannable_bytes) == (1 << 26, (1 << 30) - (1 << 26))
    assert dataclasses.replace(spec, device_reserve_bytes=1 << 40).plannable_bytes == 0
    old = machine(memory_bytes=1 << 30)
    for name in ("device_reserve_bytes", "nvme_bytes"):  # files of before have neither
        del old[name]
    assert HardwareSpec.from_dict(old).reserve_bytes == 1 << 26
    assert HardwareSpec.from_dict(old).nvme_bytes is None
