"""Storage that fails under a model whose parameters, gradients and states rest in files."""

import contextlib
import copy
import errno
import multiprocessing
import os
import re
import subprocess
import sys

import pytest
import torch
from dist.test_tiers import _Broken, assert_same, compiled, local, made, train
from faults import mounted, run_with_faults
from torch import nn

import zero_compiler as zero
from zero_compiler.config import PLACED_FIELDS as TIERS
from zero_compiler.errors import OptimizerError, StorageError
from zero_compiler.modules import policies_of
from zero_compiler.runtime import streaming
from zero_compiler.runtime.stores import Store, region_of

O = torch.optim
ALL = ("nvme",) * 3


def reference(folder):
    want = made(folder)
    return want, train(want, compiled(want), O.AdamW(want.parameters()))


# System calls that fail ------------------------------------------------------------------------------------------

_LOOP = """
import functools, torch
import zero_compiler as zero
from torch import nn
from zero_compiler.errors import StorageError
from zero_compiler.runtime import aio, stores
stores.Engine = functools.partial(aio.Engine, backend="threads", block_bytes=65536)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64))
tiers = dict.fromkeys(("offload_params", "offload_grads", "offload_optimizer"), "nvme")
zero.shard(model, nvme_dir={folder!r}, **tiers)
optimizer = zero.optimizer(torch.optim.AdamW, model)
run = torch.compile(model, backend="zero", options=dict(compute="aten"))
nvme = model._zero.policy.nvme()
try:
    for step in range(4):
        torch.manual_seed(step)
        loss = run(torch.randn(4, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, loss.item(), flush=True)
    print("short", nvme.engine.counters()["short_transfers"] > 10)
except StorageError as error:
    print(error.errno, error.label, error)
print("in flight", nvme.engine.counters()["in_flight"])
"""


def test_system_calls_that_fail_in_mid_run(tmp_path):
    def run(call, number, first=1):
        folder = tmp_path / "target"
        folder.mkdir(exist_ok=True)
        body = _LOOP.format(folder=str(folder))
        done = run_with_faults(tmp_path, body, call=call, path="target", errno=number, first=first)
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("in flight 0\n")
        return done.stdout.splitlines()[:-1]

    want = run("none", 0)
    assert len(want) == 5
    assert run("pread", 0) == [*want[:4], "short True"]
    for call, number, words in (
        ("pread", errno.EIO, ("read of", "Input/output error")),
        ("pwrite", errno.ENOSPC, ("write of", "No space left on device; free space there")),
    ):
        lines = run(call, number, first=40)
        *steps, last = lines
        assert 0 < len(steps) < 4
        assert steps == want[: len(steps)]
        assert last.startswith(f"{number} ")
        assert all(word in last for word in words)
        assert any(name in last for name in ("0.weight", "2.weight", "0.bias", "2.bias"))
        assert re.search(
            rf"bytes at offset \d+ of '\w[\w ]* of rank 0 in nvme_dir={tmp_path}/target' \(", last
        )
        assert re.search(r"failed at byte \d+: ", last)


def test_a_gradient_that_cannot_be_written(tmp_path, monkeypatch):
    model, (want, losses) = made(tmp_path, tiers=ALL), reference(tmp_path)
    run, optimizer = compiled(model), zero.optimizer(O.AdamW, model)
    broken = _Broken(monkeypatch, "write")
    broken.armed = True
    with pytest.raises(StorageError, match="write of gradient of"):
        run(torch.ones(2, 64)).sum().backward()
    broken.armed = False
    optimizer.zero_grad()
    assert train(model, run, optimizer) == losses
    assert_same(model, want)


# Ctrl-C ----------------------------------------------------------------------------------------------------------

_FILES = (
    "zero_compiler/optimizer.py",
    "zero_compiler/updates.py",
    "runtime/streaming.py",
    "runtime/stores.py",
    "runtime/aio.py",
)


class _Interrupt:
    """KeyboardInterrupt before line number ``at`` of those that run in our files."""

    def __init__(self, at):
        self.left = at

    def __enter__(self):
        self.was = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *exc):
        sys.settrace(self.was)

    def _called(self, frame, event, arg):
        return self._line if frame.f_code.co_filename.endswith(_FILES) else None

    def _line(self, frame, event, arg):
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self._line


@pytest.mark.parametrize("overlap", [False, True])
def test_ctrl_c_between_any_two_lines_of_a_step(overlap, tmp_path, monkeypatch):
    """A step is done, or not begun, or later ones say that it is neither; nothing goes on in the background, and a
    checkpoint brings all back."""
    monkeypatch.setattr(sys.modules["zero_compiler.optimizer"], "UNIT_BYTES", 8 << 10)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32))
    zero.shard(model, nvme_dir=str(tmp_path), **dict.fromkeys(TIERS, "nvme"))
    optimizer = zero.optimizer(O.AdamW, model, overlap=overlap)
    engine = policies_of(model)[0].nvme().engine

    def values():
        states = [v for p in model.parameters() for v in optimizer.state.get(p, {}).values()]
        return [local(t).clone() for t in (*model.parameters(), *states)]

    def step(interrupt=None):
        with contextlib.nullcontext() if interrupt is None or not overlap else interrupt:
            model(torch.linspace(-1, 1, 64).view(2, 32)).square().sum().backward()
        with contextlib.nullcontext() if interrupt is None or overlap else interrupt:
            optimizer.step()
        optimizer.zero_grad()

    def back():
        optimizer.zero_grad()
        model.load_state_dict(checkpoint[0])
        optimizer.load_state_dict(copy.deepcopy(checkpoint[1]))

    def same(a, b):
        return len(a) == len(b) and all(map(torch.equal, a, b))

    step()
    checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    before = values()
    lines = _Interrupt(1 << 40)
    step(lines)
    after = values()
    step()
    twice = values()
    back()
    count = (1 << 40) - lines.left
    assert count > 300
    real, outcomes = streaming.settle, set()

    def impatient(engines):  # Ctrl-C again, while what is under way is waited for
        real(engines)
        monkeypatch.setattr(streaming, "settle", real)
        raise KeyboardInterrupt

    for k in range(40):
        if k % 3 == 2:
            monkeypatch.setattr(streaming, "settle", impatient)
        with contextlib.suppress(KeyboardInterrupt):
            step(_Interrupt(1 + k * (count - 1) // 39))
        monkeypatch.setattr(streaming, "settle", real)
        if not overlap:  # else the updates of a backward that is done may go on until the step
            assert engine.counters()["in_flight"] == 0, k
            assert len(engine._live) == 0 or all(request.done() for request in engine._live)
        optimizer.zero_grad()
        try:
            step()
        except OptimizerError as error:
            outcomes.add(str(error).split(" (")[0])
        else:
            now = values()
            outcomes.add(
                "not begun" if same(now, after) else "done" if same(now, twice) else f"neither, at {k}"
            )
        back()
        if k % 8 == 0:
            assert same(values(), before), k
            step()
            assert same(values(), after), k
            back()
    said = "an earlier step of this optimizer broke off, and parameters may be half updated"
    partly = "a backward with overlap=True broke off after some of its updates"
    assert said in outcomes
    assert outcomes <= {said, "not begun", "done"} | ({partly} if overlap else set())
    assert len(optimizer._stream._free) == len(optimizer._stream._buffers)


# Processes -------------------------------------------------------------------------------------------------------

_FORKED = """
import gc, os, sys, torch
import zero_compiler as zero
from torch import nn
from zero_compiler.errors import StorageError

tiers = dict.fromkeys(("offload_params", "offload_grads", "offload_optimizer"), "nvme")

def made():
    torch.manual_seed(0)
    model = zero.shard(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2)), nvme_dir=sys.argv[1], nvme_keep=True, **tiers)
    return model, zero.optimizer(torch.optim.AdamW, model)

def step(model, optimizer, x=torch.ones(2, 64)):
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()

def forked(body):
    child = os.fork()
    if not child:
        body()
        sys.exit(0)  # finalizers run
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def refused(call):
    try:
        call()
    except StorageError as error:
        assert f"nvme_dir={sys.argv[1]}" in str(error), error
        assert f"belong to process {os.getppid()}, and this is a forked child" in str(error), error
        assert "make the model in the child" in str(error), error
    else:
        raise AssertionError("no error")

model, optimizer = made()
losses = [step(model, optimizer)]
run = torch.compile(model, backend="zero", options={"compute": "aten"})
run(torch.ones(2, 64))
rows = model[0].weight._local_tensor
want = rows.clone()

def child():
    global model, optimizer, run
    assert torch.equal(rows, want)  # what eager code reads is right
    with torch.no_grad():
        model[1].weight.zero_()  # and what it writes its own
        optimizer.state[model[0].weight]["exp_avg"].zero_()
    assert not model[1].weight.full_tensor().any()
    refused(lambda: run(torch.ones(2, 64)))
    refused(lambda: model(torch.ones(2, 64)).sum().backward())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    refused(optimizer.step)
    own, other = made()
    assert step(own, other) == losses[0]
    model = optimizer = run = None
    gc.collect()

code = forked(child)
kept = len(os.listdir(sys.argv[1]))
losses += [step(model, optimizer) for _ in range(2)]
same, other = made()
assert [step(same, other) for _ in range(3)] == losses, "what the child wrote is in the file"

class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return torch.full((64,), float(i) + rows[0, 0].item() * 0)

loader = torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2, multiprocessing_context="fork")
for a, b in zip([step(model, optimizer, x) for x in loader], [step(same, other, x) for x in torch.arange(8.0).repeat(64, 1).T.split(4)]):
    assert a == b
print(code, kept)
"""


def test_a_forked_child_reads_and_is_told_and_leaves_all_as_it_was(tmp_path):
    # One thread: OpenMP's pool does not survive a fork, and a product in the child would wait for it without end.
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _FORKED, str(tmp_path)], capture_output=True, text=True, timeout=120, env=env
    )
    assert (done.returncode, done.stdout) == (0, "0 6\n"), done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


# Files that change -----------------------------------------------------------------------------------------------


def stores_of(model):
    return {store.label.split(" of ")[0]: store for store in policies_of(model)[0].nvme().stores}


def test_a_truncated_file(tmp_path):
    model = made(tmp_path, tiers=("nvme", "none", "none"))
    run = compiled(model)
    run(torch.ones(2, 64))
    os.ftruncate(stores_of(model)["parameters"].fd, 4096)
    with pytest.raises(StorageError, match=r"first.weight.*it was truncated"):
        run(torch.ones(2, 64))


def corrupt(store, at):
    byte = os.pread(store.fd, 1, at)
    os.pwrite(store.fd, bytes([byte[0] ^ 16]), at)


def test_checksums_find_a_changed_byte(tmp_path):
    model, (want, losses) = made(tmp_path, tiers=ALL, nvme_checksums=True), reference(tmp_path)
    run, optimizer = compiled(model), zero.optimizer(O.AdamW, model)
    assert train(model, run, optimizer) == losses
    assert_same(model, want)
    x = torch.ones(2, 64)
    stores = stores_of(model)
    weight = region_of(local(model.inner.weight))
    corrupt(weight.store, weight.offset + 5000)
    with pytest.raises(
        StorageError,
        match=rf"the bytes at {weight.offset + 4096:,} in parameters of rank 0 in .* are not those",
    ) as error:
        run(x)
    names = [n for n, _ in model.named_parameters()]
    assert str(error.value).split(":")[0].split(" ")[0] in names[: names.index("inner.weight") + 1], (
        "or what is read with it"
    )
    assert f"nvme_dir={tmp_path}" in str(error.value)
    corrupt(weight.store, weight.offset + 5000)  # the bit is back
    run(x).sum().backward()
    corrupt(stores["optimizer states"], 100)
    with pytest.raises(StorageError, match="in optimizer states of rank 0"):
        optimizer.step()


def test_checksums_take_what_is_written_through_handles(tmp_path):
    model, want = made(tmp_path, True, ALL, nvme_checksums=True), made(tmp_path)
    optimizer, plain = zero.optimizer(O.AdamW, model), O.AdamW(want.parameters())
    run, other = compiled(model), compiled(want)
    assert train(model, run, optimizer) == train(want, other, plain)
    for m in (model, want):
        with torch.no_grad():
            m.inner.weight.mul_(0.5)
        with zero.gathered(m, write=True):
            m.last.weight.fill_(0.125)
        m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()})
    for o in (optimizer, plain):
        o.state[o.param_groups[0]["params"][0]]["exp_avg"].mul_(0.5)
    assert train(model, run, optimizer, begin=3) == train(
        want, other, plain, begin=3
    )  # with clipping, in place
    # From the next direct write on they are checked again.
    corrupt(*(lambda r: (r.store, r.offset))(region_of(local(model.inner.weight))))
    with pytest.raises(StorageError, match="are not those that were written"):
        run(torch.ones(2, 64))


# File systems ----------------------------------------------------------------------------------------------------


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


def _forward(model, x):
    return model(x).detach().clone(), region_of(local(model.inner.weight)) is None


def test_a_spawned_process_gets_a_copy_in_memory(tmp_path):
    """torch moves what it sends into shared memory, so this rank's shards leave their file: they stay right."""
    (want, losses), model = reference(tmp_path), made(tmp_path, tiers=ALL)
    optimizer = zero.optimizer(O.AdamW, model)
    x = torch.ones(2, 64)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        there, in_memory = pool.apply(_forward, (model, x))
    assert in_memory
    assert torch.equal(there, model(x))
    assert train(model, compiled(model), optimizer) == losses
    assert_same(model, want)


def test_a_file_system_where_the_two_ways_disagree_is_used_through_the_page_cache(tmp_path, monkeypatch):
    """Direct transfers that do not see what the mapping wrote: tried on every new file, before anything rests there."""
    want, losses = reference(tmp_path)
    tried = []

    def coherent(store):
        tried.append((store.label, store.file.direct))
        return not store.file.direct

    monkeypatch.setattr(Store, "_coherent", coherent)
    model = made(tmp_path, tiers=ALL)
    optimizer = zero.optimizer(O.AdamW, model)
    assert train(model, compiled(model), optimizer) == losses
    assert_same(model, want)
    stores = list(policies_of(model)[0].nvme().stores)
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


def test_a_layer_of_half_precision_and_odd_sizes(tmp_path):
    """Nothing is a multiple of a block, and checks are on."""

    def build(**fields):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(33, 77), nn.Tanh(), nn.Linear(77, 3)).to(torch.bfloat16)
        return zero.shard(model, nvme_dir=str(tmp_path), **fields)

    def steps(model):
        run, optimizer = compiled(model), zero.optimizer(O.AdamW, model)
        losses = []
        for i in range(3):
            torch.manual_seed(i)
            loss = run(torch.randn(4, 33, dtype=torch.bfloat16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    tiers = dict.fromkeys(("offload_params", "offload_grads", "offload_optimizer"), "nvme")
    want = build()
    model = build(**tiers, nvme_checksums=True)
    assert steps(model) == steps(want)
    assert_same(model, want)
