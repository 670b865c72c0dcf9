"""Long runs stay flat, and what a model held goes with it."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref

import pytest
import torch
from dist.spawn import run_ranks
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import TransferError

pytestmark = pytest.mark.dist

STEPS = 300
PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * PAGE


def state():
    """Threads and descriptors, once what looks after calls is gone: a call starts that anew."""
    deadline = time.monotonic() + 10.0
    while any(t.name == "zero-watch" for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def make(stage, width=64):
    torch.manual_seed(0)
    model = zero.shard(
        nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)), stage=stage
    )
    return model, torch.compile(model, backend="zero", options={"compute": "aten"})


def long_run(rank, world, stage):
    model, call = make(stage)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(4, 64)
    allocations, seen, resident = [], [], []
    for step in range(STEPS):
        if step % 5 == 3:
            with zero.no_sync(model):
                call(x).square().mean().backward()
        call(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
        if step % 10 == 9:
            with torch.no_grad():
                call(x)
        counters = model._zero.sharded_model.runtime.engine.counters()
        # Gradients' storages are given back where that lowers the peak, and made again: all others are blocks of arenas.
        gradients = len(opt.param_groups[0]["params"]) * (step + 1) - counters["recycled"] if world > 1 else 0
        allocations.append(counters["allocations"] - gradients)
        if step in (STEPS // 3, STEPS - 1):
            gc.collect()
            seen.append(state())
            resident.append(resident_bytes())
    # The first evaluation (step 9) may need its own place in the arena.
    return allocations[1], allocations[8], allocations[12], allocations[-1], seen, resident[1] - resident[0]


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 3), (2, 1)])
def test_a_long_run_stays_flat(world, stage):
    for second, eighth, evaluated, last, seen, growth in run_ranks(
        long_run, world, stage, timeout=200, group=world > 1
    ):
        assert eighth == second  # nothing after the first two steps of training
        assert last == evaluated
        (threads, descriptors), (threads_then, descriptors_then) = seen
        assert threads_then <= threads  # one of torch's may have ended
        assert descriptors_then == descriptors
        # 200 steps: a leak of one weight a step (16 KiB) would be 3.2 MB.
        assert growth < 1 << 20


def deleted(rank, world):
    closed = []
    refs = {}
    for stage in (3, 1, 3):
        model, call = make(stage)
        call(torch.ones(2, 64)).sum().backward()
        with torch.no_grad():
            call(torch.ones(2, 64))
        sharded_model = model._zero.sharded_model
        runtime = sharded_model.runtime
        weight = model[0].weight
        refs = {
            "model": weakref.ref(model),
            "child": weakref.ref(model[0]),
            "sharded_model": weakref.ref(sharded_model),
            "weight": weakref.ref(weight),
            "shard": weakref.ref(weight._local_tensor),
            "gradient": weakref.ref(weight.grad),
            "plan": weakref.ref(sharded_model.frames[0]),
        }
        engine = runtime.engine
        assert world == 1 or engine.counters()["arena_bytes"] + engine.counters()["shared_bytes"] > 0
        del model, call, sharded_model, runtime, weight
        gc.collect()
        assert [k for k, r in refs.items() if r() is not None and k != "plan"] == []
        try:
            engine.grow_arena(0, 1)
        except TransferError as error:  # closed: it holds no arena any more
            closed.append(str(error))
    torch._dynamo.reset()
    gc.collect()
    assert refs["plan"]() is None  # Dynamo keeps the frames of a class until then, as with any backend
    return closed


@pytest.mark.parametrize("world", [1, 2])
def test_a_deleted_model_frees_its_shards_and_arenas(world):
    for closed in run_ranks(deleted, world, timeout=200, group=world > 1):
        assert len(closed) == 3
        assert all("closed" in text for text in closed)


def two_at_once(rank, world):
    """The second model goes on when the first one is deleted; a loss outlives its model."""
    first, first_call = make(3)
    second, second_call = make(2)
    x = torch.ones(2, 64)
    for call in (first_call, second_call):
        call(x).sum().backward()
    loss = first_call(x).sum()
    want = second[0].weight.grad.full_tensor().clone()
    gone = weakref.ref(first[0].weight)
    del first, first_call, call
    gc.collect()
    loss.backward()  # the graph keeps what it needs
    del loss
    gc.collect()
    assert gone() is None
    second.zero_grad()
    second_call(x).sum().backward()
    torch.testing.assert_close(second[0].weight.grad.full_tensor(), want)
    return True


@pytest.mark.parametrize("world", [1, 2])
def test_two_models_at_once(world):
    assert all(run_ranks(two_at_once, world, timeout=200, group=world > 1))
