"""What a plan for several hosts says that second shards and packed sums cost and save."""

from __future__ import annotations

import json

import pytest
import torch
from machines import machine
from torch import nn

from zero_compiler.errors import ShardError
from zero_compiler.tools.planning import report

BETWEEN = {"latency_us": 50.0, "bytes_per_us": 100.0, "host_bytes_per_us": 100.0, "ring": False}


def planned(tmp_path, world=4, between=BETWEEN, **fields):
    """Three layers on ranks of which two are on a host."""
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(machine(devices_per_host=2, between_hosts=between)))
    torch._dynamo.reset()
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    fields = {"hardware": str(file), "compute": "aten", "bucket_bytes": 0} | fields
    return report(model, (torch.ones(8, 64),), world, **fields)


def gathers(made, phase):
    (frame,) = made.frames
    return {name: g for g in frame.programs[phase].gathers for name in g.names}


@pytest.mark.parametrize("transport", ["c10d", "shared"])
def test_second_shards_cost_memory_and_save_the_way_between_hosts(tmp_path, transport):
    made, plain = (planned(tmp_path, transport=transport, second_shard=s) for s in ("host", None))
    # Backward needs no gradient of the batch, and so not the first weight; of two of 64 rows a rank keeps half.
    assert {name for name, g in gathers(made, "backward").items() if g.from_second} == {
        "1.weight",
        "2.weight",
    }
    assert {name for name, g in gathers(made, "forward").items() if g.parts} == {"1.weight", "2.weight"}
    part = 32 * 64 * 4
    assert made.memory.kept - plain.memory.kept == 2 * part
    text = str(made)
    assert f"2 of 6 weights have second shards on the 2 ranks of each host: {2 * part:,} bytes a rank" in text
    assert f"in backward {2 * part:,} bytes of them come to a rank, all from its own host, in " in text
    now, instead = made.frames[0].within_host_us
    assert 0 < now < instead
    assert made.step_us < plain.step_us


@pytest.mark.parametrize("what", [{"world": 2}, {"world": 1}, {"memory_budget_bytes": 1 << 30}], ids=str)
def test_on_one_host_or_where_weights_stay_nothing_changes(tmp_path, what):
    made, plain = (planned(tmp_path, second_shard=s, **what) for s in ("host", None))
    assert not any(
        g.from_second or g.parts for phase in ("forward", "backward") for g in gathers(made, phase).values()
    )
    assert made.memory == plain.memory
    assert "no weight has a second shard" in str(made)


def test_sums_of_gradients_go_between_hosts_in_blocks(tmp_path):
    made, plain = (
        planned(tmp_path, transport="shared", reduce_between_hosts_dtype=d) for d in ("int8", None)
    )
    # Of a rank's chunk: 16 rows of 64 are four blocks of 256, and 16 numbers of a bias one.
    sent, whole = 3 * (16 * 64 + 4 * 4) + 3 * (16 + 4), 3 * (16 * 64 + 16) * 4
    row = f"sums of gradients go between 2 hosts in int8: {sent:,} bytes from a rank instead of {whole:,}"
    assert row in str(made)
    assert "reduce-scatter as int8 between hosts 1.weight" in str(made)
    assert made.step_us < plain.step_us
    assert made.memory.arena > plain.memory.arena  # buffers of packing
    assert "no gradient goes between hosts in int8" in str(
        planned(tmp_path, 2, reduce_between_hosts_dtype="int8")
    )


def test_ranks_that_share_no_memory_do_not_send_sums_in_blocks(tmp_path):
    with pytest.raises(ShardError) as error:
        planned(tmp_path, transport="c10d", reduce_between_hosts_dtype="int8")
    assert str(error.value) == (
        'reduce_between_hosts_dtype="int8" needs CPU ranks that share memory within each host, and these use c10d '
        '(asked for); leave it out; to plan for ranks that do, give transport="shared"'
    )
