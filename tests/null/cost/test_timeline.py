"""Predicted timelines: what is busy, what bounds a step, and what the report says of waits."""

from __future__ import annotations

import json

from zero_compiler.cost.timeline import COMPUTE, LINK, READ, Span, Timeline, duration


def timeline() -> Timeline:
    spans = [
        Span(COMPUTE, 0.0, 10.0, "compute 0", alone_us=10.0),
        Span(LINK, 0.0, 6.0, "gather of a", 400, alone_us=6.0),
        Span(LINK, 4.0, 16.0, "gather of b", 600, stalled_us=6.0, alone_us=12.0),
        Span(READ, 30.0, 31.0, "file of c", 8, alone_us=1.0),
    ]
    return Timeline(total_us=31.0, spans=spans, stalls={LINK: 6.0})


def test_what_overlaps_is_busy_once():
    t = timeline()
    assert t.busy_us(LINK) == 16.0
    assert t.busy_us(LINK, READ) == 17.0
    assert t.busy_us(READ) == 1.0


def test_the_lane_with_most_to_do_bounds_the_step():
    t = timeline()
    assert t.bound == LINK
    assert (t.alone_us(COMPUTE), t.alone_us(LINK), t.nbytes(LINK)) == (10.0, 18.0, 1000)
    assert json.loads(json.dumps(t.to_dict()))["bound"] == LINK


def test_the_report_names_what_is_waited_for():
    t = timeline()
    assert [s.label for s in t.waited_for()] == ["gather of b"]
    assert [s.hidden for s in t.spans if s.lane == LINK] == [1.0, 0.5]
    assert t.lines()[-1] == "waits 6.0 us for the gather of b: 50% of 12.0 us hidden"


def test_times_of_the_report():
    assert [duration(us) for us in (0.04, 999.94, 1500.0)] == ["0.0 us", "999.9 us", "1.50 ms"]
