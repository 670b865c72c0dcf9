"""Parameters, gradients and states in files: the same values as in memory, in every combination."""

import contextlib
import copy
import errno
import gc
import itertools
import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dist.spawn import run_ranks
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import ConfigError, OptimizerError, StorageError
from zero_compiler.modules import policies_of
from zero_compiler.runtime import aio
from zero_compiler.runtime.stores import Nvme, Store, region_of

O = torch.optim
TIERS = list(itertools.product(("none", "nvme"), repeat=3))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 200)
        self.inner = nn.Linear(200, 200)
        self.last = nn.Linear(200, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.inner(x))) * self.scale + self.frozen


def made(folder, init=False, tiers=("none",) * 3, **fields):
    torch.manual_seed(0)
    fields |= dict(zip(("offload_params", "offload_grads", "offload_optimizer"), tiers, strict=True))
    if init:
        with zero.init(nvme_dir=str(folder), **fields):
            return Net()
    return zero.shard(Net(), nvme_dir=str(folder), **fields)


def compiled(model, **options):
    torch._dynamo.reset()
    return torch.compile(model, backend="zero", options={"compute": "aten"} | options)


def train(model, run, optimizer, rank=0, count=3, begin=0):
    losses = []
    for i in range(begin, begin + count):
        for k in range(2):  # the second adds to the gradients of the first
            torch.manual_seed(100 * i + 10 * k + rank)
            loss = run(torch.randn(8, 64)).square().mean()
            loss.backward()
            losses.append(loss.item())
        if i % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def local(x):
    return getattr(x, "_local_tensor", x).detach()


def assert_same(model, other):
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(local(a), local(b)), name


@pytest.mark.parametrize("init", [False, True])
@pytest.mark.parametrize("tiers", TIERS, ids="-".join)
def test_every_combination_on_one_rank(tiers, init, tmp_path):
    want = made(tmp_path)
    losses = train(want, compiled(want), O.AdamW(want.parameters()))
    model = made(tmp_path, init, tiers)
    optimizer = zero.optimizer(O.AdamW, model)
    assert train(model, compiled(model), optimizer) == losses
    assert_same(model, want)
    for name, param in model.named_parameters():
        in_file = tiers[0] == "nvme" and param.dim() > 0
        assert (region_of(local(param)) is not None) == in_file, name
    model(torch.ones(2, 64)).sum().backward()  # eager
    assert (region_of(local(model.inner.weight.grad)) is not None) == (tiers[1] == "nvme")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_and_states_of_the_lower_stages(stage, tmp_path):
    want = made(tmp_path, stage=stage)
    losses = train(want, compiled(want), O.AdamW(want.parameters()))
    model = made(tmp_path, tiers=("none", "nvme", "nvme"), stage=stage)
    run, optimizer = compiled(model), zero.optimizer(O.AdamW, model)
    assert train(model, run, optimizer) == losses
    assert_same(model, want)


def test_gradients_in_files_after_a_backward_that_broke_off(tmp_path):
    model, want = made(tmp_path, tiers=("none", "nvme", "none")), made(tmp_path)
    run, other = compiled(model), compiled(want)

    def stop(grad):
        raise ValueError("the user's")

    with pytest.raises(ValueError, match="the user's"):
        x = torch.ones(2, 64, requires_grad=True)
        y = x * 2
        y.register_hook(stop)
        run(y).sum().backward()
    model.zero_grad()
    for r in (run, other):
        r(torch.ones(2, 64)).sum().backward()
    assert torch.equal(local(model.inner.weight.grad), local(want.inner.weight.grad))
    assert region_of(local(model.inner.weight.grad)) is not None


def _ranks(rank, world, transport, folder):
    cases = (
        (("nvme", "none", "none"), {}),
        (("nvme", "nvme", "nvme"), {}),
        ((None,) * 3, {"device_rest_bytes": 60_000}),  # a part of the parameters, and nothing else
    )
    for tiers, fields in cases:
        want = made(folder, transport=transport)
        losses = train(want, compiled(want), O.AdamW(want.parameters()), rank)
        model = made(folder, True, tiers, transport=transport, **fields)
        run = compiled(model)
        optimizer = zero.optimizer(O.AdamW, model)
        assert train(model, run, optimizer, rank) == losses
        assert_same(model, want)
        with zero.gathered(model), zero.gathered(want):
            assert torch.equal(model.inner.weight, want.inner.weight)
        (program,) = {
            p.phase: p for p in policies_of(model)[0].frames[0].programs.values() if p.phase == "backward"
        }.values()
        assert program.host_bytes > 0
        if fields:
            placed = policies_of(model)[0].placed
            assert placed.tier("params", "inner.weight") == placed.tier("optimizer", "first.weight") == "nvme"
            assert placed.tier("params", "first.weight") == "none"
    return True


@pytest.mark.dist
@pytest.mark.parametrize("transport", ["c10d", "shared"])
def test_on_two_ranks(transport, tmp_path):
    assert run_ranks(_ranks, 2, transport, str(tmp_path)) == [True, True]


def test_files_are_read_one_layer_ahead_into_a_pool_of_two_layers(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    zero.shard(model, nvme_dir=str(tmp_path), offload_params="nvme")
    run = compiled(model, bucket_bytes=0)
    run(torch.randn(4, 256)).sum().backward()
    frame = policies_of(model)[0].frames[0]
    chunk = 256 * 256 * 4
    for phase, program in frame.programs.items():
        ops = [
            (i.op, i.index)
            for i in program.instrs
            if i.op in ("fetch", "wait_fetch", "gather", "compute") and hasattr(i, "index")
        ]
        order = [index for op, index in ops if op == "fetch"]
        # Backward needs no gradient of the input, and so not the first weight.
        assert order == list(range(8 if phase == "forward" else 7))
        for k in order[:-1]:
            # Asked for before the gather of the layer in front of it is needed, and there when it is its turn.
            assert (
                ops.index(("fetch", k + 1)) < ops.index(("wait_fetch", k + 1)) < ops.index(("gather", k + 1))
            )
            assert ops.index(("gather", k)) < ops.index(("fetch", k + 1))
        # One rank computes where the chunk was read to: a layer that computes, the one ahead, and the one that is read.
        assert program.host_bytes == 3 * chunk, phase
    report = zero.inspect(model)
    assert report.memory.files == 8 * chunk
    assert report.memory.host == 3 * chunk
    assert report.memory.parameters == 0
    assert "files" in str(report)


# Handles ---------------------------------------------------------------------------------------------------------


def test_shards_in_files_work_wherever_a_tensor_does(tmp_path):
    model = made(tmp_path, tiers=("nvme",) * 3)
    want = made(tmp_path)
    optimizer, plain = zero.optimizer(O.AdamW, model), O.AdamW(want.parameters())
    run, other = compiled(model), compiled(want)
    train(model, run, optimizer)
    train(want, other, plain)
    # Read after a direct write.
    assert torch.equal(model.inner.weight.full_tensor(), want.inner.weight.full_tensor())
    assert torch.equal(model.inner.weight.norm().full_tensor(), want.inner.weight.norm().full_tensor())
    # Direct read after a write through the mapping.
    for m in (model, want):
        with torch.no_grad():
            m.inner.weight.mul_(0.5)
            m.first.weight.data.add_(0.25)
        with zero.gathered(m, write=True):
            m.last.weight.fill_(0.125)
    x = torch.ones(2, 64)
    assert torch.equal(run(x), other(x))
    # Checkpoints.
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "state.pt")
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp")
    again = made(tmp_path, tiers=("nvme",) * 3)
    into = {"model": again.state_dict()}
    dcp.load(into, checkpoint_id=tmp_path / "dcp")
    again.load_state_dict(into["model"])
    assert_same(again, want)
    assert region_of(local(again.inner.weight)) is not None
    loaded = torch.load(tmp_path / "state.pt", weights_only=False)
    third = made(tmp_path, tiers=("nvme",) * 3)
    third.load_state_dict(loaded["model"])
    optimizer = zero.optimizer(O.AdamW, third)
    optimizer.load_state_dict(loaded["optimizer"])
    assert train(third, compiled(third), optimizer, begin=5) == train(want, other, plain, begin=5)
    # A copy has memory of its own.
    twin = copy.deepcopy(model)
    assert region_of(local(twin.inner.weight)) is None
    assert torch.equal(twin(x), model(x))


def test_parameters_of_one_part_alone(tmp_path):
    def build(tier):
        torch.manual_seed(0)
        model = Net()
        zero.shard(model.inner, nvme_dir=str(tmp_path), offload_params=tier, offload_grads=tier)
        return zero.shard(model)

    want, model = build("none"), build("nvme")
    losses = train(want, compiled(want), O.SGD(want.parameters(), lr=0.1))
    assert train(model, compiled(model), O.SGD(model.parameters(), lr=0.1)) == losses
    assert_same(model, want)
    assert region_of(local(model.inner.weight)) is not None
    assert region_of(local(model.first.weight)) is None


def test_param_dtype_needs_no_second_copy(tmp_path):
    want = made(tmp_path, param_dtype=torch.bfloat16)
    losses = train(want, compiled(want), O.AdamW(want.parameters()))
    model = made(tmp_path, tiers=("nvme",) * 3, param_dtype=torch.bfloat16)
    assert train(model, compiled(model), zero.optimizer(O.AdamW, model)) == losses
    assert_same(model, want)


# Refusals and faults ---------------------------------------------------------------------------------------------


def test_options_that_do_not_fit(tmp_path):
    with pytest.raises(ConfigError, match="needs stage=3, not 2"):
        made(tmp_path, tiers=("nvme", "none", "none"), stage=2)
    with pytest.raises(ConfigError, match='offload_grads="nvme" needs nvme_dir'):
        zero.shard(Net(), offload_grads="nvme")
    with pytest.raises(ConfigError, match='offload_activations="nvme" needs nvme_dir'):
        zero.shard(Net(), offload_activations="nvme")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 16 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made_ = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], capture_output=True
    )
    if made_.returncode:
        pytest.skip(f"needs the right to mount: {made_.stderr.decode().strip()}")
    yield folder
    gc.collect()
    subprocess.run(["umount", "-l", str(folder)], check=True)


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
def test_two_models_share_a_directory_and_no_file(small_disk):
    """A file system without O_DIRECT and two models in one directory."""
    models = [made(small_disk, tiers=("nvme",) * 3) for _ in range(2)]
    want = made(small_disk)
    losses = train(want, compiled(want), O.AdamW(want.parameters()))
    for model in models:
        assert train(model, compiled(model), zero.optimizer(O.AdamW, model)) == losses
        assert_same(model, want)


def test_a_directory_that_takes_no_file(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StorageError, match="takes no file .* Read-only file system; give a directory"):
        made(small_disk, tiers=("nvme", "none", "none"))


class _Broken:
    """Requests of a store fail from here on."""

    def __init__(self, monkeypatch, method):
        self.armed = False
        real = getattr(Store, method)

        def fake(store, span, buffer):
            if self.armed:
                raise StorageError(f"{method} of {span.label}: {os.strerror(errno.EIO)}", errno=errno.EIO)
            return real(store, span, buffer)

        monkeypatch.setattr(Store, method, fake)


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
    broken = _Broken(monkeypatch, method)
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
    broken = _Broken(monkeypatch, "read")
    broken.armed = True
    with pytest.raises(StorageError, match="read of first"):
        run(x)
    broken.armed = False
    assert torch.equal(run(x), want)
    assert policies_of(model)[0].nvme().engine.counters()["in_flight"] == 0


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


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
def test_no_leak_over_a_thousand_steps(overlap, tmp_path):
    """Without overlap gradients rest in files too; state_dicts and errors of the loop come between."""
    import psutil

    model = made(tmp_path, tiers=("nvme",) * 3, nvme_checksums=not overlap)
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


class _Few(nn.Module):
    """Of three ranks some have no row of a parameter, and of one nobody has."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 1)
        self.last = nn.Linear(1, 4)
        self.none = nn.Parameter(torch.empty(0, 3))
        self.two = nn.Parameter(torch.ones(2, 3))

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))).sum() + self.none.sum() + self.two.sum()


def _few(rank, world, folder):
    seen = []
    for tiers, overlap in itertools.product((("none",) * 3, ("nvme",) * 3), (False, True)):
        torch.manual_seed(0)
        fields = dict(zip(("offload_params", "offload_grads", "offload_optimizer"), tiers, strict=True))
        model = zero.shard(_Few(), nvme_dir=folder, **fields)
        run, optimizer = compiled(model), zero.optimizer(O.AdamW, model, overlap=overlap, max_grad_norm=0.5)
        losses = []
        for i in range(3):
            torch.manual_seed(10 * i + rank)
            loss = run(torch.randn(4, 16))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        seen.append((losses, [local(p).clone() for p in model.parameters()]))
    for losses, rows in seen[1:]:
        assert losses == seen[0][0]
        assert all(map(torch.equal, rows, seen[0][1]))


@pytest.mark.dist
@pytest.mark.slow
def test_ranks_without_rows(tmp_path):
    run_ranks(_few, 3, str(tmp_path))


_KILLED = """
import os, signal, sys, torch
import zero_compiler as zero
from torch import nn
from zero_compiler.runtime.stores import Store

folder, checkpoint, kill_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8))
tiers = dict.fromkeys(("offload_params", "offload_grads", "offload_optimizer"), "nvme")
zero.shard(model, nvme_dir=folder, **tiers)
optimizer = zero.optimizer(torch.optim.AdamW, model)
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
    loss.backward()
    if step == kill_at:
        write = Store.write
        def killed(self, span, buffer):
            write(self, span, buffer)
            os.kill(os.getpid(), signal.SIGKILL)
        Store.write = killed
    optimizer.step()
    optimizer.zero_grad()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
    torch.save(state, checkpoint + ".new")
    os.replace(checkpoint + ".new", checkpoint)
"""


def test_killed_in_a_step_and_started_again(tmp_path):
    files = tmp_path / "files"
    files.mkdir()

    def run(checkpoint, kill_at):
        command = [sys.executable, "-c", _KILLED, str(files), str(tmp_path / checkpoint), str(kill_at)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == (0 if kill_at < 0 else -9), done.stderr
        assert list(files.iterdir()) == []
        return done.stdout.splitlines()

    want = run("whole", -1)
    before = run("broken", 2)
    after = run("broken", -1)
    assert before == want[:3]
    assert after == want[2:]
