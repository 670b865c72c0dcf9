"""Links from measured times: a spoiled measurement moves none, and ranks measure equally often."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_compiler.cost.hardware import Link
from zero_compiler.tools.calibration import measure_links, measuring

SIZES = list(measure_links.SIZES)


@pytest.mark.parametrize("spoiled", range(len(SIZES)))
@pytest.mark.parametrize("times", [0.2, 1.5, 20])
@pytest.mark.parametrize("link", [Link(200.0, 1200.0), Link(20.0, 10_000.0), Link(20.0, 360_000.0)])
def test_one_spoiled_measurement_moves_no_link(link, times, spoiled):
    measured = [link.us(size) for size in SIZES]
    measured[spoiled] *= times
    found = measure_links.fit(SIZES, measured)
    assert found.latency_us == pytest.approx(link.latency_us, rel=1e-6)
    assert found.bytes_per_us == pytest.approx(link.bytes_per_us, rel=1e-6)


@given(st.lists(st.floats(0.95, 1.05), min_size=len(SIZES), max_size=len(SIZES)))
@settings(max_examples=200, deadline=None)
def test_small_errors_of_all_measurements_stay_small(errors):
    """Within 5 % of the truth. The line through the smallest and the largest size is as near to it everywhere, and so at
    most 0.103 (in logarithms) from each of the three other measurements, of which one does not count; the line that is
    taken is no further off in sum, hence at four sizes by no more than 2 x 0.103 + 0.051 = 0.26."""
    link = Link(200.0, 1200.0)
    found = measure_links.fit(SIZES, [link.us(n) * e for n, e in zip(SIZES, errors, strict=True)])
    off = sorted(abs(math.log(found.us(n) / link.us(n))) for n in SIZES)
    assert off[-2] <= 0.26


def test_ranks_run_collectives_equally_often_however_long_they_take(monkeypatch):
    """One that stopped by the clock would leave its peer in a collective alone."""
    monkeypatch.setattr(measuring, "_ENOUGH_S", 0.0)
    host, calls = torch.device("cpu"), []
    assert len(measuring.times_us(lambda: calls.append(1), host, 30)) == 30
    assert len(calls) == 31  # the first is not counted
    measuring.medians_us([lambda: calls.append(1)], host, 30)  # what one process measures alone does stop
    assert len(calls) < 31 + 30


def test_two_sizes_are_met_exactly():
    link = Link(8.0, 50_000.0)
    found = measure_links.fit([1 << 12, 1 << 26], [link.us(1 << 12), link.us(1 << 26)])
    assert (found.latency_us, found.bytes_per_us) == pytest.approx((8.0, 50_000.0))


def test_times_that_fall_with_size_still_make_a_link():
    found = measure_links.fit(SIZES, [50.0, 40.0, 30.0, 20.0, 10.0])
    assert found.latency_us > 0
    assert found.bytes_per_us > 0
