"""Ranks of several hosts: memory inside each, c10d between them; equal to c10d alone, right in any timing.

The hosts are two halves of this machine's ranks, told apart by what a rank says of its host.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from dist.spawn import run_ranks
from machines import machine
from models import Uneven
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zero_compiler as zero
from zero_compiler.cost.hardware import HardwareSpec
from zero_compiler.cost.placed_hardware import Spread
from zero_compiler.errors import ShardError, TransferError
from zero_compiler.params.modules import sharded_models_of
from zero_compiler.ranks import transport

pytestmark = [pytest.mark.dist, pytest.mark.alone]


def make(kind, stage=3, **fields):
    torch.manual_seed(0)
    model = zero.shard(Uneven(), stage=stage, transport=kind, device="cpu", **fields)
    return model, torch.compile(model, backend="zero", options={"compute": "aten"})


def loss_of(compiled, rank, step):
    ids = torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(7 * step + rank))
    return nn.functional.cross_entropy(compiled(ids).float().flatten(0, 1), ids.flatten())


def two_hosts(rank, world):
    transport._host = lambda: f"host {rank * 2 // world}"


def trained(kind, rank, late=None, **fields):
    model, compiled = make(kind, **fields)
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(4):
        if late == rank:
            time.sleep(0.1)
        loss = loss_of(compiled, rank, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()  # writes to what lies at rest, while a peer may be late
        opt.zero_grad()
        with torch.no_grad():
            losses.append((loss.item(), loss_of(compiled, rank, step).item()))
    return model, losses, [p._local_tensor.detach().clone() for p in model.parameters()]


WAYS = {4: ({"stage": 3}, {"stage": 1, "param_dtype": torch.bfloat16}), 6: ({"stage": 2},)}


def same_as_c10d(rank, world):
    two_hosts(rank, world)
    for fields in WAYS[world]:
        _, losses, rows = trained("c10d", rank, **fields)
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if "param_dtype" in fields else {"rtol": 1e-6, "atol": 1e-6}
        found = None
        for late in (0, world - 1):
            model, mine, own = trained("auto", rank, late=late, **fields)
            used = sharded_models_of(model)[0].storage.transport
            assert used.name == "shared+c10d", used
            assert f"2 hosts with {world // 2} CPU ranks each" in str(zero.inspect(model))
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(losses), **tolerance)
            for a, b in zip(own, rows, strict=True):
                torch.testing.assert_close(a, b, **tolerance)
            # The order of sums is fixed: whoever is late, the bits are the same.
            if found is not None:
                assert all(torch.equal(a, b) for a, b in zip(own, found, strict=True))
            found = own
    return json.loads(json.dumps(zero.inspect(model).to_dict()))["transport"]


@pytest.mark.parametrize("world", WAYS)
def test_two_hosts_train_as_over_c10d(world):
    assert run_ranks(same_as_c10d, world, timeout=240.0) == ["shared+c10d"] * world


def irregular(rank, world):
    for hosts, why in (("aaab", "ranks 0, 1, 2; 3"), ("abab", "ranks 0, 2; 1, 3"), ("abcd", "one rank")):
        transport._host = lambda hosts=hosts: hosts[rank]
        model, compiled = make("auto")
        found = sharded_models_of(model)[0].storage.transport
        assert (found.name, why in found.reason) == ("c10d", True), found
        loss_of(compiled, rank, 0).backward()
    with pytest.raises(ShardError, match='transport="shared" is not possible: rank 0: each of 4 hosts'):
        make("shared")
    return True


def test_hosts_that_are_not_alike_use_c10d():
    assert run_ranks(irregular, 4, timeout=120.0) == [True] * 4


def killed(rank, world, kind="shared", **fields):
    two_hosts(rank, world)
    _model, compiled = make(kind, **fields)
    loss_of(compiled, rank, 0).backward()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(TransferError):
        for step in range(3):
            loss_of(compiled, rank, step).backward()
    return True


def test_a_killed_rank_ends_the_ranks_of_both_hosts():
    began = time.monotonic()
    results = run_ranks(killed, 4, timeout=90.0, group_timeout=15.0, may_die={3})
    assert time.monotonic() - began < 80.0
    assert results[:3] == [True] * 3


def gives_up(rank, world):
    """Rank 3 breaks off between two calls, so the next one ends there; of its host's ranks only rank 2 waits for it."""
    two_hosts(rank, world)
    model, compiled = make("shared")
    loss_of(compiled, rank, 0).backward()
    dist.barrier()
    if rank == 3:
        sharded_models_of(model)[0].runtime.engine.abandon("Stop: no more")
    began = time.monotonic()
    with pytest.raises(TransferError) as error:
        loss_of(compiled, rank, 1).backward()
    return str(error.value), time.monotonic() - began


def test_a_rank_that_breaks_off_tells_its_host_why():
    found = run_ranks(gives_up, 4, timeout=90.0, group_timeout=12.0)
    for text, seconds in found[2:]:
        assert "Stop: no more" in text
        assert seconds < 8.0, text


def dropped(rank, world):
    two_hosts(rank, world)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        model, compiled = make("shared")
        loss_of(compiled, rank, 0).backward()
        del model, compiled
        torch._dynamo.reset()
    gc.collect()
    dist.barrier()
    assert len(os.listdir("/proc/self/fd")) <= before + 8
    return True


def test_models_that_are_dropped_leave_no_file_open():
    assert run_ranks(dropped, 4, timeout=120.0) == [True] * 4


def timed_by_level(rank, world, file):
    """What each kind of model takes for its hosts, on a machine of which the file says what is between them."""
    two_hosts(rank, world)
    found = {}
    for name, kind, mesh in (("all", "auto", None), ("c10d", "c10d", None), ("hybrid", "auto", (2, 2))):
        mesh = mesh and init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
        model, compiled = make(kind, hardware=file, mesh=mesh)
        (sharded_model,) = sharded_models_of(model)
        lines = str(zero.inspect(model)).splitlines()
        said = next((line for line in lines if line.startswith("hosts: ")), None)
        found[name] = said, sharded_model.hardware.spreads, sharded_model.hardware.once
        copied = sharded_models_of(copy.deepcopy(model))[0]
        assert (copied.hardware.spreads, copied.hardware.once) == (sharded_model.hardware.spreads, False)
        loss_of(compiled, rank, 0).backward()  # what it takes for them, all ranks take
    transport._host = _no_host if rank == 1 else transport._host
    model, _ = make("c10d", hardware=file)
    assert type(sharded_models_of(model)[0].hardware) is HardwareSpec
    return found


def _no_host():
    raise OSError("no /proc")


def test_transfers_are_timed_for_the_hosts_on_which_the_ranks_are(tmp_path):
    between = {"latency_us": 50.0, "bytes_per_us": 100.0, "host_bytes_per_us": 100.0, "ring": False}
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(machine(devices_per_host=8, between_hosts=between)))
    first, *others = run_ranks(timed_by_level, 4, str(file), timeout=120.0)
    assert all(found == first for found in others)
    over = "hosts: 2 for 4 ranks; every parameter is partitioned over {} of them"
    assert first == {
        "all": (over.format(2), {"shard": Spread(4, 2, 2)}, True),
        "c10d": (over.format(2), {"shard": Spread(4, 2, 2)}, False),
        "hybrid": (over.format(1), {"shard": Spread(2, 1, 2), "replicate": Spread(2, 2, 2)}, False),
    }
