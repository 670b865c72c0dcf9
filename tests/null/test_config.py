"""zero.Config: frozen, whole after a round trip through JSON, and what the command line calls its fields."""

from __future__ import annotations

import dataclasses
import json
import re
from types import SimpleNamespace

import pytest
import torch
import typer
from typer.testing import CliRunner

import zero_compiler as zero
from zero_compiler import cli, planning


def every_field(folder):
    """A value of each field of a Config that is not its default."""
    return {
        "stage": 2,
        "param_dtype": torch.bfloat16,
        "reduce_dtype": torch.float64,
        "offload_params": "host",
        "offload_grads": "nvme",
        "offload_optimizer": "nvme",
        "offload_activations": "host",
        "nvme_dir": str(folder),
        "nvme_keep": True,
        "nvme_checksums": True,
        "device_rest_bytes": 1,
        "host_rest_bytes": 2,
        "nvme_rest_bytes": 3,
        "transport": "c10d",
        "compute": "aten",
        "kernels": "torch",
        "hardware": "laptop",
        "memory_budget_bytes": 4,
        "activation_budget_bytes": 5,
        "bucket_bytes": 6,
        "tile_bytes": 7,
        "partition_activations": True,
    }


def test_a_config_comes_back_from_json_whole(tmp_path):
    given, fields = every_field(tmp_path), dataclasses.fields(zero.Config)
    assert [f.name for f in fields if given.get(f.name, f.default) == f.default] == []
    for config in (zero.Config(**given), zero.Config(stage=1), zero.Config()):
        text = config.to_json()
        again = zero.Config.from_dict(json.loads(text))
        assert again == config
        assert again.to_json() == text
    assert dataclasses.asdict(zero.Config(**given)) == given


def test_a_config_is_frozen(tmp_path):
    config = zero.Config()
    for name, value in every_field(tmp_path).items():
        with pytest.raises(dataclasses.FrozenInstanceError, match=name):
            setattr(config, name, value)
    assert config == zero.Config()


def test_every_field_is_a_flag_of_plan(tmp_path, monkeypatch):
    """All fields given as flags come back as they are; what is not given is left to zero.Config."""
    given, seen = every_field(tmp_path), {}
    report = SimpleNamespace(summary=lambda: "planned", save_json=None, save_html=None, save_trace=None)
    monkeypatch.setattr(planning, "report", lambda *args, **kwargs: seen.update(kwargs) or report)
    monkeypatch.setattr(cli, "_factory", lambda path: lambda: (torch.nn.Linear(2, 2), torch.ones(2)))
    flags = []
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        text = str(value).removeprefix("torch.")
        flags += [flag] if value is True else [flag, text]
    for words, expected in ((flags, zero.Config(**given)), ([], zero.Config())):
        seen.clear()
        done = CliRunner().invoke(cli.app, ["plan", "module:function", "--brief", *words])
        assert done.exit_code == 0, done.output
        assert done.output == "planned\n"
        assert (seen.pop("world"), seen.pop("device")) == (1, "cpu")
        assert zero.Config(**seen) == expected
        assert seen.keys() == (given.keys() if words else set())


def test_every_flag_of_plan_says_what_it_does():
    said = CliRunner().invoke(cli.app, ["plan", "--help"], env={"COLUMNS": "200"}).output
    for f in dataclasses.fields(zero.Config):
        assert re.search(rf"--{f.name.replace('_', '-')}\b.*?[a-z]{{3}} ", said, flags=re.S), f.name
    command = typer.main.get_command(cli.app).commands["plan"]
    assert [p.name for p in command.params if p.param_type_name == "option" and not p.help] == []


def test_a_plan_is_written_as_text_page_and_timeline(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "small_model.py").write_text(
        "import torch\ndef planned():\n    return torch.nn.Linear(64, 512), torch.ones(2, 64)\n"
    )
    paths = {kind: tmp_path / f"plan.{kind}" for kind in ("json", "html", "trace")}
    words = [word for kind, path in paths.items() for word in (f"--{kind}", str(path))]
    chosen = ["--world", "512", "--stage", "2", "--compute", "aten", "--hardware", "dgx-h100"]
    done = CliRunner().invoke(cli.app, ["plan", "small_model:planned", *chosen, *words])
    assert done.exit_code == 0, done.output
    assert "stage 2, rank 0 of 512" in done.output
    assert "transport between ranks: c10d (planned for ranks on any hosts)" in done.output
    assert json.loads(paths["json"].read_text())["world"] == 512
    assert "<svg" in paths["html"].read_text()
    assert json.loads(paths["trace"].read_text())["traceEvents"]
