"""Plans of few layers, extended, beside plans of all layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from marks import thorough

from zero_compiler.tools.figures import extended
from zero_compiler.tools.figures.extended import IN_FILES, MIXED, ON_HOST, Planner, Setup
from zero_compiler.tools.figures.models import Shape

SMALL = Setup(Shape(9, 256, tokens=64, vocabulary=1024), 16, 2, {"stage": 3})


class GivenPlanner(Planner):
    """Plans nothing: some bytes for the model, and some for each of its layers."""

    def __init__(self, model: float, layer: float) -> None:
        super().__init__(lambda line: None)
        self._of = model, layer

    def _planned(self, setup, layers):
        model, layer = self._of
        return {"states": model + layers * layer, "programs": 3.0, "arena": 5.0 + layers}


def test_each_further_layer_adds_as_much():
    plan = GivenPlanner(100.0, 10.0).extended(SMALL, depths=(1, 2))
    assert plan["states"] == 190.0
    assert plan["arena"] == 7.0  # of the deeper plan
    assert plan["device"] == 190 + 7 + 3


def test_as_many_layers_as_there_is_room_for():
    planner = GivenPlanner(100.0, 10.0)
    plan = planner.most_layers(SMALL, {"device": 1000.0}, depths=(1, 2))
    assert plan.setup.shape.layers == 89
    assert plan["device"] == 100 + 890 + 7 + 3
    more = replace(SMALL, shape=replace(SMALL.shape, layers=90))
    assert planner.extended(more, depths=(1, 2))["device"] > 1000


def test_a_plan_is_made_once(monkeypatch):
    made = []
    monkeypatch.setattr(Setup, "report", lambda self: made.append(self.shape.layers))
    monkeypatch.setattr(extended, "_amounts", lambda setup, report: {"states": 1, "arena": 1, "programs": 1})
    said = []
    planner = Planner(said.append)
    planner.extended(SMALL)
    planner.extended(replace(SMALL, shape=replace(SMALL.shape, layers=90)))
    assert made == [*extended.DEPTHS]
    assert len(said) == 2
    planner.extended(replace(SMALL, ranks=8))
    assert len(made) == 4


def test_operations_are_counted_as_the_papers_do():
    plan = GivenPlanner(0.0, 0.0).extended(SMALL, depths=(1, 2))
    done = 8 * SMALL.shape.parameters * 2 * 64
    assert plan.tflops(1e6) == pytest.approx(done / 1e12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [*thorough({}, ON_HOST, {"tile_bytes": 1 << 18}), {**IN_FILES, "offload_activations": "host"}]
)
def test_what_is_extended_is_what_all_layers_take(fields):
    setup = replace(SMALL, fields={"stage": 3, **fields})
    planner = Planner(lambda line: None)
    plan = planner.extended(setup)
    report = setup.report()
    assert report.stage == 3
    assert all(report.frames[0].config.to_dict()[name] == dtype for name, dtype in MIXED.items())
    assert plan["device"] == pytest.approx(report.peak_bytes, rel=0.05)
    assert plan["nvme"] == report.memory.files
    if fields.get("offload_activations"):
        assert plan["host"] >= report.memory.apart  # all checkpoints are counted there, and a plan keeps some
    else:
        assert plan["host"] == pytest.approx(report.memory.apart, rel=0.05)
    assert plan.us == pytest.approx(
        report.step_us, rel=0.20
    )  # at this size layers are shorter than latencies
