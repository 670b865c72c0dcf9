"""A process group ends where the user destroys it, while a model that was sharded over it lives on: no thread of a
backend is left, what is local goes on, and what would talk says why it cannot."""

from __future__ import annotations

import copy
import gc
import io
import json
import os
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from dist.spawn import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zero_compiler as zero
from zero_compiler import transport
from zero_compiler.errors import TransferError
from zero_compiler.group import release_destroyed
from zero_compiler.modules import policies_of

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
        with open(f"/proc/self/task/{task}/comm") as f:
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
        across = [p.transport.hosts._across[0] for p in policies_of(self.model) if p.transport.hosts]
        return [weakref.ref(pg) for pg in (*found, *across)]


def ends(rank, world, kind):
    held = Held(kind, rank, world)
    transports = {p.transport.name for p in policies_of(held.model)}
    refs = held.groups()
    gc.collect()
    alive, before = [r() is not None for r in refs], threads()
    dist.barrier()
    dist.destroy_process_group()
    release_destroyed()  # by torch's meshes, which hold their groups with and without us
    gc.collect()
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
