"""The bytes of each lane are those of the descriptors of its transfers."""

from __future__ import annotations

import dataclasses

import pytest
from null.instructions import gather_of, program_of, reduce_of, spec_of

from zero_compiler.cost.hardware import HardwareSpec, HostLink
from zero_compiler.cost.placed_hardware import PlacedHardware, Spread
from zero_compiler.cost.simulate import simulate
from zero_compiler.cost.timeline import LINK, READ, WRITE
from zero_compiler.cost.transfer_costs import transfers, within_host_us
from zero_compiler.ir.instructions import Fetch, Gather, Reduce, WaitFetch, WaitGather, WaitReduce
from zero_compiler.ir.transfers import GatherDesc, Hop
from zero_compiler.quantised_blocks import moved_bytes


@pytest.mark.parametrize("world", [1, 2, 4])
def test_bytes_of_a_lane_are_those_of_its_descriptors(world):
    """Of full tensors between ranks; of this rank's part to and from files; nothing of what does not move."""
    gathers = [
        gather_of(10),
        gather_of(10, 6),
        gather_of(7, home=True),
        dataclasses.replace(
            gather_of(9), dtype="bfloat16", hops=(Hop("nvme", "host", (0,)),), rest_dtype="float32"
        ),
    ]
    reduces = [
        reduce_of(10),
        reduce_of(3, 5, replicated=True),
        reduce_of(8, tiers=("nvme",)),
        reduce_of(4, copies=3),
        dataclasses.replace(reduce_of(6), dtype="bfloat16"),
    ]
    instrs = [Fetch(3), WaitFetch(3)]
    for kinds, many in (((Gather, WaitGather), gathers), ((Reduce, WaitReduce), reduces)):
        for i, desc in enumerate(many):
            values = (-1,) * len(desc.names)
            instrs.append(Gather(i) if kinds[0] is Gather else Reduce(i, values, ()))
            instrs.append(kinds[1](i, values))
    moved = simulate(program_of(instrs, gathers, reduces), spec_of(), world)
    between = (10 + 16) * 4 * world + 9 * 2 * world  # gathers
    between += 10 * 4 * world + 8 * 4 + 8 * 4 * world + 4 * 4 * world + 6 * 2 * world  # reductions
    # Between the three replicas of the rows this rank's part of a sum travels too, also where no rank shares the rest.
    assert moved.nbytes(LINK) == (between if world > 1 else 0) + 4 * 4
    assert (moved.nbytes(READ), moved.nbytes(WRITE)) == (9 * 4, 8 * 4)
    assert moved.nbytes("compute") == 0
    times = {s.label: s.end_us - s.start_us for s in moved.spans if s.lane in (READ, WRITE)}
    assert times == {
        "file of the gather of w0": pytest.approx(5 + 36 / 50),
        "file of the gradient of w0": pytest.approx(10 + 32 / 20),
    }


def test_what_travels_in_8_bits_is_packed_before_and_unpacked_behind():
    """256 bytes of memory in a us; of two rows of 256 a rank has one. 2 us and 100 bytes/us between ranks."""
    packed = GatherDesc(
        "m", ("w",), ((2, 256),), (256,), "float32", False, (0,), 0, "u", rest_dtype="float32", wire="int8"
    )
    program = program_of([Gather(0), WaitGather(0, (-1,))], [packed])
    spec = dataclasses.replace(spec_of(), memory_bytes_per_us=256.0)
    pack, link, unpack = moved_bytes(256, 4) / 256, 2 + 2 * (256 + 4) / 100, moved_bytes(512, 4) / 256
    timeline = simulate(program, spec, 2)
    assert timeline.nbytes(LINK) == 2 * (256 + 4)
    assert timeline.reached_us == pytest.approx([pack, pack + link + unpack])
    # What is kept is there when backward asks for it.
    kept = dataclasses.replace(packed, kept=True)
    assert simulate(dataclasses.replace(program, phase="backward", gathers=[kept]), spec, 2).total_us == 0


def placed(once=True):
    """Two hosts with two ranks each: 100 bytes/us of one rank between them, 100 of all together, 1 us."""
    spec = dataclasses.replace(
        spec_of(), devices_per_host=2, between_hosts=HostLink(1.0, 100.0, 100.0, ring=False)
    )
    plain = {f.name: getattr(spec, f.name) for f in dataclasses.fields(HardwareSpec)}
    return PlacedHardware(**plain, hosts=2, ranks_per_host=2, spreads={"shard": Spread(4, 2, 2)}, once=once)


def test_gathers_of_second_shards_take_the_time_of_the_link_within_a_host():
    within = dataclasses.replace(gather_of(500), host_ranks=2)
    program = program_of([Gather(0), WaitGather(0, (-1,))], [within])
    spec = placed(once=False)
    (cost,), _ = transfers(program, spec, 4)
    link = spec_of().collective("all_gather", 2)
    assert cost == (link.us(2 * 500 * 4), 2 * 500 * 4)
    now, instead = within_host_us(program, spec, 4)
    assert (now, instead) == (cost[0], spec.collective("all_gather", 4).us(2 * 500 * 4))
    assert now < instead
    # In memory: a part is read and written once, and all parts are.
    (cost,), _ = transfers(program, placed(), 4)
    assert cost[0] == pytest.approx(link.latency_us + 4000 * (2 + 2 / 2) / spec.memory_bytes_per_us)


def test_packed_sums_take_the_link_between_hosts_for_fewer_bytes():
    spec, whole = placed(), reduce_of(512)
    packed = dataclasses.replace(whole, wire="int8", hosts=2)
    costs = [transfers(program_of([], [], [r]), spec, 4)[1][0] for r in (whole, packed)]
    sent = 512 + 2 * 4
    assert [nbytes for _, nbytes in costs] == [4 * 512 * 4, 4 * sent]
    passes = 2 * (512 * 4 + sent) + 3 * 4 * 512
    saved = (512 * 4 - sent) / 50  # both ranks of a host share what it is connected by
    assert costs[0][0] - costs[1][0] == pytest.approx(saved - passes / spec.memory_bytes_per_us)
