"""``zero-compiler export``: safetensors files of a checkpoint."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from null.small import mlp
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import zero_compiler as zero
from zero_compiler.errors import ConfigError, StorageError
from zero_compiler.tools.cli import app
from zero_compiler.tools.export import export


class Training:
    """All of a job by one name, as ``examples/resume.py`` saves it."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        raise AssertionError("an export loads nothing")


def saved(folder, key="model"):
    model = zero.shard(mlp(), device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    state = {**model.state_dict(), "scalar": torch.tensor(2.5), "half": torch.ones(3, dtype=torch.bfloat16)}
    state["empty"] = torch.empty(0, 3)
    if key is not None:
        state = {key: state, "optim": optimizer.state_dict(), "random": pickle.dumps(3), "data": {"taken": 3}}
    if key == "model":
        state = {"training": Training(state)}
    dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    values = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    return values | {
        "scalar": torch.tensor(2.5),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
    }


def same(found, wanted):
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("saved_as", "options", "found"),
    [
        ("model", [], "training.model"),
        ("model", ["--key", "training.model"], "training.model"),
        ("net", [], "net"),
        (None, [], ""),
        (None, ["--key", ""], ""),
    ],
)
def test_weights_of_a_checkpoint(tmp_path, saved_as, options, found):
    wanted = saved(tmp_path / "dcp", saved_as)
    (tmp_path / "config.json").write_text("{}")
    call = ["export", str(tmp_path / "dcp"), str(tmp_path / "out"), "--config", str(tmp_path), *options]
    result = CliRunner().invoke(app, call)
    assert result.exit_code == 0, result.output
    under = f" under {found!r}" if found else ""
    assert f"{len(wanted)} tensors{under} written" in result.output
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]
    same(load_file(tmp_path / "out" / "model.safetensors"), wanted)


def test_several_files(tmp_path):
    wanted = saved(tmp_path / "dcp", "net")
    export(tmp_path / "dcp", tmp_path / "out", key="net", max_file_bytes=64)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 1
    same({k: v for f in files for k, v in load_file(tmp_path / "out" / f).items()}, wanted)
    model = zero.shard(mlp(1), device="cpu")
    zero.load_safetensors(model, tmp_path / "out", strict=False)
    same(
        {name: p.full_tensor().detach() for name, p in model.named_parameters()},
        {name: value for name, value in wanted.items() if name not in ("scalar", "half", "empty")},
    )


def test_names_of_a_compiled_model(tmp_path):
    dcp.save(torch.compile(nn.Linear(2, 2)).state_dict(), checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    export(tmp_path / "dcp", tmp_path / "out")
    assert sorted(load_file(tmp_path / "out" / "model.safetensors")) == ["bias", "weight"]


MEASURED = """
import re, sys
from pathlib import Path
from zero_compiler.tools.export import export

def resident(line):
    return int(re.search(line + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

export(Path(sys.argv[1], "small"), Path(sys.argv[1], "other"))  # what a first call imports is there
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
export(Path(sys.argv[1], "large"), Path(sys.argv[1], "out"))
print(resident("VmHWM") - before)
"""


@pytest.mark.slow
def test_it_holds_one_tensor_twice_at_most(tmp_path):
    """Of four, measured by the kernel: the tensor, and what one rank has saved of it. They are larger than what glibc
    keeps for the next one when it is freed."""
    tensor = torch.ones(40 << 20, dtype=torch.uint8)
    dcp.save({"x": torch.ones(2)}, checkpoint_id=str(tmp_path / "small"), no_dist=True)
    dcp.save({f"w{i}": tensor + i for i in range(4)}, checkpoint_id=str(tmp_path / "large"), no_dist=True)
    command = [sys.executable, "-c", MEASURED, str(tmp_path)]
    took = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert tensor.nbytes < took < 2.5 * tensor.nbytes
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert [found[f"w{i}"][[0, -1]].tolist() for i in range(4)] == [[i + 1] * 2 for i in range(4)]


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from safetensors.torch import load_file
from zero_compiler.storage.safetensors_folder import WeightsFolder
from zero_compiler.tools.export import export

checkpoint, out = Path(sys.argv[1]), Path(sys.argv[2])

def killed_at(calls):
    left = [calls]

    def counting(original):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)
        return call

    for name in ("replace", "unlink", "fsync"):
        setattr(os, name, counting(getattr(os, name)))
    WeightsFolder.write = counting(WeightsFolder.write)
    export(checkpoint, out, max_file_bytes=64)
    os._exit(0)

for calls in range(1, 100):
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"of an earlier export")
    child = os.fork()
    if child == 0:
        killed_at(calls)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    names = set(os.listdir(out))
    if "model.safetensors" in names:
        print("earlier", names == {"model.safetensors", ".zero-export"})
    elif "model.safetensors.index.json" in names:
        print("whole", sum(len(load_file(p)) for p in out.glob("model-*.safetensors")))
    else:
        print("none", not any(n in names for n in ("model.safetensors", "pytorch_model.bin")))
    if ended == 0:
        break
"""


@pytest.mark.slow
def test_one_that_is_killed_leaves_nothing_that_looks_whole(tmp_path):
    """At every call that writes, syncs, renames or removes: what readers look for is the earlier export as it was, or
    all of this one, or is not there."""
    wanted = saved(tmp_path / "dcp")
    command = [sys.executable, "-c", KILLED, str(tmp_path / "dcp"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert set(said) <= {"earlier True", f"whole {len(wanted)}", "none True"}, said
    assert [said[0], said[-1]] == ["earlier True", f"whole {len(wanted)}"]
    assert "none True" in said
    assert len(said) > 10


def test_what_it_refuses(tmp_path):
    with pytest.raises(StorageError, match="is no whole checkpoint"):
        export(tmp_path / "none", tmp_path / "out")
    saved(tmp_path / "dcp", "net")
    for key in ("ema", "net.half"):
        with pytest.raises(ConfigError, match=f"has no weights under '{key}'; give --key, one of net$"):
            export(tmp_path / "dcp", tmp_path / "out", key=key)
    with pytest.raises(ConfigError, match=r"is no config\.json"):
        export(tmp_path / "dcp", tmp_path / "out", key="net", config=tmp_path)
    outer = tmp_path / "checkpoint-8"
    saved(outer / "pytorch_model_fsdp_0")
    (outer / "model.safetensors").touch()
    for path, match in (
        (outer, "pytorch_model_fsdp_0' say"),
        (outer / "model.safetensors", "is one file"),
    ):
        with pytest.raises(ConfigError, match=match):
            export(path, tmp_path / "out")
    shutil.rmtree(outer / "pytorch_model_fsdp_0")
    with pytest.raises(ConfigError, match="has safetensors files already"):
        export(outer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_configuration_of_no_model_is_told_of(tmp_path, caplog):
    wanted = saved(tmp_path / "dcp")
    (tmp_path / "config.json").write_text('{"model_type": "own"}')
    export(tmp_path / "dcp", tmp_path / "out", config=tmp_path)
    (record,) = [r for r in caplog.records if r.name == "zero_compiler"]
    assert "every name is written, also tied ones" in record.getMessage()
    assert "own" in record.getMessage()
    assert (tmp_path / "out" / "config.json").exists()
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == wanted.keys()


ONE = {"w": torch.ones(1)}


@pytest.mark.parametrize(
    ("state", "key", "wanted"),
    [
        ({"net": ONE, "ema": ONE}, None, "several places that hold weights; give --key, one of ema, net$"),
        ({**ONE, "ema": ONE}, None, "several places that hold weights; give --key, one of '', ema$"),
        ({"a": {"model": ONE}, "b": {"model": ONE}}, None, "give --key, one of a.model, b.model$"),
        (
            {"all": {"model": ONE, "step": 3}},
            "all",
            "'all.step' of .* is no tensor.*; give --key, one of all.model$",
        ),
        ({"step": 3}, None, "has no weights; nothing in it holds tensors alone$"),
    ],
)
def test_places_that_could_be_meant_are_named(tmp_path, state, key, wanted):
    dcp.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    with pytest.raises(ConfigError, match=wanted):
        export(tmp_path / "dcp", tmp_path / "out", key=key)


def test_what_is_named_model_is_taken_first(tmp_path):
    state = {"model": {"a": ONE, "model": ONE}, "ema": ONE, "other": {"model": ONE}}
    dcp.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert export(tmp_path / "dcp", tmp_path / "out") == ("model", 2)
    same(load_file(tmp_path / "out" / "model.safetensors"), {"a.w": ONE["w"], "model.w": ONE["w"]})
