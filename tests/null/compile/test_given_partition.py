"""What forward hands to backward is what a plan file says, as it was found or as it was edited."""

from __future__ import annotations

import json

import pytest
from machines import machine
from null import blocks, offloaded
from null.compile.test_given_decisions import edited
from null.edited import planned, without_measures, write
from null.ir.test_decisions import decisions

from zero_compiler.compile.given_decisions import GivenDecisions
from zero_compiler.errors import ConfigError
from zero_compiler.ir.decisions import SavedValues
from zero_compiler.ir.plan_file import PlanFile


@pytest.fixture
def hardware(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine()))
    return str(path)


@pytest.mark.slow
def test_edits_of_values(tmp_path, hardware):
    def remake(decisions):
        values = decisions["frames"][0]["values"]
        name = next(n for n, said in values["saved"].items() if "tanh" in said)
        moved.append(name)
        values["made_again"][name] = values["saved"].pop(name)

    moved: list[str] = []
    first, again = edited(tmp_path, hardware, remake)
    assert moved[0] in again.decisions.frames[0].values.made_again
    assert moved[0] in [r.name for r in again.frames[0].remade]
    assert "the plan file" in str(again)
    assert moved[0] not in [r.name for r in first.frames[0].remade]


@pytest.mark.slow
@pytest.mark.parametrize("budgeted", [False, True])
def test_what_waits_in_files_comes_back_and_can_be_edited(budgeted, tmp_path):
    def bring_home(decisions):
        values = decisions["frames"][0]["values"]
        moved.append(min(values["away"]))
        values["saved"][moved[0]] = values["away"].pop(moved[0])

    moved: list[str] = []
    disk = offloaded.SLOW if budgeted else offloaded.FAST
    (tmp_path / "files.json").write_text(json.dumps(machine(nvme_read=disk, nvme_write=disk)))
    fields = {
        "hardware": str(tmp_path / "files.json"),
        "offload_activations": "nvme",
        "nvme_dir": str(tmp_path),
        "compute": "aten",
    }
    budget = {"activation_budget_bytes": int(offloaded.least() * 0.9)} if budgeted else {}
    model = offloaded.Net()
    first = planned(model, offloaded.x(), 1, **fields, **budget)
    again = planned(model, offloaded.x(), 1, plan=write(first, tmp_path / "plan.json"), **fields, **budget)
    assert without_measures(again.to_dict()) == without_measures(first.to_dict())
    away = set(first.decisions.frames[0].values.away)
    assert away
    edited = planned(model, offloaded.x(), 1, plan=write(first, tmp_path / "plan.json", bring_home), **fields)
    assert moved[0] in edited.decisions.frames[0].values.saved
    assert set(edited.decisions.frames[0].values.away) == away - set(moved)


@pytest.mark.slow
def test_what_is_random_is_not_made_again(tmp_path, hardware):
    def remake(decisions):
        values = decisions["frames"][0]["values"]
        name = next(n for n, said in values["saved"].items() if said.startswith("b8"))
        values["made_again"][name] = values["saved"].pop(name)

    with pytest.raises(
        ConfigError, match="cannot be made again: it draws random numbers, writes, or is sent"
    ):
        edited(tmp_path, hardware, remake, model=blocks.Net(drop=0.5), inputs=blocks.x())


def given() -> GivenDecisions:
    """Of a frame that saves "mul", makes "add" again, and has "mm" elsewhere."""
    found = GivenDecisions(PlanFile("plan.json", decisions()), [])
    (found.frame,) = decisions().frames
    return found


def test_values_are_compared_by_name():
    words = {"saved": {"mul": ""}, "made_again": {"add": ""}}
    assert given().are_these(SavedValues(**words, away={"mm": ""}), False)
    assert not given().are_these(SavedValues(**words), False)
    # What is in parts is sent to another tier later.
    assert given().are_these(SavedValues(saved={"mul": "", "mm": ""}, made_again={"add": ""}), True)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            SavedValues(saved={"add": ""}),
            "value 'add' is to be made again, and is saved, as far as backward has a use",
        ),
        (
            SavedValues(made_again={"mul": ""}),
            "value 'mul' is to be saved, and is not, as far as backward has a use",
        ),
        (
            SavedValues(saved={"mm": ""}),
            "value 'mm' is to be away, and is not, as far as backward has a use for it",
        ),
    ],
)
def test_a_partition_that_has_them_otherwise_is_refused(found, sentence):
    given().check_values(SavedValues())  # backward may have no use for them
    with pytest.raises(ConfigError) as caught:
        given().check_values(found)
    assert sentence in str(caught.value)
    assert str(caught.value).startswith("plan 'plan.json': ")


def test_values_that_cannot_be_given():
    with pytest.raises(
        ConfigError, match=r"value 'mm' is to be away, and there is no tier for it: give zero.shard"
    ):
        given().named(SavedValues(), (), False)
    with pytest.raises(
        ConfigError, match="with partition_activations=True they are not held to, since tensor-parallel"
    ):
        given().named(SavedValues(), ("nvme",), True)
    named = given().named(SavedValues(), ("nvme",), False)
    assert (named.saved, named.again, named.away) == ({"mul"}, {"add"}, {"mm"})
    assert named.moved == {"mul", "add", "mm"}
    assert given().named(SavedValues(saved={"mul": "", "mm": ""}), ("nvme",), False).moved == {"add", "mm"}
