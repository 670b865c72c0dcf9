"""Whole weights of a model on two ranks to safetensors files: from every tier, part by part, and read back."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dist.cases import Cases, refused
from dist.library_runs import shared_folder
from dist.measured import resident, restart_peak
from dist.spawn import run_ranks
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.utils._python_dispatch import TorchDispatchMode

import zero_compiler as zero
from zero_compiler.errors import ConfigError, RankMismatchError, ShardError, StorageError, ZeroError
from zero_compiler.params import save
from zero_compiler.storage import aio
from zero_compiler.storage.safetensors_folder import WeightsFolder
from zero_compiler.tools.export import export

pytestmark = pytest.mark.dist
cases = Cases(__name__, group_timeout=30.0)


class Odd(nn.Module):
    """One of every kind of tensor: tied, frozen, scalar, empty, of fewer rows than ranks, in bf16, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6)
        self.layer = nn.Linear(6, 7)
        self.low = nn.Linear(6, 5).to(torch.bfloat16)
        self.one_row = nn.Parameter(torch.randn(1, 9))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.frozen = nn.Parameter(torch.randn(3, 2, 2), requires_grad=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("unsaved", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(self.embed(x)).sum() * self.scale + self.one_row.sum() + self.low.weight.float().sum()
        return h + self.low.bias.float().sum() + self.head(self.embed(x)).sum() + self.empty.sum()


def sharded(**fields):
    return zero.shard(Odd(), device="cpu", compute="aten", **fields)


def expected() -> dict[str, torch.Tensor]:
    values = Odd().state_dict()
    del values["head.weight"]
    return values


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the files of a folder, as safetensors reads them."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():
                assert name not in found
                found[name] = file.get_tensor(name)
    return found


def differing(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], title: str = "") -> list[str]:
    if set(found) != set(wanted):
        return [f"{title}: names {sorted(set(found) ^ set(wanted))}"]
    return [
        f"{title}: {name}"
        for name, value in wanted.items()
        if found[name].dtype != value.dtype or not torch.equal(found[name], value)
    ]


def small_parts(nbytes: int = 64):
    return mock.patch.object(save, "_PART_BYTES", nbytes)


@cases.add
def every_stage_and_tier(rank):
    out = []
    with shared_folder() as folder:
        tiers = ({"stage": n} for n in range(4))
        nvme = {"offload_params": "nvme", "offload_optimizer": "nvme", "nvme_dir": str(folder)}
        for i, fields in enumerate((*tiers, nvme)):
            for nbytes in (64, 16 << 20):
                with small_parts(nbytes):
                    zero.save_safetensors(sharded(**fields), folder / f"{i}.{nbytes}")
                out += differing(read(folder / f"{i}.{nbytes}"), expected(), f"{fields}")
    return out


@cases.add
def after_training_and_compiled(rank):
    model = sharded()
    call = torch.compile(model, backend="zero")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    call(torch.arange(4) + rank).backward()
    optimizer.step()
    with zero.gathered(model):
        wanted = {k: v.clone() for k, v in model.state_dict().items() if k != "head.weight"}
    with shared_folder() as folder:
        zero.save_safetensors(call, str(folder))
        out = differing(read(folder), wanted)
    if torch.equal(wanted["embed.weight"], expected()["embed.weight"]):
        out.append("nothing was trained")
    call(torch.arange(4)).backward()
    return out


@cases.add
def several_files_and_an_index(rank):
    with shared_folder() as folder:
        zero.save_safetensors(sharded(), folder, max_file_bytes=300)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        out = differing(read(folder), expected())
        names = sorted(p.name for p in folder.iterdir())
        count = len(names) - 1
        if names != [
            *(f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)),
            "model.safetensors.index.json",
        ]:
            out.append(f"files {names}")
        if set(index["weight_map"]) != set(expected()) or set(index["weight_map"].values()) != set(
            names[:-1]
        ):
            out.append(f"index {index}")
        if index["metadata"]["total_size"] != sum(v.nbytes for v in expected().values()):
            out.append(f"index {index['metadata']}")
        model = sharded()
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        zero.load_safetensors(model, folder)
        with zero.gathered(model):
            out += differing({k: v for k, v in model.state_dict().items() if k != "head.weight"}, expected())
        # Another export takes the place of this one, and nothing of it is left.
        dist.barrier()
        zero.save_safetensors(model, folder)
        if (names := sorted(os.listdir(folder))) != ["model.safetensors"]:
            out.append(f"files of the second export {names}")
    return out


class Job:
    """All of a job by one name, as ``examples/resume.py`` saves it."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "data": {"taken": 1}}

    def load_state_dict(self, state):
        raise AssertionError("an export loads nothing")


@cases.add
def a_checkpoint_of_all_ranks_is_exported_by_one_process(rank):
    """With every name of a tied weight, as the checkpoint has them."""
    out = []
    with shared_folder() as folder:
        nvme = {"offload_params": "nvme", "offload_optimizer": "nvme", "nvme_dir": str(folder)}
        for i, fields in enumerate(({}, nvme)):
            model = sharded(**fields)
            optimizer = zero.optimizer(torch.optim.AdamW, model, lr=0.1)
            model(torch.arange(4) + rank).backward()
            optimizer.step()
            with zero.gathered(model):
                wanted = {name: value.clone() for name, value in model.state_dict().items()}
            dcp.save({"training": Job(model, optimizer)}, checkpoint_id=folder / f"{i}")
            if rank == 0:
                found = export(folder / f"{i}", folder / f"{i}.out", max_file_bytes=300)
                if found != ("training.model", len(wanted)):
                    out.append(f"{fields}: {found}")
                out += differing(read(folder / f"{i}.out"), wanted, f"{fields}")
            dist.barrier()
        if torch.equal(wanted["embed.weight"], expected()["embed.weight"]):
            out.append("nothing was trained")
    return out


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view and not out.is_meta:
            self.nbytes = max(self.nbytes, out.nbytes)
        return out


@cases.add
def no_rank_holds_more_than_a_part(rank):
    """The largest tensor that a rank makes is a part of a weight (of a file, in whole blocks), not the weight."""
    out, part, tensor = [], 4096, 64 * 1024 * 4
    with shared_folder() as folder:
        for fields in ({}, {"offload_params": "nvme", "nvme_dir": str(folder)}):
            model = zero.shard(nn.Linear(1024, 64, bias=False), device="cpu", compute="aten", **fields)
            buffers = []
            made = aio.buffer
            with small_parts(part), Largest() as largest:
                with mock.patch.object(aio, "buffer", lambda n: buffers.append(n) or made(n)):
                    zero.save_safetensors(model, folder / "out")
            if (found := max(largest.nbytes, *buffers, 0, 0)) > part + 2 * 4096:
                out.append(f"{found} bytes of {tensor}, {fields}")
            if not largest.nbytes and not buffers:
                out.append("nothing was counted")
    return out


@cases.add
def an_error_on_one_rank_ends_all_with_its_reason(rank):
    out = []
    places = (
        (0, WeightsFolder, "begin", StorageError),
        (0, WeightsFolder, "begin", PermissionError),
        (0, WeightsFolder, "open", StorageError),
        (0, WeightsFolder, "write", StorageError),
        (0, WeightsFolder, "commit", StorageError),
        (0, save, "write_configuration", ValueError),
        (0, save._Parts, "__init__", MemoryError),
        (1, save._Parts, "__init__", MemoryError),
        (0, save._Parts, "_read", StorageError),
        (1, save._Parts, "_read", StorageError),
        (1, save._Parts, "_read", MemoryError),
        (1, save, "_sources", StorageError),
        (1, save, "files_of", StorageError),
    )
    with shared_folder() as folder:
        model = sharded()
        zero.save_safetensors(model, folder)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        for fails, owner, name, kind in places:
            with contextlib.ExitStack() as stack:
                stack.enter_context(small_parts())
                if rank == fails:
                    error = kind("the disk is gone")
                    stack.enter_context(mock.patch.object(owner, name, side_effect=error, autospec=True))
                what = f"rank {fails} in {name}: "
                told = () if rank == fails else (f"rank {fails} of 2 could not",)
                raised = kind if rank == fails else ZeroError
                found = refused(
                    lambda: zero.save_safetensors(model, folder), raised, "the disk is gone", *told
                )
                out += [what + text for text in found]
            dist.barrier()
            if os.listdir(folder) != ["model.safetensors"]:
                out.append(what + f"leaves {os.listdir(folder)}")
            out += differing(read(folder), expected(), what)
            dist.barrier()
        model(torch.arange(4)).backward()  # ranks meet again
        zero.save_safetensors(model, folder)
        if read(folder)["embed.weight"].any():
            out.append("the last export")
    return out


@cases.add
def what_cannot_be_saved_is_refused(rank):
    out = []
    with shared_folder() as folder:

        def saving(model, to=folder, **kw):
            return lambda: zero.save_safetensors(model, to, **kw)

        model = sharded()
        out += refused(saving(nn.Linear(2, 2)), ShardError, "takes a sharded model")
        out += refused(saving(model, max_file_bytes=0), ZeroError, "max_file_bytes")
        for path in (None, 5, b"folder"):
            out += refused(
                saving(model, path), ConfigError, "folder must be a path", f"not {path!r}, which is"
            )
        out += refused(saving(model, f"{folder}/a\0b"), ConfigError, "folder must", "null character")
        out += refused(
            saving(model, None if rank else folder), ConfigError, "folder must be a path", "not None"
        )
        out += refused(saving(model, folder / f"{rank}"), RankMismatchError, "folder")
        with zero.gathered(model):
            out += refused(saving(model), ShardError, "outside of zero.gathered")
        with torch.device("meta"):
            empty = nn.Linear(4, 4)
        out += refused(saving(zero.shard(empty, device="cpu")), ShardError, "no values yet")
        if os.listdir(folder):
            out.append(f"left {os.listdir(folder)}")
    return out


@pytest.mark.parametrize("name", cases.names)
def test_it(name):
    cases.check(name)


# --- memory ----------------------------------------------------------------------------------------------------------

TENSOR_BYTES = 64 << 20


def growth(rank, world, folder, fields):
    side = math.isqrt(TENSOR_BYTES // 4)
    layers = (nn.utils.skip_init(nn.Linear, side, side, bias=False) for _ in range(3))
    model = zero.shard(nn.Sequential(*layers), device="cpu", compute="aten", **fields)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(rank)
    zero.save_safetensors(sharded(), f"{folder}/other")  # what a first call imports is there
    dist.barrier()
    restart_peak()
    before = resident("VmRSS")
    zero.save_safetensors(model, folder)
    return resident("VmHWM") - before


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["none", "nvme"])
def test_no_rank_takes_as_much_memory_as_a_tensor(tmp_path, tier):
    """Of three that it writes, measured by the kernel: the first one, which writes, and those that send."""
    files = {"nvme_dir": str(tmp_path / "files")} if tier == "nvme" else {}
    (tmp_path / "files").mkdir()
    took = run_ranks(growth, 2, str(tmp_path / "out"), {"offload_params": tier, **files})
    assert os.path.getsize(tmp_path / "out" / "model.safetensors") > 3 * TENSOR_BYTES
    assert 0 < max(took) < TENSOR_BYTES * 3 // 4, took


# --- a rank is killed ------------------------------------------------------------------------------------------------


def killed(rank, world, folder, calls):
    """The first rank is killed at its ``calls``-th call of those that write."""
    left = [calls]

    def counting(original):
        def call(*args):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args)

        return call

    model = sharded()
    if rank == 0:
        for name in ("replace", "unlink", "fsync"):
            setattr(os, name, counting(getattr(os, name)))
        WeightsFolder.write = counting(WeightsFolder.write)
        zero.save_safetensors(model, folder, max_file_bytes=300)
        os._exit(0)
    start = time.monotonic()
    try:
        zero.save_safetensors(model, folder, max_file_bytes=300)
    except ZeroError as error:
        return str(error), time.monotonic() - start
    return None, time.monotonic() - start


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("calls", [1, 9, 14, 20, 26, 32, 36])
def test_a_killed_export_leaves_nothing_that_looks_whole(tmp_path, calls):
    """And its peers end soon."""
    (tmp_path / "model.safetensors").write_bytes(b"of an earlier export")
    said, took = run_ranks(killed, 2, str(tmp_path), calls, timeout=100.0, may_die=[0])[1]
    assert took < 20
    names = set(os.listdir(tmp_path))
    if "model.safetensors" in names:  # the earlier one, as it was
        assert names == {"model.safetensors", ".zero-export"}
        assert (tmp_path / "model.safetensors").read_bytes() == b"of an earlier export"
    elif "model.safetensors.index.json" in names:
        assert not differing(read(tmp_path), expected())
    else:
        assert said is not None
        assert "gone" in said


def test_what_a_killed_export_has_left_is_in_nobodys_way(tmp_path):
    model = zero.shard(Odd(), device="cpu", compute="aten")
    (tmp_path / ".zero-export").mkdir()
    (tmp_path / ".zero-export" / "model-00001-of-00009.safetensors").write_bytes(b"half")
    zero.save_safetensors(model, tmp_path)
    assert os.listdir(tmp_path) == ["model.safetensors"]
    assert not differing(read(tmp_path), expected())
