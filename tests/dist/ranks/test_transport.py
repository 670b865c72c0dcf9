"""When ranks of one host share memory: the choice is made together, and shown."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from dist.sharing import batch, loss_of, make
from dist.spawn import run_ranks
from torch import nn

import zero_compiler as zero
from zero_compiler.cost import hardware
from zero_compiler.errors import ConfigError, ShardError
from zero_compiler.params.modules import sharded_models_of
from zero_compiler.ranks import transport

pytestmark = [pytest.mark.dist, pytest.mark.alone]


def chosen(rank, world):
    model, compiled = make("auto")
    report = json.loads(json.dumps(zero.inspect(model).to_dict()))
    names = {report["transport"]}
    assert "CPU ranks of one host" in str(zero.inspect(model)), str(zero.inspect(model))

    # One rank cannot: all take c10d, and say whose fault it is.
    honest = transport._host
    if rank == 1:
        transport._host = lambda: "another"
    model, compiled = make("auto")
    found = sharded_models_of(model)[0].storage.transport
    assert found.name == "c10d"
    assert "each of 2 hosts has one rank" in found.reason, found.reason
    loss_of(compiled, batch(rank, 0)).backward()
    with pytest.raises(ShardError, match='transport="shared" is not possible: rank 0: each of 2 hosts'):
        make("shared")
    transport._host = honest
    # Nor is there room.
    transport._available_bytes = lambda: 10
    model, _ = make("auto")
    assert "bytes of shared memory" in sharded_models_of(model)[0].storage.transport.reason
    # Or it is gone when a parameter is to move there.
    transport._available_bytes = lambda: None

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    os.posix_fallocate = refuse
    with pytest.raises(
        ShardError, match=r"embed.weight: \d+ bytes of shared memory could not be had \(No space"
    ):
        make("auto")
    return names


def unwatched(rank, world):
    """As in a sandbox that forbids it, which one rank runs in."""
    said = []
    transport.log.addFilter(lambda record: said.append(record.getMessage()))
    if rank == 1:
        transport._PIDFD_OPEN = -1  # no kernel has it
    for _ in range(2):
        model, compiled = make("auto")
        found = sharded_models_of(model)[0].storage.transport
        assert found.name == "c10d"
        assert "rank 1: processes cannot be watched here (pidfd_open: " in found.reason, found.reason
        loss_of(compiled, batch(rank, 0)).backward()
    with pytest.raises(ShardError, match='transport="shared" is not possible: rank 1: processes cannot be'):
        make("shared")
    return said


def test_where_processes_cannot_be_watched_ranks_share_nothing_and_say_so_once():
    first, second = run_ranks(unwatched, 2, timeout=60.0)
    assert len(first) == 1
    assert "share no memory, and use the process group: rank 1: processes cannot be watched" in first[0]
    assert second == []


def test_the_choice_is_made_together_and_shown():
    assert run_ranks(chosen, 2, timeout=60.0) == [{"shared"}] * 2


def planned_for_a_gpu_machine(rank, world):
    """What describes no shared memory gives no plan for it: the process group it is, or an error before a parameter moves."""
    spec, file = json.loads(hardware.load("laptop").to_json()), Path(tempfile.mkdtemp()) / "mine.json"
    spec["collectives"] = [
        c for c in spec["collectives"] if (c["transport"], c["kind"]) != ("shared", "all_reduce")
    ]
    file.write_text(json.dumps(spec))
    for given, name in (("dgx-h100", "dgx-h100"), (str(file), "laptop")):
        torch.manual_seed(0)
        model = zero.shard(nn.Linear(8, 8), hardware=given)
        loss = torch.compile(model, backend="zero", options={"compute": "aten"})(torch.ones(4, 8)).sum()
        loss.backward()
        found = sharded_models_of(model)[0].storage.transport
        assert found.name == "c10d"
        assert f"hardware spec '{name}' says nothing of its speed" in found.reason
        plain = nn.Linear(8, 8)
        with pytest.raises(
            ShardError, match=f"\"shared\" is not possible: .*'{name}' says nothing of its speed; use"
        ):
            zero.shard(plain, hardware=given, transport="shared")
        assert type(plain.weight) is nn.Parameter
    return True


def test_a_machine_of_which_no_shared_memory_is_known_takes_the_process_group():
    assert run_ranks(planned_for_a_gpu_machine, 2, timeout=60.0) == [True] * 2


def test_a_wrong_name_is_refused():
    with pytest.raises(ConfigError, match="transport must be one of"):
        zero.Config(transport="tcp")
