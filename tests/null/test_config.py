"""zero.Config: frozen, whole after a round trip through JSON, and what the command line calls its fields."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import typer

import zero_compiler as zero
from zero_compiler import cli


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


def test_what_plan_takes_by_name_is_a_field():
    """Of `zero-compiler plan`: its own words, and for the rest the names and defaults of zero.Config."""
    command = typer.main.get_command(cli.app).commands["plan"]
    options = {o.name: o.default for o in command.params if o.param_type_name == "option"}
    own = {"world", "option", "json_path", "brief"}
    defaults = {f.name: f.default for f in dataclasses.fields(zero.Config)}
    named = options.keys() - own
    assert "stage" in named
    assert {name: options[name] for name in named} == {name: defaults.get(name) for name in named}
