"""Storage that fails under a model whose parameters, gradients and states rest in files."""

import copy
import errno
import gc
import os
import re

import pytest
import torch
from compare import local
from faults import run_with_faults
from tiered import ALL, Broken, assert_same, compiled, made, reference, train
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import OptimizerError, StorageError
from zero_compiler.params.modules import sharded_models_of
from zero_compiler.storage import writeback_buffers
from zero_compiler.storage.stores import region_of

O = torch.optim

# Requests that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["read", "write"])
def test_an_error_in_the_step_names_what_was_moved_and_ends_the_optimizer(method, tmp_path, monkeypatch):
    model = made(tmp_path, tiers=("none", "none", "nvme"))
    optimizer = zero.optimizer(O.AdamW, model)
    run = compiled(model)
    train(model, run, optimizer)
    checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    want = train(model, run, optimizer, begin=3)
    model.load_state_dict(checkpoint[0])
    optimizer.load_state_dict(
        copy.deepcopy(checkpoint[1])
    )  # torch takes the step counts as they are, not copies
    broken = Broken(monkeypatch, method)
    run(torch.ones(2, 64)).sum().backward()
    broken.armed = True
    with pytest.raises(StorageError, match=f"{method} of exp_avg of scale"):
        optimizer.step()
    broken.armed = False
    with pytest.raises(OptimizerError, match="an earlier step of this optimizer broke off"):
        optimizer.step()
    optimizer.zero_grad()
    model.load_state_dict(checkpoint[0])
    optimizer.load_state_dict(checkpoint[1])
    assert train(model, run, optimizer, begin=3) == want


def test_an_error_in_a_forward_leaves_nothing_under_way(tmp_path, monkeypatch):
    model = made(tmp_path, tiers=("nvme", "none", "none"))
    run = compiled(model, bucket_bytes=0)
    x = torch.ones(2, 64)
    want = run(x)
    broken = Broken(monkeypatch, "read")
    broken.armed = True
    with pytest.raises(StorageError, match="read of first"):
        run(x)
    broken.armed = False
    assert torch.equal(run(x), want)
    assert sharded_models_of(model)[0].storage.nvme().engine.counters()["in_flight"] == 0


# System calls that fail ------------------------------------------------------------------------------------------


_LOOP = """
import functools, torch
import zero_compiler as zero
from torch import nn
from zero_compiler.errors import StorageError
from zero_compiler.storage import aio, stores
stores.Engine = functools.partial(aio.Engine, backend="threads", block_bytes=65536)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64))
tiers = dict.fromkeys(("offload_params", "offload_grads", "offload_optimizer"), "nvme")
zero.shard(model, nvme_dir={folder!r}, **tiers)
optimizer = zero.optimizer(torch.optim.AdamW, model)
run = torch.compile(model, backend="zero", options=dict(compute="aten"))
nvme = model._zero.sharded_model.storage.nvme()
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


_BROKEN = """
import functools, os, torch
import zero_compiler as zero
from torch import nn
from zero_compiler.storage import aio, stores, streaming
stores.Engine = functools.partial(aio.Engine, backend="threads")
done = streaming._StreamedTurn.done  # what is read is there when somebody looks
streaming._StreamedTurn.done = lambda turn: (turn.wait() is None) if turn.job is not None else done(turn)

def made(**tiers):
    torch.manual_seed(0)
    model = nn.Linear(64, 512, bias=False)
    zero.shard(model, nvme_dir={folder!r}, **tiers)
    return model, torch.compile(model, backend="zero", options=dict(compute="aten"))

def stop(grad):
    raise ValueError("the user's")

def breaks_off(run):
    x = torch.ones(2, 64, requires_grad=True)
    x.register_hook(stop)  # when all gradients of the model have landed
    os.environ["FAULT_CALL"] = "pwrite"
    try:
        run(x).sum().backward()
    except ValueError:
        print("broke off")
"""
_OVERLAPPED = """
model, run = made(offload_params="nvme", offload_optimizer="nvme")
optimizer = zero.optimizer(torch.optim.AdamW, model, overlap=True)
saved = model.weight.full_tensor().clone()
breaks_off(run)
with torch.no_grad():
    model.weight.to_local().copy_(saved)
model._zero.sharded_model.storage.nvme().engine.settle()
print(torch.equal(model.weight.full_tensor(), saved))
"""
_GRADIENTS = """
grads = []
for tier in ("none", "nvme"):
    model, run = made(offload_grads=tier)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    run(x)  # compiled before it counts how soon the next backward comes
    if tier == "nvme":
        breaks_off(run)
    run(x).square().sum().backward()
    grads.append(model.weight.grad.full_tensor())
print(torch.equal(*grads))
"""


@pytest.mark.parametrize(("what", "late"), [(_OVERLAPPED, 9), (_GRADIENTS, 1)], ids=["updates", "gradients"])
def test_no_late_write_of_a_backward_that_broke_off_meets_what_comes_after_it(what, late, tmp_path):
    """What is loaded then, or the gradients of the next backward."""
    folder = tmp_path / "target"
    folder.mkdir()
    body = (_BROKEN + what).format(folder=str(folder))
    done = run_with_faults(tmp_path, body, call="none", path="target", errno=-1, count=late)
    assert done.stdout == "broke off\nTrue\n", done.stderr


def test_a_gradient_that_cannot_be_written(tmp_path, monkeypatch):
    model, (want, losses) = made(tmp_path, tiers=ALL), reference(tmp_path)
    run, optimizer = compiled(model), zero.optimizer(O.AdamW, model)
    broken = Broken(monkeypatch, "write")
    broken.armed = True
    with pytest.raises(StorageError, match="write of gradient of"):
        run(torch.ones(2, 64)).sum().backward()
    broken.armed = False
    optimizer.zero_grad()
    assert train(model, run, optimizer) == losses
    assert_same(model, want)


def test_an_error_that_is_dropped_in_a_later_backward_takes_no_gradient_with_it(tmp_path, monkeypatch):
    """Its traceback may be part of a cycle, which is collected at any time."""
    model = zero.shard(nn.Linear(64, 512, bias=False), nvme_dir=str(tmp_path), offload_grads="nvme")
    errors = []

    def broken(write):
        raise StorageError("write of a gradient")

    with monkeypatch.context() as until_waited_for:
        until_waited_for.setattr(writeback_buffers._PendingWrite, "done", lambda write: False)
        until_waited_for.setattr(writeback_buffers.Landing, "_finish", broken)
        try:
            model(torch.ones(2, 64)).sum().backward()  # fails at its end
        except StorageError as error:
            errors.append(error)
    assert len(errors) == 1
    model.zero_grad()

    def drop(grad):
        errors.clear()
        gc.collect()

    x = torch.ones(2, 64, requires_grad=True) * 1
    x.register_hook(drop)  # when the gradient of the weight has landed
    model(x).sum().backward()
    assert torch.equal(local(model.weight.grad), torch.full((512, 64), 2.0))


# Files that change -----------------------------------------------------------------------------------------------


def stores_of(model):
    return {
        store.label.split(" of ")[0]: store for store in sharded_models_of(model)[0].storage.nvme().stores
    }


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
