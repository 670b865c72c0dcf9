"""What a transport keeps for itself is in the plan, and as much when measured."""

from __future__ import annotations

import pytest
from dist.ranks.test_hosts import trained, two_hosts
from dist.spawn import run_ranks

import zero_compiler as zero
from zero_compiler.memory.transport_workspace import scratch_bytes
from zero_compiler.params.modules import sharded_models_of

pytestmark = [pytest.mark.dist, pytest.mark.alone]


def scratch(rank, world):
    two_hosts(rank, world)
    packed = {"second_shard": "host", "reduce_between_hosts_dtype": "int8"}
    for kind, fields in (("auto", {}), ("c10d", {}), ("auto", packed)):
        model, _, _ = trained(kind, rank, **fields)
        sharded_model = sharded_models_of(model)[0]
        programs = [p for frame in sharded_model.frames for p in frame.programs.values()]
        planned = max(scratch_bytes(p, [sharded_model])[sharded_model.key] for p in programs)
        found = sum(e.counters()["scratch_bytes"] for e in sharded_model.runtime.engines)
        assert 0 < found <= planned, (kind, found, planned)
        buffers = max(p.buffer_bytes for p in programs)
        assert zero.inspect(model).memory.arena == buffers + planned
    return True


def test_what_a_transport_keeps_is_in_the_plan():
    assert run_ranks(scratch, 4, timeout=120.0) == [True] * 4
