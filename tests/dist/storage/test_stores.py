"""File systems below nvme_dir: small, full, read-only, without O_DIRECT, and shared by models and runs."""

import gc
import os
import subprocess
import sys

import pytest
import torch
from compare import local
from faults import mounted, small_tmpfs, takes_o_direct
from tiered import ALL, assert_same, compiled, made, reference, train
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import StorageError
from zero_compiler.params.modules import sharded_models_of
from zero_compiler.storage.stores import FileStore, Nvme

O = torch.optim

# A small disk ----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 16 MiB."""
    with small_tmpfs(tmp_path / "disk", "16m") as folder:
        yield folder
        gc.collect()


@pytest.mark.filterwarnings("ignore:.*without O_DIRECT")
def test_a_disk_without_room_is_an_error_at_set_up(small_disk):
    torch.manual_seed(0)
    with pytest.raises(
        StorageError, match=r"has 1\d,\d{3},\d{3} bytes free, and parameters of rank 0 need 67,108,864"
    ):
        zero.shard(nn.Linear(4096, 4096, bias=False), offload_params="nvme", nvme_dir=str(small_disk))
    model = zero.shard(nn.Linear(1024, 1024, bias=False), offload_optimizer="nvme", nvme_dir=str(small_disk))
    first = zero.optimizer(O.AdamW, model)  # 8 MiB of states
    with pytest.raises(StorageError, match="optimizer states of rank 0 need 12,582,912"):
        zero.optimizer(O.AdamW, model, amsgrad=True)
    assert len(first.param_groups) == 1
    free = os.statvfs(small_disk).f_bavail
    del first
    gc.collect()
    assert os.statvfs(small_disk).f_bavail > free  # an optimizer that is gone takes its file along


@pytest.mark.filterwarnings("ignore:.*without O_DIRECT")
def test_files_of_a_model_that_is_gone_make_room_for_the_next(small_disk):
    """A sharded model is in a cycle, so its files stay until the next collection."""
    gc.disable()
    try:
        for _ in range(3):
            model = zero.shard(nn.Linear(1536, 1536), offload_params="nvme", nvme_dir=str(small_disk))
            del model
    finally:
        gc.enable()


def test_a_directory_without_o_direct_is_named(tmp_path):
    with mounted(tmp_path / "disk", "-t", "ramfs", "ramfs") as folder:
        if takes_o_direct(folder / "probe"):
            pytest.skip("this kernel's ramfs takes O_DIRECT")
        with pytest.warns(RuntimeWarning, match=f"nvme_dir={folder}.* is on a file system without O_DIRECT"):
            made(folder, tiers=ALL)
        gc.collect()


@pytest.mark.filterwarnings("ignore:.*without O_DIRECT")
def test_two_models_share_a_directory_and_no_file(small_disk):
    """A file system without O_DIRECT and two models in one directory."""
    models = [made(small_disk, tiers=ALL) for _ in range(2)]
    want = made(small_disk)
    losses = train(want, compiled(want), O.AdamW(want.parameters()))
    for model in models:
        assert train(model, compiled(model), zero.optimizer(O.AdamW, model)) == losses
        assert_same(model, want)


def test_a_directory_that_takes_no_file(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StorageError, match="takes no file .* Read-only file system; give a directory"):
        made(small_disk, tiers=("nvme", "none", "none"))


def test_files_stay_when_asked(tmp_path):
    nvme = Nvme(str(tmp_path), 0, keep=True)
    store = nvme.store("parameters", 10_000)
    region = store.allocate("w", (4,), torch.float32)
    region.fill(torch.arange(4.0))
    nvme.close()
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size == 12288
    assert torch.from_file(str(path), size=4, dtype=torch.float32).tolist() == [0, 1, 2, 3]
    assert region.tensor.tolist() == [0, 1, 2, 3]  # a handle outlives its store


# Other file systems, and runs that share one ---------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*without O_DIRECT")
@pytest.mark.parametrize("kind", ["overlay", "ramfs"])
def test_other_file_systems(kind, tmp_path):
    for name in ("lower", "upper", "work"):
        (tmp_path / name).mkdir()
    options = {
        "overlay": (
            "-t",
            "overlay",
            "-o",
            f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work",
            "overlay",
        ),
        "ramfs": ("-t", "ramfs", "ramfs"),
    }[kind]
    with mounted(tmp_path / "m", *options) as folder:
        want, losses = reference(folder)
        model = made(folder, True, ALL)
        assert train(model, compiled(model), zero.optimizer(O.AdamW, model)) == losses
        assert_same(model, want)
        assert list(folder.iterdir()) == []


_KEPT = """
import sys, torch
import zero_compiler as zero
from torch import nn

def losses(folder, seed, **fields):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64))
    zero.shard(model, nvme_dir=folder, **fields)
    optimizer = zero.optimizer(torch.optim.AdamW, model)
    print("made", flush=True)
    if fields:
        input()
    for step in range(10):
        loss = model(torch.ones(2, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()

if __name__ == "__main__":
    tiers = dict.fromkeys(("offload_params", "offload_grads", "offload_optimizer"), "nvme")
    print(losses(sys.argv[1], int(sys.argv[2]), nvme_keep=True, **tiers))
"""


def test_two_runs_in_one_directory(tmp_path):
    """Both are set up before either goes on, and their kept files have names of their own."""
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", _KEPT, str(tmp_path), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in (0, 1)
    ]
    for run in runs:
        assert run.stdout.readline() == "made\n"
    assert len(list(tmp_path.iterdir())) == 6  # parameters, gradients and states of each
    here = {"__name__": "here"}
    exec(_KEPT, here)
    for seed, run in enumerate(runs):
        assert float(run.communicate("\n", timeout=120)[0]) == here["losses"](str(tmp_path), seed)


def test_a_file_system_where_the_two_ways_disagree_is_used_through_the_page_cache(tmp_path, monkeypatch):
    """Direct transfers that do not see what the mapping wrote: tried on every new file, before anything rests there."""
    want, losses = reference(tmp_path)
    tried = []

    def coherent(store):
        tried.append((store.label, store.file.direct))
        return not store.file.direct

    monkeypatch.setattr(FileStore, "_coherent", coherent)
    model = made(tmp_path, tiers=ALL)
    optimizer = zero.optimizer(O.AdamW, model)
    assert train(model, compiled(model), optimizer) == losses
    assert_same(model, want)
    stores = list(sharded_models_of(model)[0].storage.nvme().stores)
    assert len(stores) == 3
    assert sorted(tried) == sorted((s.label, direct) for s in stores for direct in (False, True))
    assert not any(store.file.direct for store in stores)


def test_a_relative_directory_stays_where_it_was(tmp_path, monkeypatch):
    """A process that changes its directory between the model and its optimizer."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        (folder / "nvme").mkdir(parents=True)
    monkeypatch.chdir(here)
    model = made("nvme", tiers=ALL, nvme_keep=True)
    monkeypatch.chdir(there)
    zero.optimizer(O.AdamW, model)
    assert len(list((here / "nvme").iterdir())) == 3
    assert list((there / "nvme").iterdir()) == []


def test_a_directory_that_vanishes_is_missed_where_there_is_need_of_a_new_file(tmp_path):
    """What is there goes on; states that come later are an error each time until there is a place for them."""
    folder = tmp_path / "there"
    folder.mkdir()
    want, model = made(tmp_path), made(folder, tiers=ALL)
    plain, optimizer = O.SGD(want.parameters(), lr=0.1), zero.optimizer(O.SGD, model, lr=0.1)
    runs = [(want, compiled(want), plain), (model, compiled(model), optimizer)]
    losses = [train(*run) for run in runs]
    folder.rmdir()
    for o in (plain, optimizer):
        o.param_groups[0]["momentum"] = 0.9
    losses += [train(*run, begin=3, count=1) for run in runs]
    for _ in range(2):
        with pytest.raises(StorageError, match="takes no file .* No such file or directory"):
            optimizer.step()
    folder.mkdir()
    losses += [train(*run, begin=4) for run in runs]
    assert losses[::2] == losses[1::2]
    assert_same(model, want)
    weight = local(model.first.weight)
    assert optimizer.held(sharded_models_of(model)[0].key, "first.weight") == (weight.nbytes, "nvme")
