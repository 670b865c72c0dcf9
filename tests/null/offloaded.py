"""A net whose activations wait in files or on the host: its plans, and its training."""

from __future__ import annotations

import functools
import gc
import json
import weakref

import pytest
import torch
import torch.nn.functional as F
from machines import machine
from null import blocks
from null.graphs import Build, aten, find, lower, two_products
from torch import nn

import zero_compiler as zero
from zero_compiler.cost.hardware import HardwareSpec
from zero_compiler.errors import MemoryBudgetError
from zero_compiler.ir import facts
from zero_compiler.ir.instructions import Compute
from zero_compiler.passes import OffloadActivations, run_split
from zero_compiler.tools.planning import report

FAST = {"latency_us": 1e-6, "bytes_per_us": 1e9}
SLOW = {"latency_us": 1e-6, "bytes_per_us": 1.0}
ROWS = 256


class Block(blocks.Block):
    """Its MLP mixes tokens, so that none is done in tiles of them, however small the budget."""

    def forward(self, x):
        up = self.up(self.norm(x))
        return x + F.dropout(self.down(F.gelu(up - up.mean(0))), self.drop, self.drop > 0)


class Net(blocks.Net):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__(drop, block=Block)


def x() -> tuple[torch.Tensor]:
    return blocks.x(ROWS)


@functools.cache
def least() -> int:
    """Fewest bytes that backward can hold where nothing waits elsewhere."""
    with pytest.raises(MemoryBudgetError) as caught:
        planned({}, activation_budget_bytes=1)
    return caught.value.least_bytes


def fields_in(folder):
    """What gives placement fields: activations in files, on a machine with such a disk and such a way to its host."""

    def write(disk=FAST, link=FAST, **fields):
        path = folder / f"machine{len(list(folder.iterdir()))}.json"
        path.write_text(json.dumps(machine(nvme_read=disk, nvme_write=disk, host_device=link)))
        return {"hardware": str(path), "nvme_dir": str(folder), "offload_activations": "nvme"} | fields

    return write


def planned(fields, model: nn.Module | None = None, **more):
    torch._dynamo.reset()
    return report(model or Net(), x(), 2, **fields, **more)


def waits(told):
    return told.frames[0].offloaded


def placed(tiers: tuple[str, ...]) -> tuple[Build, Build]:
    """``two_products`` with what the tanh gives behind ``tiers``, and its transfers placed."""
    forward, backward = two_products()
    spec = HardwareSpec.from_dict(machine(nvme_read=FAST, nvme_write=FAST, host_device=FAST))
    context = forward.context("joint", machine=spec)
    facts.send_away(find(forward, aten.tanh.default))
    run_split(OffloadActivations((), frozenset(), tiers, 0), forward.graph, backward.graph, 1, context)
    lower(forward, "forward", "place-offloads", machine=context.machine)
    lower(backward, "backward", "place-offloads", machine=context.machine)
    return forward, backward


def at_of(program):
    """Where each transfer of a Program stands, by kind and number."""
    return {(type(i), i.index): k for k, i in enumerate(program.instrs) if not isinstance(i, Compute)}


def trained(drop: float = 0.0, steps: int = 3, calls: int = 1, compute: str = "aten", **fields):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = zero.shard(Net(drop), **fields)
    step = torch.compile(model, backend="zero", options={"compute": compute})
    optimizer = zero.optimizer(torch.optim.SGD, model, lr=0.5)
    out = []
    for _ in range(steps):
        losses = [step(*x()) for _ in range(calls)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out += [loss.detach() for loss in losses]
    return out, model


def gone_with_its_model(places, **fields):
    """What ``places`` gives of a runtime does not outlive the model, although Dynamo keeps its Programs."""
    torch._dynamo.reset()
    model = zero.shard(Net(), **fields)
    step = torch.compile(model, backend="zero", options={"compute": "aten"})
    step(*x()).backward()
    runtime = model._zero.sharded_model.runtime
    held = [weakref.ref(t) for t in places(runtime)]
    assert held
    del model, step, runtime
    gc.collect()
    return [ref() for ref in held if ref() is not None] == []


LOOP = """
import sys, torch
sys.path.insert(0, {tests!r})
import functools
import zero_compiler as zero
from null.offloaded import Net, x
from zero_compiler.errors import StorageError
from zero_compiler.storage import aio, stores
stores.Engine = functools.partial(aio.Engine, backend="threads", block_bytes=16384)
torch.manual_seed(0)
model = zero.shard(Net(), **{fields!r})
step = torch.compile(model, backend="zero", options=dict(compute="aten"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
engine = model._zero.sharded_model.storage.nvme().engine
try:
    for _ in range(4):
        loss = step(*x())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item(), flush=True)
    print("short", engine.counters()["short_transfers"] > 10)
except StorageError as error:
    print(error.errno, error)
print("in flight", engine.counters()["in_flight"])
"""
