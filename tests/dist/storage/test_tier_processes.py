"""Processes whose models rest in files: interrupted, forked, spawned, killed; and nothing is left of them."""

import contextlib
import copy
import gc
import multiprocessing
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from compare import local
from faults import Interrupt
from tiered import ALL, assert_same, compiled, made, reference, train
from torch import nn

import zero_compiler as zero
from zero_compiler.config import PLACED_FIELDS
from zero_compiler.errors import OptimizerError
from zero_compiler.params.modules import sharded_models_of
from zero_compiler.storage import aio, interruptible_io
from zero_compiler.storage.stores import region_of

O = torch.optim

# What is left ----------------------------------------------------------------------------------------------------


def test_nothing_is_left_after_an_exception_a_fork_and_the_end(tmp_path):
    """An error in the user's loop, a child that was forked, and the end of the process: no file, thread or descriptor."""
    script = textwrap.dedent(
        f"""
        import gc, os, threading, torch
        import zero_compiler as zero
        from torch import nn

        def fds():
            return len(os.listdir("/proc/self/fd"))

        def loop():
            model = zero.shard(nn.Linear(64, 64), offload_params="nvme", offload_grads="nvme",
                               offload_optimizer="nvme", nvme_dir={str(tmp_path)!r})
            opt = zero.optimizer(torch.optim.AdamW, model)
            model(torch.ones(2, 64)).sum().backward()
            opt.step()
            child = os.fork()
            if not child:
                ok = torch.isfinite(model.weight.full_tensor()).all().item()
                os._exit(0 if ok else 1)
            assert os.waitpid(child, 0)[1] == 0
            raise ValueError("the user's")

        for i in range(6):
            try:
                loop()
            except ValueError as error:
                error.__traceback__ = None
            gc.collect()
            now = fds(), len(os.listdir("/proc/self/task"))
            if i == 1:
                first = now
        assert now <= first, (first, now)
        model = zero.shard(nn.Linear(64, 64), offload_params="nvme", nvme_dir={str(tmp_path)!r})
        print("fine")
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "fine\n", done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
def test_no_leak_over_a_thousand_steps(overlap, tmp_path):
    """Without overlap gradients rest in files too; state_dicts and errors of the loop come between."""
    import psutil

    model = made(tmp_path, tiers=ALL, nvme_checksums=not overlap)
    optimizer = zero.optimizer(O.AdamW, model, overlap=overlap, max_grad_norm=None if overlap else 0.1)
    run = compiled(model)
    me = psutil.Process()

    def steps(count):
        for i in range(count):
            loss = run(torch.ones(2, 64)).sum()
            if i % 50 == 0 and not overlap:
                model.state_dict(), optimizer.state_dict()
                with contextlib.suppress(ZeroDivisionError):
                    loss = loss / (1 // 0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
        with open("/proc/self/maps") as maps:
            mappings = len(maps.readlines())
        return (me.num_fds(), me.num_threads(), aio.live_bytes()), mappings, me.memory_info().rss

    held, mappings, rss = steps(100)
    after = steps(1000)
    # No more: those of a model of another test may end meanwhile.
    assert all(now <= was for now, was in zip(after[0], held, strict=True))
    assert after[1] <= mappings + 8  # the allocator's own come and go
    assert after[2] < rss + (4 << 20)


_KILLED = """
import os, signal, sys, torch
import zero_compiler as zero
from torch import nn
from zero_compiler.storage.stores import FileStore

folder, checkpoint, kill_at, overlap = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "True"
write = FileStore.write

def killed(self, span, buffer):
    write(self, span, buffer)
    os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8))
tiers = dict.fromkeys(("offload_params", "offload_grads", "offload_optimizer"), "nvme")
zero.shard(model, nvme_dir=folder, **tiers)
optimizer = zero.optimizer(torch.optim.AdamW, model, overlap=overlap)
begin = 0
if os.path.exists(checkpoint):
    state = torch.load(checkpoint, weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    begin = state["step"]
for step in range(begin, 4):
    torch.manual_seed(step)
    loss = model(torch.randn(4, 64)).square().mean()
    print(step, loss.item(), flush=True)
    if step == kill_at and overlap:
        FileStore.write = killed
    loss.backward()
    if step == kill_at:
        FileStore.write = killed
    optimizer.step()
    optimizer.zero_grad()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
    torch.save(state, checkpoint + ".new")
    os.replace(checkpoint + ".new", checkpoint)
"""


@pytest.mark.parametrize("overlap", [False, True])
def test_killed_in_a_step_and_started_again(overlap, tmp_path):
    """With overlap in the backward, whose updates are being written."""
    files = tmp_path / "files"
    files.mkdir()

    def run(checkpoint, kill_at):
        there = str(tmp_path / checkpoint)
        command = [sys.executable, "-c", _KILLED, str(files), there, str(kill_at), str(overlap)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == (0 if kill_at < 0 else -9), done.stderr
        assert list(files.iterdir()) == []
        return done.stdout.splitlines()

    want = run("whole", -1)
    before = run("broken", 2)
    after = run("broken", -1)
    assert before == want[:3]
    assert after == want[2:]


# Ctrl-C ----------------------------------------------------------------------------------------------------------


_FILES = (
    "zero_compiler/optim/optimizer.py",
    "zero_compiler/optim/updates.py",
    "zero_compiler/storage/streaming.py",
    "zero_compiler/storage/interruptible_io.py",
    "zero_compiler/storage/double_buffer.py",
    "zero_compiler/storage/stores.py",
    "zero_compiler/storage/aio.py",
)


@pytest.mark.parametrize("overlap", [False, True])
def test_ctrl_c_between_any_two_lines_of_a_step(overlap, tmp_path, monkeypatch):
    """A step is done, or not begun, or later ones say that it is neither; nothing goes on in the background, and a
    checkpoint brings all back."""
    monkeypatch.setattr(sys.modules["zero_compiler.optim.optimizer"], "SUB_GROUP_BYTES", 8 << 10)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32))
    zero.shard(model, nvme_dir=str(tmp_path), **dict.fromkeys(PLACED_FIELDS, "nvme"))
    optimizer = zero.optimizer(O.AdamW, model, overlap=overlap)
    engine = sharded_models_of(model)[0].storage.nvme().engine

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
    lines = Interrupt(1 << 40, _FILES)
    step(lines)
    after = values()
    step()
    twice = values()
    back()
    count = (1 << 40) - lines.left
    assert count > 300
    real, outcomes = interruptible_io.settle, set()

    def impatient(engines):  # Ctrl-C again, while what is under way is waited for
        real(engines)
        monkeypatch.setattr(interruptible_io, "settle", real)
        raise KeyboardInterrupt

    for k in range(40):
        if k % 3 == 2:
            monkeypatch.setattr(interruptible_io, "settle", impatient)
        with contextlib.suppress(KeyboardInterrupt):
            step(Interrupt(1 + k * (count - 1) // 39, _FILES))
        monkeypatch.setattr(interruptible_io, "settle", real)
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
        assert "belong to the process that made them, and this is a forked child" in str(error), error
        assert "make the model in the child" in str(error), error
    except RuntimeError as error:
        assert OF_TORCH in str(error), error
    else:
        raise AssertionError("no error")

# torch itself refuses a backward of a child behind any DTensor (2.15, built for an accelerator).
OF_TORCH = "autograd's threading in combination with fork"
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
    try:
        assert step(own, other) == losses[0]
    except RuntimeError as error:
        assert OF_TORCH in str(error), error
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
for a, b in zip([step(model, optimizer, x) for x in loader], [step(same, other, x) for x in torch.arange(8.0).repeat(64, 1).T.contiguous().split(4)]):
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
