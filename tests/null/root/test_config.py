"""zero.Config: frozen, whole after a round trip through JSON, and what the command line calls its fields."""

from __future__ import annotations

import dataclasses
import json
import re
from types import SimpleNamespace

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

import zero_compiler as zero
from zero_compiler.errors import ConfigError, MemoryBudgetError
from zero_compiler.tools import cli, planning


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


# Given in more than one place -----------------------------------------------------------------------------------


def parts(own: dict, **fields):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    zero.shard(model[0], **own)
    return zero.shard(model, **fields)


def called(model, **options):
    torch._dynamo.reset()
    return torch.compile(model, backend="zero", options=options)(torch.ones(2, 8))


@pytest.mark.parametrize("name", ["memory_budget_bytes", "activation_budget_bytes"])
@pytest.mark.parametrize("part", [False, True])
def test_a_budget_of_a_part_or_of_the_whole_is_for_both(name, part):
    budget, other = {name: 1}, {"compute": "aten"}
    model = parts(budget, **other) if part else parts(other, **budget)
    with pytest.raises(MemoryBudgetError, match=f"{name}=1 is"):
        called(model)


def test_of_two_budgets_the_least_is_for_both():
    with pytest.raises(MemoryBudgetError, match="memory_budget_bytes=7 is"):
        called(parts({"memory_budget_bytes": 1 << 30, "compute": "aten"}, memory_budget_bytes=7))


def test_parts_that_are_compiled_together_agree():
    model = parts({"bucket_bytes": 1}, bucket_bytes=2, compute="aten")
    with pytest.raises(
        ConfigError, match="bucket_bytes is 1 for one part .* and 2 for another.*: give both the same"
    ):
        called(model)
    report = zero.inspect(parts({}, compute="aten", bucket_bytes=3), (torch.ones(2, 8),))
    assert [f.config.compute for f in report.frames] == ["aten"]
    assert [f.bucket_bytes for f in report.frames] == [3]


def test_an_option_may_repeat_what_the_shard_was_given(tmp_path):
    model = zero.shard(
        nn.Linear(8, 8),
        offload_params="nvme",
        nvme_dir=str(tmp_path),
        device_rest_bytes=1 << 20,
        nvme_rest_bytes=1 << 20,
        param_dtype="bf16",
    )
    called(model, compute="aten", offload_params="nvme", nvme_rest_bytes=1 << 20, param_dtype=torch.bfloat16)
    called(model, compute="aten", nvme_dir=tmp_path)
    with pytest.raises(
        ConfigError, match=r"asks for 'host', but the model was sharded with offload_params='nvme'"
    ):
        called(model, offload_params="host")


# The command line -----------------------------------------------------------------------------------------------


def test_what_a_plan_cannot_be_made_of_is_said_in_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "given.py").write_text("import torch\ndef alone():\n    return torch.nn.Linear(2, 2)\n")
    monkeypatch.chdir(tmp_path)
    for words, want in (
        (["given:alone"], "given:alone must return a module and its inputs, (model, example_inputs)"),
        (["given:alone", "--html", "no/plan.html"], "there is no folder 'no' to write to"),
    ):
        done = CliRunner().invoke(cli.app, ["plan", *words], env={"COLUMNS": "200"})
        assert done.exit_code == 2
        assert want in " ".join(done.output.split())


@pytest.mark.parametrize("data", [None, [], [("stage", 1)], "stage", 3, {"a"}], ids=repr)
def test_what_is_no_dictionary(data):
    with pytest.raises(ConfigError, match="Config.from_dict takes a dictionary of fields by name, not "):
        zero.Config.from_dict(data)


@pytest.mark.parametrize("key", [1, None, ("stage",), b"stage"], ids=repr)
def test_a_key_that_is_no_name(key):
    with pytest.raises(ConfigError, match="unknown option "):
        zero.Config.from_dict({"stage": 1, key: 2})
