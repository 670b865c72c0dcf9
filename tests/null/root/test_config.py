"""zero.Config: frozen, whole after a round trip through JSON, and what the command line calls its fields."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import ConfigError, MemoryBudgetError


def every_field(folder):
    """A value of each field of a Config that is not its default."""
    return {
        "stage": 2,
        "param_dtype": torch.bfloat16,
        "gather_dtype": "int8",
        "reduce_dtype": torch.float64,
        "reduce_between_hosts_dtype": "int8",
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
        "optimizer": "sgd",
        "transport": "c10d",
        "compute": "aten",
        "kernels": "torch",
        "hardware": "laptop",
        "memory_budget_bytes": 4,
        "activation_budget_bytes": 5,
        "bucket_bytes": 6,
        "tile_bytes": 7,
        "plan_seconds": 8.5,
        "partition_activations": True,
        "plan": "plan.json",
    }


def test_a_config_comes_back_from_json_whole(tmp_path):
    given, fields = every_field(tmp_path), dataclasses.fields(zero.Config)
    # What Inductor is told is for what it compiles, and second shards are for stage 3.
    told = {"mode": "default", "inductor": '{"epilogue_fusion": false}', **given, "compute": "inductor"}
    told |= {"stage": 3, "second_shard": "host"}
    assert [f.name for f in fields if f.default in (given.get(f.name, f.default), told[f.name])] == [
        "stage",
        "second_shard",
        "compute",
        "mode",
        "inductor",
    ]
    for config in (zero.Config(**given), zero.Config(**told), zero.Config(stage=1), zero.Config()):
        text = config.to_json()
        again = zero.Config.from_dict(json.loads(text))
        assert again == config
        assert again.to_json() == text
    assert dataclasses.asdict(zero.Config(**given)) == {
        "mode": None,
        "inductor": None,
        "second_shard": None,
        **given,
    }


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"second_shard": "rack"}, "second_shard must be \"host\" or None, not 'rack'"),
        (
            {"second_shard": "host", "stage": 2},
            'second_shard="host" needs stage=3, not 2: the other stages gather nothing in backward',
        ),
        (
            {"reduce_between_hosts_dtype": "int4"},
            "reduce_between_hosts_dtype must be \"int8\" or None, not 'int4'",
        ),
        (
            {"reduce_between_hosts_dtype": "int8", "stage": 0},
            'reduce_between_hosts_dtype="int8" needs a stage of 1 to 3, not 0, whose all-reduces leave the same sum '
            "on every rank",
        ),
    ],
    ids=str,
)
def test_what_goes_between_hosts_is_refused_where_it_cannot_be(fields, sentence):
    with pytest.raises(ConfigError) as error:
        zero.Config(**fields)
    assert str(error.value) == sentence


def test_a_config_is_frozen(tmp_path):
    config = zero.Config()
    for name, value in every_field(tmp_path).items():
        with pytest.raises(dataclasses.FrozenInstanceError, match=name):
            setattr(config, name, value)
    assert config == zero.Config()


# Given in more than one place -----------------------------------------------------------------------------------


def parts(own: dict, **fields):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    zero.shard(model[0], **own)
    return zero.shard(model, **fields)


def called(model, **options):
    torch._dynamo.reset()
    return torch.compile(model, backend="zero", options=options)(torch.ones(2, 8))


@pytest.mark.slow
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


@pytest.mark.parametrize("data", [None, [], [("stage", 1)], "stage", 3, {"a"}], ids=repr)
def test_what_is_no_dictionary(data):
    with pytest.raises(ConfigError, match="Config.from_dict takes a dictionary of fields by name, not "):
        zero.Config.from_dict(data)


@pytest.mark.parametrize("key", [1, None, ("stage",), b"stage"], ids=repr)
def test_a_key_that_is_no_name(key):
    with pytest.raises(ConfigError, match="unknown option "):
        zero.Config.from_dict({"stage": 1, key: 2})
