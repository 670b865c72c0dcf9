"""Decisions as JSON: they come back as they were, and what is no decision is refused by a sentence that names it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch

from zero_compiler.errors import ConfigError
from zero_compiler.ir.decisions import (
    FrameDecisions,
    MadeFor,
    PlanDecisions,
    SavedValues,
    WeightDecisions,
    dtype_name,
)


def values(**fields: Any) -> SavedValues:
    return SavedValues(100, ("mul",), {"mul": "f32[2]"}, {"add": "f32[2]"}, {"mm": "f32[2]"}, **fields)


def decisions() -> PlanDecisions:
    made_for = MadeFor(2, 1, 1, {"stage": 3, "param_dtype": None}, None, "2.13.0", "aten")
    rests = {"params": "none", "grads": "host", "optimizer": "nvme"}
    phases = {"forward": {"h.0": 1}, "backward": {"h.0": 2}}
    frame = FrameDecisions(
        *("forward", "1 weights (12345678)", "training", ("f32[2,4]",), "abcd"),
        *(1 << 20, "derived", False, True, 4096, False),
        phases,
        {"forward": {"tiled: logits": 4}, "backward": {}},
        values(found="x"),
        True,
        7,
    )
    return PlanDecisions(made_for, {"w": WeightDecisions((8, 4), "float32", rests, True, 1024)}, (frame,))


def test_decisions_come_back():
    data = json.loads(json.dumps(decisions().to_dict()))
    again = PlanDecisions.from_dict(data)
    assert json.dumps(again.to_dict(), sort_keys=True) == json.dumps(data, sort_keys=True)
    assert again == decisions()
    assert again.digest == decisions().digest
    assert dtype_name(torch.bfloat16) == "bfloat16"


def test_a_file_of_a_version_that_knew_no_8_bits_has_none():
    data = json.loads(json.dumps(decisions().to_dict()))
    del data["weights"]["w"]["quantised"]
    assert PlanDecisions.from_dict(data) == decisions()


def test_edits_of_values_are_seen():
    found = values().digest
    assert not values(found=found).edited
    assert SavedValues(100, None, {"mul": "other words"}, {"add": ""}, {"mm": ""}, found).edited is False
    assert SavedValues(100, None, {}, {"add": "", "mul": ""}, {"mm": ""}, found).edited


def test_the_json_of_decisions():
    """Golden: the form of the file, which people edit."""
    text = json.dumps(decisions().to_dict(), sort_keys=True)
    assert text == (
        '{"frames": [{"bucket_bytes": 1048576, "bucket_why": "derived", "distances": {"backward": {"h.0": 2}, '
        '"forward": {"h.0": 1}}, "function": "forward", "graph": "abcd", "inputs": ["f32[2,4]"], "kind": "training", '
        '"mlp_tile_bytes": 4096, "plans_tried": 7, "reads": "1 weights (12345678)", "recompute": false, "reduce_each_micro_batch": true, '
        '"tile_heads": false, "tile_mlp": true, "tiles": {"backward": {}, "forward": {"tiled: logits": 4}}, '
        '"values": {"away": {"mm": "f32[2]"}, "found": "x", "hidden": ["mul"], "limit_bytes": 100, '
        '"made_again": {"add": "f32[2]"}, "saved": {"mul": "f32[2]"}}}], '
        '"made_for": {"compute": "aten", "config": {"param_dtype": null, "stage": 3}, "memory_budget_bytes": null, '
        '"replicas": 1, "tensor_ranks": 1, "torch": "2.13.0", "world": 2}, '
        '"version": 1, "weights": {"w": {"dtype": "float32", "kept": true, "quantised": false, "rests": {"grads": "host", '
        '"optimizer": "nvme", "params": "none"}, "shape": [8, 4], "tile_bytes": 1024}}}'
    )


DEEP: Any = []
for _ in range(50):
    DEEP = [DEEP]

WRONG = [
    ((), [], "it must be an object of fields, not []"),
    (("version",), 2, "version must be 1, not 2"),
    (("frame",), [], "there is no field 'frame'; did you mean 'frames'?"),
    (("weights",), [1], "weights must be an object of fields, not [1]"),
    (("weights", "w", "kepd"), True, "there is no field 'kepd' of weight 'w'; did you mean 'kept'?"),
    (("weights", "w", "kept"), "yes", "kept of weight 'w' must be true or false, not 'yes'"),
    (
        ("weights", "w", "tile_bytes"),
        0,
        "tile_bytes of weight 'w', where it is not null, must be a whole number from 1",
    ),
    (("weights", "w", "shape"), [8.5], "a size in shape of weight 'w' must be a whole number from 0"),
    (("weights", "w", "rests"), DEEP, "rests of weight 'w' must be an object of fields, not [[[[[["),
    (
        ("weights", "w", "rests", "grads"),
        "disk",
        "grads in rests of weight 'w' must be one of none, host, nvme, not",
    ),
    (
        ("weights", "w", "rests", "grads"),
        [],
        "grads in rests of weight 'w' must be one of none, host, nvme, not []",
    ),
    (("made_for", "world"), 0, "world of made_for must be a whole number from 1 to 2,147,483,648, not 0"),
    (
        ("made_for", "config", "stage"),
        {},
        "'stage' of config of made_for must be a text, a whole number, true, false",
    ),
    (("frames",), {}, "frames must be a list, not {}"),
    (("frames", 0, "kind"), "eval", "kind of frames[0] must be one of training, inference, not 'eval'"),
    (
        ("frames", 0, "distances", "forward", "h.0"),
        0,
        "'h.0' in distances.forward of frames[0] must be a whole number",
    ),
    (("frames", 0, "distances", "forward", "h.0"), float("nan"), "to 2,147,483,648, not nan"),
    (
        ("frames", 0, "distances", "forward", "h.0"),
        10**40,
        "'h.0' in distances.forward of frames[0] must be a whole",
    ),
    (("frames", 0, "distances", "inference"), {}, "there is no field 'inference' of distances of frames[0]"),
    (
        ("frames", 0, "tiles", "backward"),
        [],
        "tiles.backward of frames[0] must be an object of fields, not []",
    ),
    (("frames", 0, "recompute"), None, "recompute of frames[0] must be true or false, not None"),
    (("frames", 0, "inputs"), [3], "one of inputs of frames[0] must be a text, not 3"),
    (
        ("frames", 0, "values", "saved"),
        ["mul"],
        "saved of values of frames[0] must be an object of fields, not ['mul']",
    ),
    (
        ("frames", 0, "values", "hidden"),
        "mul",
        "hidden of values of frames[0], where it is not null, must be a list",
    ),
    (
        ("frames", 0, "values", "away"),
        {"add": "x"},
        "'add' of values of frames[0] is in made_again and in away; leave it in one",
    ),
]


@pytest.mark.parametrize(("where", "value", "sentence"), WRONG, ids=[w[2][:60] for w in WRONG])
def test_what_is_no_decision_is_named(where, value, sentence):
    data: Any = copy.deepcopy(json.loads(json.dumps(decisions().to_dict())))
    at = data
    for key in where[:-1]:
        at = at[key]
    if where:
        at[where[-1]] = value
    else:
        data = value
    with pytest.raises(ConfigError) as caught:
        PlanDecisions.from_dict(data)
    assert sentence in str(caught.value)
    assert str(caught.value).startswith("decisions: ")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", ["version", "weights", "made_for", "frames"])
def test_what_is_missing_is_named(name):
    data = decisions().to_dict()
    del data[name]
    with pytest.raises(ConfigError, match=f"decisions: '{name}' is missing"):
        PlanDecisions.from_dict(data)
