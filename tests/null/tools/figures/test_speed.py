"""Throughput, scaling and overlap, from what lanes have to do."""

from __future__ import annotations

import pytest
from null.tools.figures.given import GivenPlanner

from zero_compiler.tools.figures import papers, speed


def test_rates_count_what_is_made_again():
    rows = speed.throughput(GivenPlanner()).rows
    assert len(rows) == 5
    assert rows[0].here == pytest.approx(62.5, rel=0.01)  # compute at the preset's rate, and a short update
    assert all(row.here < 62.5 for row in rows)
    assert rows[1].fact is papers.THROUGHPUT_1T


def test_less_of_an_update_on_more_nodes_is_more_than_linear():
    figure = speed.scaling(GivenPlanner())
    rates = [row.here for row in figure.rows]
    assert rates == sorted(rates)
    assert "which is more than 8." in figure.notes[0]


def test_overlap_is_beside_all_lanes_one_after_the_other():
    rows = {row.what: row for row in speed.overlap(GivenPlanner()).rows}
    assert rows["overlap, 2 rows a rank"].here == pytest.approx(6, rel=0.01)  # six lanes with as much to do
