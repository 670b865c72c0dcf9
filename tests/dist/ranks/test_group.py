"""A process group ends where the user destroys it, while a model that was sharded over it lives on: no thread of a
backend is left, what is local goes on, and what would talk says why it cannot."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from dist.spawn import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zero_compiler as zero
from zero_compiler.errors import TransferError
from zero_compiler.params.modules import sharded_models_of
from zero_compiler.ranks import transport
from zero_compiler.ranks.group import release_destroyed
from zero_compiler.runtime import _C

pytestmark = pytest.mark.dist

SAID = (
    "the process group over which the model was sharded has been destroyed; call "
    "torch.distributed.destroy_process_group after the last use of the model"
)
WORLDS = {"eager": 2, "c10d": 2, "shared": 2, "hosts": 4, "hybrid": 4, "overlap": 2}


def threads():
    """Names of this process's threads that gloo made."""
    names = []
    for task in os.listdir("/proc/self/task"):
        # One that ends meanwhile is no thread any more.
        with (
            contextlib.suppress(FileNotFoundError, ProcessLookupError),
            open(f"/proc/self/task/{task}/comm") as f,
        ):
            names.append(f.read().strip())
    return sorted(n for n in names if "gloo" in n)


class Held:
    """A model that was trained, and what a user keeps of it."""

    def __init__(self, kind, rank, world):
        torch.manual_seed(0)
        fields = {"transport": kind if kind in ("c10d", "shared") else "auto"}
        if kind == "hosts":
            transport._host = lambda: f"host {rank * 2 // world}"
        if kind == "hybrid":
            fields["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
        self.model = zero.shard(net, device="cpu", **fields)
        self.call = self.model
        if kind != "eager":
            self.call = torch.compile(self.model, backend="zero", options={"compute": "aten"})
        if kind == "overlap":
            self.opt = zero.optimizer(torch.optim.AdamW, self.model, lr=0.1, overlap=True)
        else:
            self.opt = zero.optimizer(torch.optim.AdamW, self.model, lr=0.1, max_grad_norm=1.0)
        self.x = torch.ones(3, 8) + rank
        for _ in range(2):
            self.call(self.x).sum().backward()
            self.opt.step()
            self.opt.zero_grad()
        self.loss = self.call(self.x).sum()  # its backward is due
        self.plain = None if kind == "overlap" else torch.optim.SGD(self.model.parameters(), lr=0.1)

    def groups(self):
        """All process groups there are, besides those that only we know."""
        found = set(dist.distributed_c10d._world.pg_map)
        across = [
            p.storage.transport.hosts._across[0]
            for p in sharded_models_of(self.model)
            if p.storage.transport.hosts
        ]
        return [weakref.ref(pg) for pg in (*found, *across)]


def ends(rank, world, kind):
    held = Held(kind, rank, world)
    transports = {p.storage.transport.name for p in sharded_models_of(held.model)}
    refs = held.groups()
    gc.collect()
    alive, before = [r() is not None for r in refs], threads()
    dist.barrier()
    dist.destroy_process_group()
    release_destroyed()  # by torch's meshes, which hold their groups with and without us
    gc.collect()
    # The thread that looks after peers holds a group for as long as it looks at it, some milliseconds each second.
    end = time.monotonic() + 5.0
    while any(r() is not None for r in refs) and time.monotonic() < end:
        time.sleep(0.05)
    return transports, alive, [r() is not None for r in refs], before, threads()


@pytest.mark.parametrize("kind", WORLDS)
def test_a_destroyed_group_ends_though_its_model_lives(kind):
    names = {"c10d": "c10d", "hosts": "shared+c10d", "hybrid": "shared"}
    for transports, alive, left, before, after in run_ranks(ends, WORLDS[kind], kind, timeout=120.0):
        assert transports == {names.get(kind, "shared")}
        assert len(alive) >= {"hosts": 2, "hybrid": 3}.get(kind, 1)
        assert all(alive)
        assert before
        assert not any(left), left
        assert after == []


def talks(held):
    """All that needs another rank, by what it is."""
    bad = {
        "forward": lambda: held.call(held.x),
        "evaluation": lambda: torch.no_grad()(held.call)(held.x),
        "backward": held.loss.backward,
        "eager forward": lambda: held.model(held.x),
        "other frame": lambda: torch.compile(
            lambda y: held.model(y) * 2, backend="zero", options={"compute": "aten"}
        )(held.x),
        "whole weights": lambda: zero.gathered(held.model).__enter__(),
    }
    if held.plain is not None:  # one that clips
        bad["step"] = held.opt.step
    return bad


def local(held):
    """What needs none."""
    weight = held.model[0].weight
    for p in held.model.parameters():
        p.grad = torch.zeros_like(p)
    if held.plain is not None:
        held.plain.step()
        held.plain.zero_grad()
    assert weight.to_local().shape == weight._local_tensor.shape
    state = {name: p.to_local() for name, p in held.model.state_dict().items()}
    assert len(state) == 4
    held.opt.state_dict()
    str(zero.inspect(held.model))
    pickle.dumps(held.model)
    torch.save(held.model.state_dict(), io.BytesIO())
    copied = copy.deepcopy(held.model)
    assert torch.equal(copied[0].weight.to_local(), weight.to_local())


def refused(rank, world, kind, kept, again):
    held = Held(kind, rank, world)
    keeps = list(dist.distributed_c10d._world.pg_map) if kept else []  # the user has it
    dist.barrier()
    dist.destroy_process_group()
    if not kept:
        release_destroyed()
    if again:  # another group, of the same name, is not taken for the one that is gone
        store = dist.FileStore(again, world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    found = {}
    for what, run in talks(held).items():
        try:
            run()
            found[what] = "nothing"
        except Exception as error:
            found[what] = f"{type(error).__name__}: {error}"
    local(held)
    runtime = sharded_models_of(held.model)[0].runtime
    if runtime is not None:
        runtime.close()
    if again:  # and the new one serves a new model
        new = Held("eager", rank, world)
        new.call(new.x).sum().backward()
        dist.barrier()
    del held, runtime, keeps
    gc.collect()
    return found


@pytest.mark.parametrize(
    ("kind", "kept", "again"),
    [
        *((kind, False, False) for kind in WORLDS),
        ("eager", True, True),
        ("c10d", False, True),
        ("shared", True, False),
    ],
)
def test_what_talks_after_that_says_why_it_cannot(kind, kept, again, tmp_path):
    """``kept``: the user holds the group; ``again``: and makes another one."""
    store = str(tmp_path / "store") if again else None
    for found in run_ranks(refused, WORLDS[kind], kind, kept, store, timeout=120.0):
        for what, said in found.items():
            assert said.startswith(f"TransferError: {SAID}"), (what, said)


def one_rank(rank, world):
    held = Held("c10d", rank, world)
    dist.destroy_process_group()
    held.loss.backward()
    held.call(held.x).sum().backward()
    held.plain.step()
    held.model(held.x).sum().backward()
    torch.compile(lambda y: held.model(y) * 2, backend="zero", options={"compute": "aten"})(held.x)
    with zero.gathered(held.model):
        pass
    with pytest.raises(TransferError, match=SAID):
        held.opt.step()  # it clips, by a norm that torch takes over the mesh
    local(held)
    return True


def test_one_rank_needs_no_group():
    assert run_ranks(one_rank, 1, timeout=120.0) == [True]


def plain(rank, world):
    torch.manual_seed(0)
    call = torch.compile(nn.Linear(4, 4), backend="zero", options={"compute": "aten"})
    call(torch.ones(2, 4)).sum().backward()
    loss = call(torch.ones(2, 4)).sum()
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(TransferError, match="not sharded were averaged has been destroyed"):
        loss.backward()
    return True


def test_a_plain_model_does_not_train_alone_unsaid():
    assert run_ranks(plain, 2, timeout=120.0) == [True] * 2


EXIT = """
import atexit, os, time
def left():
    names = [open(f"/proc/self/task/{t}/comm").read().strip() for t in os.listdir("/proc/self/task")]
    return [n for n in names if "gloo" in n]
atexit.register(lambda: print("left", left()))  # the last to run
import torch, torch.distributed as dist
import zero_compiler as zero
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
end = time.monotonic() + 30
while not left() and time.monotonic() < end:  # a thread gives itself its name
    time.sleep(0.01)
print("left", left())
model = zero.shard(torch.nn.Linear(4, 4), device="cpu")
call = torch.compile(model, backend="zero", options={"compute": "aten"})
call(torch.ones(2, 4)).sum().backward()
"""


@pytest.mark.parametrize("before", ["", "import gc; gc.freeze()\n"], ids=["", "frozen"])
def test_no_thread_of_a_destroyed_group_meets_the_end_of_the_interpreter(before):
    body = f"{EXIT}{before}dist.destroy_process_group()"
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.splitlines()
    assert "gloo" in before
    assert after == "left []"
    assert "Traceback" not in done.stderr


def engine(rank, world):
    engine = _C.Engine(dist.group.WORLD, rank, world)
    gather = engine.add_gather(
        engine.add_arena(64, torch.device("cpu")), torch.float32, "w", [(4, [8], 0)], staging_offset=-1
    )
    engine.gather_start(gather, [torch.full((4,), float(rank))])
    assert engine.gather_wait(gather)[0].tolist() == [0.0] * 4 + [1.0] * 4
    engine.release(gather)
    ended = weakref.ref(dist.group.WORLD)
    dist.barrier()
    dist.destroy_process_group()
    assert ended() is None
    assert threads() == []
    with pytest.raises(TransferError, match=rf"gather 'w' failed on rank {rank} of 2 \(gloo\): {SAID}"):
        engine.gather_start(gather, [torch.ones(4)])
    engine.close()
    return True


def test_an_engine_says_so_itself():
    assert run_ranks(engine, 2, timeout=60.0) == [True] * 2
