"""Questions, and answers in words."""

from __future__ import annotations

import pytest
import torch
from null.tools.fit.alike_layers import hardware

from zero_compiler.config import Config
from zero_compiler.errors import ConfigError
from zero_compiler.tools.fit import question
from zero_compiler.tools.fit.question import Answer, Question, answer
from zero_compiler.tools.fit.search import OutOfTime
from zero_compiler.tools.fit.settings import Setting

FACTORY = (
    "import torch\nfrom torch import nn\n\n\n"
    "class Net(nn.Module):\n"
    "    def __init__(self, layers):\n"
    "        super().__init__()\n"
    "        self.h = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(layers))\n\n"
    "    def forward(self, x):\n"
    "        for layer in self.h:\n"
    "            x = torch.tanh(layer(x))\n"
    "        return x.square().mean()\n\n\n"
    "def make(layers=4):\n"
    "    return Net(layers), (torch.ones(8, 64),)\n"
)


@pytest.fixture
def factory(tmp_path, monkeypatch):
    (tmp_path / "fit_net.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    return "fit_net:make"


def ask(tmp_path, model, memory_bytes=1 << 20, **given) -> Question:
    fields = {"compute": "aten", "hardware": hardware(tmp_path, memory_bytes=memory_bytes)}
    return Question(model, fields, **given)


def silent(line: str) -> None: ...


@pytest.mark.parametrize(
    ("model", "given", "said"),
    [
        ("my:make(layers=?)", {}, "asks for the largest model that fits: say on how many ranks, --world"),
        ("my:make(layers=?, width=?)", {"world": 2}, "has 2 arguments that are '?'"),
        ("my:?", {"world": 2}, "'?' stands for the value of an argument"),
        ("my:make", {"world": 6, "replicas": 4}, "--replicas 4 must divide --world 6"),
        ("my:make", {"world": 4, "batch": 2, "global_batch": 12}, "must be a multiple of the 8 rows"),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused_before_anything_is_built(tmp_path, model, given, said):
    with pytest.raises(ConfigError) as refused:
        answer(ask(tmp_path, model, **given), silent)
    assert said in str(refused.value)


def test_a_machine_that_does_not_know_its_bytes_is_refused(tmp_path, factory):
    with pytest.raises(ConfigError, match="does not say how many bytes its device has"):
        answer(ask(tmp_path, factory, memory_bytes=None, world=2), silent)


@pytest.mark.slow
def test_the_answer_has_lines_to_paste(tmp_path, factory):
    found = answer(ask(tmp_path, factory, world=2), silent)
    assert found.fits
    text = found.text()
    assert "whole plan" in text
    assert "zero-compiler plan fit_net:make --hardware " in text
    assert "--world 2 --stage" in text
    assert "model = zero.shard(model, compute='aten', hardware=" in text
    assert 'model = torch.compile(model, backend="zero")' in text


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16"])
def test_dtypes_are_pasted_as_they_were_given(dtype):
    """`torch.bf16` is none."""
    given = Question("my:make", {"param_dtype": dtype}, 2)
    first, *_ = Answer(given).code(Setting(world=2, stage=3))
    assert first == f"model = zero.shard(model, param_dtype='{dtype}', stage=3)"
    assert Config.make(None, {"param_dtype": dtype, "stage": 3}).param_dtype is torch.bfloat16


@pytest.mark.slow
def test_the_largest_model_is_the_last_that_fits(tmp_path, factory):
    layer = 64 * 64 * 4
    found = answer(ask(tmp_path, "fit_net:make(layers=?)", 40 * layer, world=2, replicas=1), silent)
    assert found.value is not None
    # Parameters, gradients and two states of a layer, in halves, are twice its bytes.
    assert 10 <= found.value <= 20
    assert f"the largest that fits: fit_net:make(layers={found.value})" in found.text()


@pytest.mark.slow
def test_the_fewest_ranks(tmp_path, factory):
    layer = 64 * 64 * 4
    found = answer(ask(tmp_path, "fit_net:make(layers=16)", 24 * layer), silent)
    assert found.world in (4, 8)
    assert found.fits
    assert "(the fewest that were found to do)" in found.text()


def test_what_was_found_before_the_end_of_the_time_is_shown(tmp_path, factory, monkeypatch):
    def over(asked, global_batch, any_batch, found, say, estimator=None):
        raise OutOfTime

    monkeypatch.setattr(question.found_by, "search", over)
    found = answer(ask(tmp_path, factory, world=2, seconds=60.0), silent)
    assert found.ended == "60 s were over"
    assert not found.fits
    assert not found.known
    assert "no answer yet: 60 s were over; give more time, --seconds" in found.text()

    def stopped(asked, global_batch, any_batch, found, say, estimator=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(question.found_by, "search", stopped)
    assert answer(ask(tmp_path, factory, world=2), silent).ended == "interrupted"
