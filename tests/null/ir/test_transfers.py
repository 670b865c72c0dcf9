"""Transfers as Programs describe them: their steps, and the lane of each."""

from __future__ import annotations

import pytest
from null.instructions import gather_of, reduce_of, spec_of

from zero_compiler.cost.transfer_costs import transfer_us
from zero_compiler.ir.instructions import Step, Transfer
from zero_compiler.ir.transfers import HOST, LANES, LINK, READ, WRITE, Hop, OffloadDesc, few


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
