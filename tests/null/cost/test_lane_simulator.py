"""Simulated lanes by hand: what shares cores or a disk goes slower, and by how much."""

from __future__ import annotations

import pytest
from null.instructions import BEHIND, CORES, gather_of, program_of, spec_of

from zero_compiler.cost.simulate import simulate
from zero_compiler.cost.timeline import COMPUTE, LINK, READ
from zero_compiler.ir.instructions import Compute, Fetch, Gather, WaitFetch, WaitGather
from zero_compiler.ir.transfers import Hop


@pytest.mark.parametrize(
    ("shared", "computed_us", "moved_us"),
    [
        ([], 10.0, 6.0),  # side by side
        (CORES, 16.0, 12.0),  # each at half speed until the transfer ends; 4 us of computing are left then
        ([("compute", "host-device")], 10.0, 6.0),  # shared with another lane
    ],
)
def test_lanes_that_share_cores_slow_each_other_down(shared, computed_us, moved_us):
    program = program_of(BEHIND, [gather_of(50)], segment_us=[10.0])
    timeline = simulate(program, spec_of(shared), 2)
    ends = {s.lane: (s.start_us, s.end_us) for s in timeline.spans}
    assert ends == {"compute": (0.0, pytest.approx(computed_us)), LINK: (0.0, pytest.approx(moved_us))}
    assert timeline.total_us == pytest.approx(computed_us)
    assert timeline.stalled_us == 0
    # What the step takes longer than its computing is not hidden, although nothing is waited for.
    assert timeline.exposed_us(LINK) == pytest.approx(computed_us - 10.0)
    hidden = 0.0 if shared is CORES else 1.0
    (moved,) = (s for s in timeline.spans if s.lane == LINK)
    assert moved.hidden == pytest.approx(hidden)
    assert timeline.lines()[0].startswith(
        f"predicted {computed_us / 1e3:.2f} ms: compute 0.01 ms, transfers 0.01 ms for 400 bytes, {hidden:.0%} of them"
    )


def test_a_transfer_that_is_waited_for_has_the_cores_to_itself():
    # 1000 bytes: 12 us alone. Half speed for the 20 us of computing 10; the 2 us that are left at full speed.
    program = program_of(BEHIND, [gather_of(125)], segment_us=[10.0])
    timeline = simulate(program, spec_of(CORES), 2)
    assert timeline.total_us == pytest.approx(22.0)
    assert timeline.stalls == {LINK: pytest.approx(2.0)}
    (moved,) = (s for s in timeline.spans if s.lane == LINK)
    assert (moved.start_us, moved.end_us) == (0.0, pytest.approx(22.0))
    # 12 us alone, and the step takes 12 us longer than its computing: two are waited for, ten slow it down.
    assert (moved.alone_us, moved.slowed_us) == (pytest.approx(12.0), pytest.approx(10.0))
    assert moved.hidden == pytest.approx(0.0)
    assert timeline.lines()[0].endswith("0% of them hidden; bound by device-device")


def test_two_lanes_that_slow_compute_down_are_charged_alike():
    """12 us of computing, 6 us of moving and 7 us of reading, on the same cores."""
    stored = gather_of(25, hops=(Hop("nvme", "host", (0,)),), rest_dtype="float32")
    instrs = [Fetch(1), Gather(0), Compute(0, (), (), ()), WaitGather(0, (-1,)), WaitFetch(1)]
    program = program_of(instrs, [gather_of(50), stored], segment_us=[12.0])
    timeline = simulate(program, spec_of([("compute", LINK, READ)]), 2)
    assert timeline.total_us == pytest.approx(12.0 + 6.0 + 7.0)
    assert timeline.slowed == {LINK: pytest.approx(6.0), READ: pytest.approx(7.0)}
    assert all(s.hidden == pytest.approx(0.0) for s in timeline.spans if s.lane != COMPUTE)


def test_three_lanes_that_share_go_at_a_third():
    """Computes 6 us; 400 bytes travel (6 us); 100 bytes come from a file (5 + 2 us)."""
    stored = gather_of(25, hops=(Hop("nvme", "host", (0,)),), rest_dtype="float32")
    instrs = [Fetch(1), Gather(0), Compute(0, (), (), ()), WaitGather(0, (-1,)), WaitFetch(1)]
    program = program_of(instrs, [gather_of(50), stored], segment_us=[6.0])
    timeline = simulate(program, spec_of([("compute", LINK, READ)]), 2)
    ends = {s.lane: s.end_us for s in timeline.spans}
    # After 18 us both of 6 us are done, and 1 us of the file is left, alone.
    assert ends == {
        "compute": pytest.approx(18.0),
        LINK: pytest.approx(18.0),
        READ: pytest.approx(19.0),
    }
    alone = simulate(program, spec_of(), 2)
    assert alone.total_us == pytest.approx(7.0)
    # Groups of two: a lane in both is as slow as in the one that is fuller.
    pairs = simulate(program, spec_of([("compute", LINK), ("compute", READ)]), 2)
    assert {s.lane: s.end_us for s in pairs.spans} == {
        "compute": pytest.approx(12.0),
        LINK: pytest.approx(12.0),
        READ: pytest.approx(13.0),
    }
