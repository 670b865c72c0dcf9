"""Pretrained weights of safetensors files."""

import copy
import json
import os
import sys

import made
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import ConfigError, ShardError

pytestmark = pytest.mark.usefixtures("no_trace_left")


class Saved(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.tensor(0.0))
        self.norm = nn.BatchNorm1d(5)


WEIGHTS = {
    "emb.weight": torch.arange(15.0).view(5, 3),
    "scale": torch.tensor(4.0),
    "norm.weight": torch.full((5,), 2.0),
    "norm.bias": torch.full((5,), 3.0),
    "norm.running_mean": torch.full((5,), 4.0),
    "norm.running_var": torch.full((5,), 5.0),
    "norm.num_batches_tracked": torch.tensor(6),
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(WEIGHTS, path)
    return path


@pytest.mark.parametrize("kind", ["file", "list", "folder", "meta", "plain", "bf16"])
def test_load_safetensors(file, kind):
    with torch.device("meta" if kind == "meta" else "cpu"):
        model = Saved()
    if kind == "bf16":
        model.bfloat16()
    if kind != "plain":
        zero.shard(model)
    paths = {"list": [os.fspath(file)], "folder": file.parent}.get(kind, file)
    assert zero.load_safetensors(model, paths) == ([], [])
    assert model.head.weight is model.emb.weight
    values = made.full(model)
    for name, want in WEIGHTS.items():
        assert torch.equal(values[name].to(want.dtype), want), name
    if kind == "bf16":
        assert values["emb.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_load_safetensors_into_files_some_rows_at_a_time(tmp_path, monkeypatch, device):
    monkeypatch.setattr(sys.modules[zero.load_safetensors.__module__], "_PART_BYTES", 1 << 14)
    want = {"weight": torch.randn(3001, 3).bfloat16(), "bias": torch.randn(3001)}
    save_file(want, tmp_path / "model.safetensors")
    with torch.device(device):
        model = zero.shard(nn.Linear(3, 3001), offload_params="nvme", nvme_dir=str(tmp_path))
    assert zero.load_safetensors(model, tmp_path / "model.safetensors") == ([], [])
    for name, value in made.full(model).items():
        assert torch.equal(value, want[name].float()), name


@pytest.mark.slow
def test_load_safetensors_by_an_alias_and_by_an_index(tmp_path):
    state = dict(WEIGHTS)
    state["head.weight"] = state.pop("emb.weight")
    save_file(state, tmp_path / "one.safetensors")
    index = {"weight_map": dict.fromkeys(state, "one.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = made_with(Saved)
    assert zero.load_safetensors(model, tmp_path / "model.safetensors.index.json") == ([], [])
    assert torch.equal(model.emb.weight.to_local(), WEIGHTS["emb.weight"])


def made_with(build):
    with zero.init():
        return build()


def test_load_safetensors_that_do_not_fit(tmp_path, file):
    model = made_with(Saved)
    before = made.full(copy.deepcopy(model))
    save_file({"scale": torch.tensor(1.0), "other": torch.ones(1)}, tmp_path / "part.safetensors")
    with pytest.raises(
        ShardError, match=r"7 missing from the files \(first: emb.weight, head.weight, .*1 in the .*other"
    ):
        zero.load_safetensors(model, tmp_path / "part.safetensors")
    save_file(WEIGHTS | {"emb.weight": torch.ones(4, 3)}, tmp_path / "shape.safetensors")
    with pytest.raises(ShardError, match=r"emb.weight has shape \[4, 3\] in the files and \[5, 3\] in the"):
        zero.load_safetensors(model, tmp_path / "shape.safetensors")
    with pytest.raises(ShardError, match="no file .*absent.safetensors"):
        zero.load_safetensors(model, tmp_path / "absent.safetensors")
    for given in (None, 5, b"part.safetensors", [tmp_path / "part.safetensors", None]):
        found = given[1] if isinstance(given, list) else given
        with pytest.raises(
            ConfigError, match=rf"paths must be a path, or several .*, not {found!r}, which is"
        ):
            zero.load_safetensors(model, given)
    with pytest.raises(ConfigError, match="paths .*null character"):
        zero.load_safetensors(model, "a\0b")
    (tmp_path / "damaged.safetensors").write_bytes(file.read_bytes()[:40])
    with pytest.raises(ShardError, match="damaged.safetensors cannot be read"):
        zero.load_safetensors(model, tmp_path / "damaged.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ShardError, match="holds neither"):
        zero.load_safetensors(model, tmp_path / "empty")
    (tmp_path / "index.json").write_text("{}")
    with pytest.raises(ShardError, match="no index with a weight_map"):
        zero.load_safetensors(model, tmp_path / "index.json")
    assert all(torch.equal(v, before[n]) for n, v in made.full(model).items())
    missing, unexpected = zero.load_safetensors(model, tmp_path / "part.safetensors", strict=False)
    assert (len(missing), unexpected) == (7, ["other"])
    assert model.scale.to_local() == 1
