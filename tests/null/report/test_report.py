"""The report of a plan: its text and its JSON say the same bytes."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from zero_compiler.report.report import _notes
from zero_compiler.tools.planning import report


@pytest.fixture(scope="module")
def told():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False))
    return report(model, (torch.zeros(4, 16),), 2)


def test_what_rests_is_the_rows_of_one_rank(told):
    assert told.memory.parameters == 2 * 16 * 32 * 4 // 2
    assert f"{told.memory.parameters:,}" in str(told)


def test_the_text_has_every_program_and_json_its_instructions(told):
    (frame,) = json.loads(json.dumps(told.to_dict()))["frames"]
    assert {"forward", "backward"} <= set(frame["programs"])
    for phase in ("forward", "backward"):
        assert phase in str(told)
        assert len(frame["programs"][phase]["live"]) == len(frame["programs"][phase]["instrs"])


def test_notes_of_many_alike_layers_are_shown_once():
    of = [f"%full_{k}: tiled: aten.mm with h.{k}.up.weight: 2 tiles" for k in range(5)]
    other = [
        "chunks are read up to 2 units ahead",
        *(f"%g: gathered whole: h.{k}.v, 8 bytes" for k in range(3)),
    ]
    shown = [f"note: {note}" for note in other]
    assert _notes([*of, *other]) == [f"note: {of[0]}", "note: the same of 4 other layers", *shown]
