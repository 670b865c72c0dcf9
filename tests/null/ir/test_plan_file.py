"""Plan files: what is no plan, and what is a plan of another model."""

from __future__ import annotations

import json

import pytest
from null.ir.test_decisions import decisions

from zero_compiler.errors import ConfigError
from zero_compiler.ir.plan_file import digest_at, load


def written(tmp_path, data):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    return str(path)


def test_of_a_file_the_decisions_are_read(tmp_path):
    path = written(tmp_path, {"decisions": decisions().to_dict(), "frames": "what follows is not read"})
    assert load(path).decisions == decisions()
    assert load(path).weight("w").kept
    assert digest_at(path) == decisions().digest
    assert digest_at(None) == ""


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"frames": []}, "it is no plan: it has no 'decisions'"),
        ([], "it is no plan: it has no 'decisions'"),
        ({"decisions": None}, "it has no decisions, since nothing was planned when it was written"),
        ({"decisions": {}}, "decisions: 'version' is missing"),
    ],
)
def test_what_is_no_plan(tmp_path, data, sentence):
    path = written(tmp_path, data)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value).startswith(f"plan {path}: {sentence}; ")
    assert "`zero-compiler plan MODEL --json PATH` write one" in str(caught.value)


def test_a_plan_that_is_not_there(tmp_path):
    with pytest.raises(
        ConfigError, match=r"plan .*no.json: cannot be read: No such file or directory; `zero.inspect"
    ):
        load(str(tmp_path / "no.json"))


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ({}, "it was made for another model: this one has no parameter 'w'; make a plan of this one"),
        (
            {"w": ((8, 4), "float32"), "v": ((8,), "float32")},
            "it was made for another model: it has no parameter 'v'; make a plan of this one",
        ),
        (
            {"w": ((8, 5), "float32")},
            "parameter 'w' is float32[8, 4] there and float32[8, 5] here; make a plan of this one",
        ),
        (
            {"w": ((8, 4), "bfloat16")},
            "parameter 'w' is float32[8, 4] there and bfloat16[8, 4] here; make a plan of this one",
        ),
    ],
)
def test_weights_of_another_model(tmp_path, found, sentence):
    plan = load(written(tmp_path, {"decisions": decisions().to_dict()}))
    plan.check_weights({"w": ((8, 4), "float32")})
    with pytest.raises(ConfigError) as caught:
        plan.check_weights(found)
    assert sentence in str(caught.value)
    assert str(caught.value).startswith(f"plan {plan.path!r}: ")
