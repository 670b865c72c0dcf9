"""Estimates beside plans: what rests to the byte, what is extrapolated nearly, and sketches in the right order."""

from __future__ import annotations

import pytest
from null.tools.fit.alike_layers import LAYERS, Net, asked
from torch import nn

from zero_compiler.tools import planning
from zero_compiler.tools.fit.estimate import LAYERS as BY_LAYERS
from zero_compiler.tools.fit.estimate import WHOLE, Estimator
from zero_compiler.tools.fit.settings import Setting


def silent(line: str) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_rests_is_that_of_a_plan(tmp_path, stage):
    ask = asked(tmp_path)
    estimator = Estimator(ask, False, silent)
    rest = estimator.rest(Setting(4, stage, batch=8))
    memory = planning.rest(
        ask.source.model, 4, stage=stage, **{k: v for k, v in ask.fields.items() if k != "stage"}
    )
    kept = rest["device"] - memory.parameters - memory.gradients - memory.optimizer
    # Weights that stay gathered are known to a plan once there are Programs.
    assert kept == (sum(p.numel() for p in ask.source.model.parameters()) * 4 if stage == 2 else 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", [Setting(4, 3, batch=8), Setting(4, 2, batch=8), Setting(4, 3, 2, batch=8)]
)
def test_two_layers_tell_of_all(tmp_path, setting):
    estimator = Estimator(asked(tmp_path), False, silent)
    assert estimator.stacks[0].count == LAYERS
    few, whole = estimator.extrapolation(setting), estimator.whole(setting, silent)
    assert (few.how, whole.how) == (BY_LAYERS, WHOLE)
    assert few.us == pytest.approx(whole.us, rel=0.1)
    # Buffers of transfers, which are most of so small a model, do not grow with its layers.
    assert few.nbytes["device"] == pytest.approx(whole.nbytes["device"], rel=0.25)
    sketch = estimator.sketch(setting)
    assert sketch.us == pytest.approx(whole.us, rel=0.35)
    assert sketch.nbytes["device"] == pytest.approx(whole.nbytes["device"], rel=0.35)


class Fixed(Net):
    """A forward that names its layers."""

    def forward(self, x):
        for k in range(LAYERS):
            x = self.h[k](x)
        return x.square().mean()


@pytest.mark.slow
def test_a_model_that_does_not_run_with_fewer_layers_is_planned_whole(tmp_path):
    estimator = Estimator(asked(tmp_path, model=Fixed()), False, silent)
    assert not estimator.by_layers
    assert estimator.extrapolation(Setting(4, 3, batch=8)).nbytes["device"] > 0


def test_a_model_without_layers_that_are_alike_is_planned_whole(tmp_path):
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8))
    assert not Estimator(asked(tmp_path, model=model), False, silent).by_layers
