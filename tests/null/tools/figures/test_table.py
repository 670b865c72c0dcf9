"""Deviations from numbers, ranges and what is shown in a picture only; tables as text."""

from __future__ import annotations

import pytest

from zero_compiler.tools.figures.table import (
    Figure,
    FigureRow,
    between,
    exactly,
    gigabytes,
    over,
    parameters,
    pictured,
)


@pytest.mark.parametrize(
    ("fact", "here", "deviation", "shown"),
    [
        (exactly(10, "10", ""), 11, 0.1, "+10%"),
        (exactly(10, "10", ""), 9.96, -0.004, "none"),
        (over(10, "over 10", ""), 12, 0.0, "none"),
        (over(10, "over 10", ""), 8, -0.2, "-20%"),
        (between(34, 50, "34 to 50", ""), 49, 0.0, "none"),
        (between(34, 50, "34 to 50", ""), 55, 0.1, "+10%"),
        (pictured(""), 7, None, ""),
    ],
)
def test_deviations(fact, here, deviation, shown):
    found = fact.deviation(here)
    assert found == (None if deviation is None else pytest.approx(deviation))
    assert FigureRow("", fact, here, "").deviates() == shown


def test_a_figure_is_a_table():
    row = FigureRow("stage 3", exactly(2, "2 GB", "a paper"), 3, "3 GB", "larger")
    text = Figure("f", "A figure", "What is planned.", [row], ["A note."]).markdown()
    assert text.splitlines() == [
        "## A figure",
        "",
        "What is planned.",
        "",
        "| | the paper | here | deviation | why | source |",
        "|---|---|---|---|---|---|",
        "| stage 3 | 2 GB | 3 GB | +50% | larger | a paper |",
        "",
        "A note.",
    ]


def test_units():
    assert [parameters(n) for n in (7.498e9, 12.99e9, 999.6e9, 32.04e12)] == ["7.5B", "13B", "1T", "32T"]
    assert [gigabytes(n) for n in (1.875e9, 31.4e9, 120e9)] == ["1.9 GB", "31.4 GB", "120 GB"]
