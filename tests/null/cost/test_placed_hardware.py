"""What collectives take over several hosts, by hand: bytes of each level, steps of each level, ranks that share a link."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
import torch
from machines import machine
from torch import nn

from zero_compiler.cost import hardware
from zero_compiler.cost.hardware import KINDS, HardwareSpec, HostLink
from zero_compiler.cost.placed_hardware import PlacedHardware, Spread, over_c10d, placed
from zero_compiler.errors import ConfigError, ShardError
from zero_compiler.ranks.group import Group
from zero_compiler.ranks.mesh import REPLICATE, SHARD, bare_mesh
from zero_compiler.tools.planning import planned_group, report

# Of one device 200 bytes a microsecond, of a host with 4 of them 400; 1,000 within a host.
HOSTS = {"latency_us": 50.0, "bytes_per_us": 200.0, "host_bytes_per_us": 400.0}


def spec_of(ring: bool = True, **fields) -> HardwareSpec:
    rows = [
        {
            "kind": kind,
            "transport": "c10d",
            "world": 4,
            # Of a link 1,000: a ring of 4 moves 3/4 of the bytes over each, an all-reduce twice as many.
            "link": {"latency_us": 6.0, "bytes_per_us": 1000 * (2 / 3 if kind == "all_reduce" else 4 / 3)},
        }
        for kind in KINDS
    ]
    told = {"devices_per_host": 4, "between_hosts": HOSTS | {"ring": ring}, "memory_bytes_per_us": 10_000.0}
    return HardwareSpec.from_dict(machine(collectives=rows, **told | fields))


def on_hosts(world: int, ring: bool = True, once: bool = False, copies: int = 1) -> HardwareSpec:
    return placed(spec_of(ring), planned_group(world, copies=copies), None, once)


def test_ranks_of_one_host_take_what_they_took():
    spec = spec_of()
    for kind in KINDS:
        for world in (2, 3, 4):
            assert on_hosts(world).collective(kind, world) == spec.collective(kind, world)
    assert placed(spec, planned_group(1), None) is spec


def test_a_ring_takes_the_time_of_the_slower_level_and_the_latency_of_each_step():
    """8 ranks on 2 hosts: 7/8 of the bytes leave each host at 400; of 7 steps one is between hosts."""
    link = on_hosts(8).collective("all_gather", 8)
    assert 1 / link.bytes_per_us == pytest.approx(7 / 8 / 400)
    assert link.latency_us == pytest.approx(50 + 6 * 2)  # 2 us a step inside
    both = on_hosts(8).collective("all_reduce", 8)
    assert 1 / both.bytes_per_us == pytest.approx(2 * 7 / 8 / 400)
    assert both.latency_us == pytest.approx(2 * 50 + 6 * 2)
    # Hosts that are connected faster than their devices: then these are what it takes.
    fast = dataclasses.replace(spec_of(), between_hosts=HostLink(50.0, 5000.0, 20_000.0))
    link = placed(fast, planned_group(8), None).collective("all_gather", 8)
    assert link.bytes_per_us == pytest.approx(fast.collective("all_gather", 8).bytes_per_us)


def test_one_rank_a_host_has_the_link_of_one_device():
    lone = dataclasses.replace(spec_of(), devices_per_host=1, collectives=())
    spec = placed(lone, planned_group(3), None)
    link = spec.collective("all_gather", 3)
    assert 1 / link.bytes_per_us == pytest.approx(2 / 3 / 200)
    assert link.latency_us == pytest.approx(2 * 50)
    assert spec.covers("c10d")
    assert not spec.covers("shared")
    assert not lone.covers("c10d")


def test_ranks_that_send_to_each_other_themselves_send_to_every_rank_of_other_hosts():
    """Each of 8 ranks has a chunk for 4 of them on the other host, and a quarter of the host's 400 for that."""
    for kind in ("all_gather", "reduce_scatter"):
        link = on_hosts(8, ring=False).collective(kind, 8)
        assert 1 / link.bytes_per_us == pytest.approx(4 / 8 / 100)
        assert link.latency_us == 50  # all at once
    # gloo's own all-reduce is a ring.
    assert on_hosts(8, ring=False).collective("all_reduce", 8) == on_hosts(8).collective("all_reduce", 8)


def test_every_byte_crosses_once_where_ranks_of_a_host_share_memory():
    spec = on_hosts(8, ring=False, once=True)
    gather, reduce = spec.collective("all_gather", 8), spec.collective("reduce_scatter", 8)
    assert 1 / gather.bytes_per_us == pytest.approx(1 / 8 / 100 + 2 / 10_000)
    assert 1 / reduce.bytes_per_us == pytest.approx(1 / 8 / 100 + 3.25 / 10_000)
    assert gather.latency_us == reduce.latency_us == 50
    # Each of the 4 places reduces the whole: a ring of 2 hosts sends all of it, in two halves.
    both = spec.collective("all_reduce", 8)
    assert 1 / both.bytes_per_us == pytest.approx(2 * (1 / 2) / 100 + 9 / 10_000)
    assert both.latency_us == 100
    # A copy of the model has memory of its own.
    assert over_c10d(spec).collective("all_gather", 8) == on_hosts(8, ring=False).collective("all_gather", 8)
    assert over_c10d(hardware.load("laptop")) == hardware.load("laptop")


def test_replicas_on_other_hosts_share_what_the_host_is_connected_by():
    """Each of the 4 ranks of a host has its copy on another host: 4 sums at a time over one adapter."""
    spec = on_hosts(4, copies=2)
    assert isinstance(spec, PlacedHardware)
    assert spec.spreads == {SHARD: Spread(4, 1, 4), REPLICATE: Spread(2, 2, 4)}
    assert spec.collective("all_gather", 4) == spec_of().collective("all_gather", 4)
    link = spec.collective("all_reduce", 2, over=REPLICATE)
    assert 1 / link.bytes_per_us == pytest.approx(2 * (1 / 2) / 100)
    assert link.latency_us == 100
    # Two ranks that are not along a dimension of the mesh, of tensor parallelism say, are taken to be neighbours.
    assert spec.collective("all_reduce", 2) == spec_of().collective("all_reduce", 2)


def test_ranks_lie_on_the_hosts_on_which_they_are():
    """Along a mesh whose first dimension shards; and a row that lies on more hosts than another is waited for."""
    mesh = bare_mesh("cpu", torch.arange(4).view(2, 2))
    group = Group(mesh, None, 0, 2, torch.device("cpu"), (SHARD, REPLICATE))
    spec = placed(spec_of(), group, {0: 0, 1: 0, 2: 1, 3: 1})
    assert spec.spreads == {SHARD: Spread(2, 2, 2), REPLICATE: Spread(2, 1, 2)}
    assert (spec.hosts, spec.ranks_per_host) == (2, 2)
    spec = placed(spec_of(), group, {0: 0, 1: 0, 2: 0, 3: 1})
    assert spec.spreads == {SHARD: Spread(2, 2, 3), REPLICATE: Spread(2, 2, 3)}


def test_a_file_of_one_level_means_what_it_meant():
    old = machine()
    for name in ("devices_per_host", "between_hosts"):
        del old[name]
    spec = HardwareSpec.from_dict(old)
    assert spec == HardwareSpec.from_dict(machine())
    assert placed(spec, planned_group(512), None) is spec


def test_what_is_placed_is_written_as_the_file_that_it_is_of():
    spec, group = spec_of(), planned_group(8)
    found = placed(spec, group, None)
    assert found != spec
    assert found.to_json() == spec.to_json()
    assert HardwareSpec.from_dict(json.loads(found.to_json())) == spec
    assert pickle.loads(pickle.dumps(found)) == found


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"devices_per_host": 0}, "devices_per_host must be a number >= 1, not 0"),
        ({"devices_per_host": 2.5}, "devices_per_host must be a whole number, not 2.5"),
        ({"devices_per_host": None}, "between_hosts needs devices_per_host, which is missing"),
        ({"between_hosts": 5}, "between_hosts must be an object of fields, not 5"),
        ({"between_hosts": HOSTS | {"speed": 5}}, "there is no field 'speed' of between_hosts"),
        (
            {"between_hosts": HOSTS | {"ring": 1}},
            "between_hosts: ring of a link between hosts must be true or f",
        ),
        (
            {"between_hosts": HOSTS | {"host_bytes_per_us": 0}},
            "between_hosts: host_bytes_per_us of .* > 0, not 0",
        ),
        (
            {"between_hosts": HOSTS | {"latency_us": -1}},
            "between_hosts: latency_us of a link .* >= 0, not -1",
        ),
    ],
)
def test_links_between_hosts_that_cannot_be_are_refused(fields, said):
    with pytest.raises(ConfigError, match=f"^hardware spec: {said}"):
        spec_of(**fields)


def test_a_plan_says_on_how_many_hosts_its_ranks_are_and_takes_their_time(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(spec_of().to_json())
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    said, times = {}, {}
    for world in (4, 8):
        torch._dynamo.reset()
        made = report(model, (torch.ones(2, 64),), world, hardware=str(file), compute="aten")
        said[world], data = made.summary(), made.to_dict()
        times[world] = made.frames[0].timelines["forward"].alone_us("device-device")
        assert (data["hosts"], data["hosts_of_shards"]) == (world // 4, world // 4)
    assert "c10d (planned for ranks on one host)\nhosts: one, for all 4 ranks\n" in said[4]
    line = "hosts: 2 for 8 ranks; every parameter is partitioned over 2 of them\n"
    assert f"c10d (planned for ranks on 2 hosts, 4 on each)\n{line}" in said[8]
    assert times[8] > times[4] + 50


def test_ranks_that_are_to_share_memory_are_planned_to_do_so_inside_each_host(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(spec_of(ring=False).to_json())
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

    def made(world, transport):
        torch._dynamo.reset()
        fields = {"hardware": str(file), "compute": "aten", "transport": transport}
        return report(model, (torch.ones(2, 64),), world, **fields)

    apart, together = (made(8, transport) for transport in ("c10d", "shared"))
    assert "transport between ranks: shared+c10d (2 hosts with 4 CPU ranks each)" in together.summary()
    times = [found.frames[0].timelines["forward"].alone_us("device-device") for found in (apart, together)]
    assert times[1] < times[0]
    assert together.frames[0].timelines["forward"].alone_us("device-device") > 0
    with pytest.raises(
        ShardError, match="not possible for 6 ranks with 4 on a host, as the hardware file says"
    ):
        made(6, "shared")
