"""ZeRO's first figure: exact in the paper's accounting, and volumes of 1, 1 and 1.5 times."""

from __future__ import annotations

import pytest

from zero_compiler.tools.figures import states
from zero_compiler.tools.figures.extended import ExtendedPlan, Planner

PAPER = {0: "120 GB", 1: "31.4 GB", 2: "16.6 GB", 3: "1.9 GB"}


def plan(stage: int) -> ExtendedPlan:
    """Of layouts without padding: all elements, or one part of 64."""
    own = states.SHAPE.parameters / (states.RANKS if stage else 1)
    return ExtendedPlan(states.setup(stage), {"optimizer": 8 * own})


@pytest.mark.parametrize("stage", PAPER)
def test_bytes_are_those_of_the_paper(stage):
    counted = states.paper_bytes(plan(stage), plan(0), stage)
    assert states.gigabytes(counted) == PAPER[stage]


@pytest.mark.slow
def test_the_figures_of_plans_are_those_of_the_paper():
    planner = Planner(lambda line: None)
    rows = states.states(planner).rows
    assert [row.shown for row in rows[::2]] == list(PAPER.values())
    assert [row.deviates() for row in rows[::2]] == ["none"] * 4
    volumes = states.volume(planner).rows
    assert [row.deviates() for row in volumes] == ["none"] * 3 + ["-1%"]  # forward does the head's backward
