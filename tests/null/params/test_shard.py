"""Arguments and options that do not fit, in one process: one clear sentence each, of the right type."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import pytest
import torch
from null.small import batch, mlp, use
from torch import nn

import zero_compiler as zero
from zero_compiler.config import Config
from zero_compiler.errors import ConfigError, ShardError
from zero_compiler.params.shard import install, shard_over
from zero_compiler.sharded import rest_tiers
from zero_compiler.tools.planning import planned_group

# --- what zero.shard takes ---------------------------------------------------------------------------------------


def test_sharding_twice():
    model = zero.shard(mlp())
    with pytest.raises(ShardError, match="Sequential is sharded already; zero.shard may be called once"):
        zero.shard(model)


def test_sharding_a_part_of_a_sharded_model():
    model = zero.shard(mlp())
    with pytest.raises(ShardError, match="this Linear belongs to a model that is sharded already"):
        zero.shard(model[0])


def test_a_weight_that_a_model_had_before_is_sharded():
    linear = nn.Linear(4, 4)
    weight = linear.weight
    zero.shard(nn.Sequential(linear, nn.Linear(4, 4)))
    del linear
    other = nn.Linear(4, 4)
    other.weight = weight
    zero.shard(nn.Sequential(other))
    assert torch.equal(other.weight.full_tensor(), weight)


@pytest.mark.parametrize("part", [False, True])
def test_a_weight_tied_to_a_part_that_is_sharded_by_itself_is_refused(part):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    zero.shard(model[0])
    name = "weight" if part else "1.weight"
    with pytest.raises(
        ShardError,
        match=rf"parameter {name} is 'weight' of a module that is sharded already.* give zero.shard one module that holds both",
    ):
        zero.shard(model[1] if part else model)


def test_an_inner_shard_first_is_fine():
    model = mlp()
    zero.shard(model[0], stage=1)
    zero.shard(model, stage=3)
    use(model, "compiled")(batch()).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_sharding_a_compiled_model():
    with pytest.raises(ShardError, match="takes the plain model: shard first, then torch.compile"):
        zero.shard(torch.compile(mlp(), backend="zero"))


@pytest.mark.parametrize("thing", [nn.Linear, mlp, None, {"a": 1}, nn.Parameter(torch.ones(2))])
def test_sharding_what_is_no_module(thing):
    with pytest.raises(ShardError, match=r"zero\.shard takes an nn\.Module, not "):
        zero.shard(thing)


@pytest.mark.parametrize("inside", [False, True])
def test_sharding_what_averages_gradients_itself(inside):
    wrapped = nn.DataParallel(mlp())
    model = nn.Sequential(wrapped) if inside else wrapped
    with pytest.raises(
        ShardError, match="is a DataParallel, which averages gradients by itself; give zero.shard the"
    ):
        zero.shard(model)


def test_a_folder_for_dumps_that_cannot_be(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ZERO_DUMP", str(tmp_path / "file"))
    call = use(zero.shard(mlp()), "compiled")
    with pytest.raises(
        ConfigError, match=r"ZERO_DUMP='.*file' is no folder for dumps \(Not a directory\); name one"
    ):
        call(batch())


def test_sharding_a_lazy_module():
    with pytest.raises(ShardError, match=r"parameter 0\.weight is lazy; run one forward before zero\.shard"):
        zero.shard(nn.Sequential(nn.LazyLinear(3)))


def test_a_trainable_complex_parameter():
    model = nn.Linear(4, 4).to(torch.complex64)
    with pytest.raises(ShardError, match=r"parameter weight is trainable and torch\.complex64.*view_as_real"):
        zero.shard(model)
    zero.shard(model.requires_grad_(False))


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_from_before_the_shard(kind):
    model = nn.Linear(3, 2)
    handle = getattr(model.weight, kind)(lambda seen: None)
    with pytest.raises(
        ShardError, match="parameter weight has a hook for its gradient.* hooks after zero.shard"
    ):
        zero.shard(model)
    handle.remove()
    zero.shard(model)


def test_sharding_what_is_a_dtensor_already():
    sharded = zero.shard(nn.Linear(4, 3))
    other = nn.Linear(4, 3)
    other.weight = sharded.weight
    with pytest.raises(
        ShardError, match="parameter weight is a DTensor over .* already.* pass the mesh of both"
    ):
        zero.shard(other)


def test_each_whole_parameter_is_dropped_when_it_is_cut(monkeypatch):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    whole = [weakref.ref(p) for p in model.parameters()]
    alive = []

    def look(*args: Any) -> nn.Parameter:
        alive.append(sum(ref() is not None for ref in whole))
        return install(*args)

    monkeypatch.setattr("zero_compiler.params.shard.install", look)
    zero.shard(model)
    assert alive == [6, 5, 4, 3, 2, 1]


def test_a_failed_shard_leaves_the_model_as_it_was():
    model = mlp()
    with pytest.raises(ConfigError):
        zero.shard(model, stage=7)
    lazy = nn.Sequential(nn.Linear(4, 3), nn.LazyLinear(3))
    with pytest.raises(ShardError):
        zero.shard(lazy)
    assert type(model[0]) is nn.Linear
    assert type(lazy[0]) is nn.Linear
    assert type(lazy[0].weight) is nn.Parameter
    zero.shard(model)


# --- options -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [-1, 4, True, False, "3", 2.0, None, [3]])
def test_a_stage_out_of_range(stage):
    with pytest.raises(ConfigError, match="stage must be 0, 1, 2 or 3, not "):
        zero.shard(mlp(), stage=stage)
    with pytest.raises(ConfigError, match="stage must be 0, 1, 2 or 3, not "):
        zero.Config(stage=stage)


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(ConfigError, match="unknown option 'param_dtypes'; did you mean 'param_dtype'?"):
        zero.shard(mlp(), param_dtypes="bf16")
    with pytest.raises(ConfigError, match="unknown option 'quux'; known options: .*stage"):
        zero.shard(mlp(), quux=1)
    with pytest.raises(ConfigError, match="unknown option 'bucket_byte'; did you mean 'bucket_bytes'?"):
        use(zero.shard(mlp()), "compiled", bucket_byte=1)(batch())


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("param_dtype", "int8", "param_dtype must be one of float32, fp32, bfloat16,"),
        ("param_dtype", torch.int32, "param_dtype must be one of float32, fp32, bfloat16,"),
        ("param_dtype", torch.float8_e4m3fn, "param_dtype must be one of float32, .*not torch.float8_e4m3fn"),
        ("reduce_dtype", 32, "reduce_dtype must be one of float32, fp32, bfloat16,"),
        ("offload_params", "disk", "offload_params must be one of none, host, nvme, not 'disk'"),
        ("compute", "cuda", "compute must be one of inductor, aten, not 'cuda'"),
        ("bucket_bytes", -1, "bucket_bytes must be a number of bytes"),
        ("bucket_bytes", True, "bucket_bytes must be a number of bytes"),
        ("bucket_bytes", "4M", "bucket_bytes must be a number of bytes"),
        ("tile_bytes", -1, "tile_bytes must be a number of bytes"),
        ("nvme_keep", "no", "nvme_keep must be True or False, not 'no'"),
        ("nvme_checksums", 1, "nvme_checksums must be True or False, not 1"),
    ],
)
def test_a_value_that_an_option_does_not_take(field, value, sentence):
    with pytest.raises(ConfigError, match=sentence):
        zero.shard(mlp(), **{field: value})


def test_an_nvme_dir_that_does_not_exist(tmp_path):
    with pytest.raises(ConfigError, match=r"nvme_dir must be an existing directory; '.*nowhere' is not one"):
        zero.shard(mlp(), nvme_dir=str(tmp_path / "nowhere"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="nvme_dir must be an existing directory"):
        zero.shard(mlp(), nvme_dir=str(tmp_path / "file"))


def test_an_nvme_dir_that_goes_is_missed_by_nothing_that_makes_no_file(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    model = zero.shard(nn.Linear(8, 8), nvme_dir=str(folder), offload_params="nvme", offload_grads="nvme")
    run = use(model, "compiled", compute="aten")
    run(torch.ones(2, 8)).sum().backward()
    folder.rmdir()
    with torch.no_grad():  # another frame
        assert torch.equal(run(torch.ones(2, 8))[0], run(torch.ones(3, 8))[2])


def test_host_on_a_cpu_means_none_and_says_so_once(caplog, monkeypatch):
    monkeypatch.setattr(rest_tiers, "_said_host", False)  # as in a new process
    with caplog.at_level(logging.WARNING, logger="zero_compiler"):
        for fields in ({"offload_optimizer": "host"}, {"offload_params": "host", "offload_grads": "host"}):
            model = zero.shard(mlp(), device="cpu", **fields)
            assert zero.inspect(model).memory == zero.inspect(zero.shard(mlp(), device="cpu")).memory
            model(batch()).sum().backward()
    said = [r.getMessage() for r in caplog.records if "host" in r.getMessage()]
    assert said == [
        'compute is on the CPU, where everything is on "host": offload_optimizer="host" changes nothing'
    ]


def test_a_field_given_twice_must_agree():
    assert zero.inspect(zero.shard(mlp(), stage=2, config=zero.Config(stage=2))).stage == 2
    assert zero.inspect(zero.shard(mlp(), config=zero.Config(stage=1))).stage == 1
    with pytest.raises(ConfigError, match="stage was given twice: 1 and 2; give it once"):
        zero.shard(mlp(), stage=2, config=zero.Config(stage=1))
    with pytest.raises(ConfigError, match="config must be a zero.Config, not dict"):
        zero.shard(mlp(), config={"stage": 1})


def test_a_default_that_was_given_counts_as_given():
    with pytest.raises(ConfigError, match="stage was given twice: 3 and 2"):
        zero.shard(mlp(), stage=2, config=zero.Config(stage=3))


@pytest.mark.parametrize("options", [{"stage": 2}, {"param_dtype": "bf16"}, {"reduce_dtype": "float64"}])
def test_a_backend_option_that_contradicts_the_shard(options):
    name = next(iter(options))
    call = use(zero.shard(mlp(), stage=3), "compiled", **options)
    for _ in range(2):  # the second call is not another error
        with pytest.raises(ConfigError, match=rf"the model was sharded with {name}=.*give it to zero\.shard"):
            call(batch())


def test_a_backend_option_that_agrees_with_the_shard():
    model = zero.shard(mlp(), stage=2, param_dtype="bf16")
    assert use(model, "compiled", stage=2, param_dtype=torch.bfloat16)(batch()).dtype == torch.bfloat16


# --- arguments of the wrong type ---------------------------------------------------------------------------------


def test_arguments_of_the_wrong_type():
    with pytest.raises(ShardError, match="mesh must be a .*DeviceMesh, not str"):
        zero.shard(mlp(), mesh="x")
    with pytest.raises(ShardError, match="device must be one of torch, .*not 'foo'"):
        zero.shard(mlp(), device="foo")
    absent = "cuda" if torch.accelerator.current_accelerator(check_available=True) is None else "meta"
    with pytest.raises(
        ShardError, match=f"device='{absent}' cannot be computed on here, where the accelerator is"
    ):
        zero.shard(mlp(), device=absent)
    with pytest.raises(ShardError, match=r"zero\.inspect takes a sharded nn\.Module, .*not NoneType"):
        zero.inspect(None)
    with pytest.raises(ConfigError, match="unknown option 1; known options"):
        torch.compile(zero.shard(mlp()), backend="zero", options={1: 2})(batch())
    for manager in (zero.gathered, zero.no_sync):
        with pytest.raises(ShardError, match=rf"zero\.{manager.__name__} takes an nn\.Module, .*not int"):
            with manager(3):
                pass


# --- plain checkpoints -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("assign", [False, True])
def test_a_plain_checkpoint_is_cut_on_loading(assign):
    saved, model = mlp(1), zero.shard(mlp(0), device="cpu")
    found = model.load_state_dict(saved.state_dict(), assign=assign)
    assert found == ([], [])
    for p, q in zip(model.parameters(), saved.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q)
    torch.testing.assert_close(use(model, "compiled")(batch()), saved(batch()))
    wrong = {k: v[:1] for k, v in saved.state_dict().items()}
    with pytest.raises(RuntimeError, match="size mismatch for 0.weight"):
        model.load_state_dict(wrong)


def test_an_assigned_checkpoint_is_not_held_by_its_shards():
    model = shard_over(mlp(0), planned_group(2), Config())
    model.load_state_dict(mlp(1).state_dict(), assign=True)
    for p in model.parameters():
        assert p.to_local().untyped_storage().nbytes() == p.to_local().nbytes
