"""Transfers as Programs describe them: their steps, and the lane of each."""

from __future__ import annotations

import dataclasses

import pytest
from null.instructions import gather_of, reduce_of, spec_of

from zero_compiler.cost.transfer_costs import transfer_us
from zero_compiler.ir.instructions import Step, Transfer
from zero_compiler.ir.transfers import HOST, LANES, LINK, READ, WRITE, GatherDesc, Hop, OffloadDesc, few
from zero_compiler.quantised_blocks import moved_bytes


@pytest.mark.parametrize(
    ("tier", "out", "lane"),
    [
        ("", False, LINK),
        ("host", True, HOST),
        ("host", False, HOST),
        ("nvme", True, WRITE),
        ("nvme", False, READ),
    ],
)
def test_the_lane_of_a_step_follows_from_where_it_goes(tier, out, lane):
    transfer = Transfer(Step("gathers", 0, 0), out, tier, 100, "w")
    assert transfer.lane == lane in LANES
    if tier == "nvme":
        assert transfer_us(transfer, spec_of()) == (10.0 + 100 / 20 if out else 5.0 + 100 / 50)


def test_how_many_steps_there_are():
    hops = (Hop("nvme", "host", (0,)), Hop("host", "device", (0,)))
    assert gather_of(4).steps == 1
    assert gather_of(4, hops=hops, rest_dtype="float32").steps == 3
    assert [reduce_of(4, tiers=tiers).steps for tiers in ((), ("nvme",), ("host",), ("host", "nvme"))] == [
        1,
        1,
        2,
        2,
    ]
    moved = [
        OffloadDesc("a", "", tiers, (2,), (1,), "float32", 0, 0) for tiers in (("host",), ("host", "nvme"))
    ]
    assert [o.steps for o in moved] == [1, 2]


def test_a_gradient_is_reduced_from_where_it_lies_unless_ranks_share_memory():
    assert reduce_of(4).read_in_place
    assert not reduce_of(4, shared=True).read_in_place
    assert not reduce_of(4, 4).read_in_place  # rows of several travel beside each other


def test_many_names_are_cut_short():
    assert few(("a", "b", "c", "d")) == "a, b, c, d"
    assert few(("a", "b", "c", "d", "e", "f")) == "a, b, c, d and 2 more"
    assert gather_of(4, 4).label == "gather of w0, w1"


def matrices(wire: str = "", staging: int = 0) -> GatherDesc:
    """Of two ranks: three rows of 300 of one weight, and two of 8 of another."""
    names, shapes, chunks = ("w", "v"), ((6, 300), (4, 8)), (900, 16)
    return GatherDesc("m", names, shapes, chunks, "float32", False, (0, 0), staging, "u", wire=wire)


def test_what_travels_in_8_bits_has_a_byte_a_number_and_four_a_block():
    assert matrices().sent_bytes == 916 * 4
    packed = matrices("int8")
    assert packed.sent_bytes == (900 + 3 * 2 * 4) + (16 + 2 * 4)
    assert packed.staging_bytes(2) == 3 * packed.sent_bytes
    assert packed.shaped == "w float32[6, 300], v float32[4, 8] as int8"
    # Read where they are as wide as at rest, and written a byte each; and back, of all ranks.
    assert (packed.packing_bytes, packed.unpacking_bytes) == (
        moved_bytes(916, 4),
        moved_bytes(6 * 300 + 4 * 8, 4),
    )
    assert (matrices().packing_bytes, matrices().unpacking_bytes) == (0, 0)


def test_staging_of_a_lone_weight_is_what_it_sends_unless_that_is_packed():
    lone = gather_of(10)
    assert lone.staging_bytes(4) == 0  # from where it lies to where it goes
    assert dataclasses.replace(lone, staging=0).staging_bytes(4) == 10 * 4
    assert dataclasses.replace(gather_of(10, 6), staging=0).staging_bytes(4) == 16 * 4 * 5
