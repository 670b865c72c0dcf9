"""The largest models on the device alone: as many layers as fit, and no more."""

from __future__ import annotations

from null.tools.figures.given import GivenPlanner

from zero_compiler.cost import hardware
from zero_compiler.tools.figures import largest
from zero_compiler.tools.figures.extended import MACHINE


def test_one_layer_more_does_not_fit():
    planner = GivenPlanner()
    room = hardware.load(MACHINE).plannable_bytes
    figure = largest.largest(planner)
    assert len(figure.rows) == 4
    for row, setup in zip(figure.rows, planner.planned[::6], strict=True):
        shape = setup.shape
        own = 16 / (shape.parts * (setup.ranks if setup.fields["stage"] else 1))
        left = room - 3e9 - own * row.here
        assert 0 <= left < own * shape.layer_parameters


def test_the_part_of_a_sliced_model_stands_for_all_of_it():
    row = largest.largest(GivenPlanner()).rows[-1]
    assert row.what.startswith("stage 2 and model parallelism of 16, 400 ranks")
    assert row.fact.low == 170e9
