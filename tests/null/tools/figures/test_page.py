"""The page of the documentation is what the command writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from marks import thorough

from zero_compiler.tools.figures import page
from zero_compiler.tools.figures.catalogue import FIGURES
from zero_compiler.tools.figures.extended import Planner
from zero_compiler.tools.figures.table import Figure, FigureRow, exactly

DOCS = (Path(__file__).resolve().parents[4] / "docs" / "figures.md").read_text(encoding="utf-8")
SECTIONS = {text.partition("\n")[0]: text.strip() for text in re.split(r"^## ", DOCS, flags=re.M)[1:]}
CHEAP = ("states", "volume", "wide-layer")
DEAR = tuple(name for name in FIGURES if name not in CHEAP)
MADE_WITH = "2.13"
of_another_torch = pytest.mark.skipif(
    not torch.__version__.startswith(f"{MADE_WITH}."),
    reason=f"a release of torch captures operators of its own, and the page was made with {MADE_WITH}",
)


@pytest.fixture(scope="module")
def planner():
    return Planner(lambda line: None)


def test_the_page_has_every_figure():
    assert DOCS.startswith(page.page([]))
    assert len(SECTIONS) == len(FIGURES)


def test_numbers_within_a_tenth_or_a_reason():
    """In the page: a row that deviates says why."""
    rows = [
        line.split(" | ") for text in SECTIONS.values() for line in text.splitlines() if line.startswith("| ")
    ]
    told = {cells[0]: (cells[3], cells[4]) for cells in rows if cells[0] != "|"}
    assert len(told) > 30
    far = [what for what, (by, _) in told.items() if re.fullmatch(r"[+-]\d+%", by) and abs(int(by[:-1])) > 10]
    assert far
    assert [what for what in far if not told[what][1]] == []


def test_a_page_is_its_figures_one_after_the_other():
    figures = [Figure(n, n, "about", [FigureRow("a", exactly(1, "1", "s"), 1, "1")]) for n in "xy"]
    text = page.page(figures)
    assert text.endswith("\n")
    assert text.index("## x") < text.index("## y")
    assert "\n\n\n" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*thorough("states"), "volume", pytest.param("wide-layer", marks=of_another_torch)]
)
def test_the_page_is_what_is_planned(name, planner):
    figure = FIGURES[name](planner)
    assert SECTIONS[figure.title] == figure.markdown().removeprefix("## ")


@pytest.mark.thorough
@of_another_torch
@pytest.mark.parametrize("name", DEAR)
def test_all_of_the_page_is_what_is_planned(name, planner):
    figure = FIGURES[name](planner)
    assert SECTIONS[figure.title] == figure.markdown().removeprefix("## ")
