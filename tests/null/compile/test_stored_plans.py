"""A second start of the same job takes the plan that the first one has searched for."""

from __future__ import annotations

import json

import pytest
import torch
from null.compile.test_given_decisions import Deep, rows
from null.edited import without_measures

import zero_compiler as zero
from zero_compiler.compile import stored_plans
from zero_compiler.compile.phase_lowering import Lowering
from zero_compiler.errors import ZeroError

BUDGET = {"memory_budget_bytes": 700_000}


@pytest.fixture
def start(monkeypatch, tmp_path, caplog):
    """Starts a job, in a cache folder of its own; gives its loss, its plan, and what it said."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def run(model=Deep, inputs=None, optimizer="adamw", **fields):
        caplog.clear()
        torch._dynamo.reset()
        torch.manual_seed(0)
        sharded = zero.shard(
            model(),
            hardware="laptop",
            device="cpu",
            compute="aten",
            optimizer=optimizer,
            **(fields or BUDGET),
        )
        loss = torch.compile(sharded, backend="zero")(*(inputs or rows()))
        loss.backward()
        said = [r.getMessage() for r in caplog.records if "earlier start" in r.getMessage()]
        told = zero.inspect(sharded)
        return loss.item(), told, said

    return run


def plan_of(told):
    """But for where it comes from."""
    data = told.to_dict()
    for frame in data["frames"]:
        frame.pop("stored", None)
        frame.pop("search_ended", None)
    return without_measures(data)


def stored():
    return sorted(stored_plans.folder().glob("*.json"))


def test_a_second_start_makes_the_same_plan_without_a_search(start, monkeypatch):
    loss, first, said = start()
    assert not said
    assert first.frames[0].plans_tried > 0
    (file,) = stored()

    def none(*_, **__):
        raise AssertionError("something was tried")

    monkeypatch.setattr(Lowering, "trial_peak", none)
    monkeypatch.setattr(Lowering, "trials_of", none)
    again_loss, again, said = start()
    assert said == [
        f"frame {again.frames[0].index}: the plan that an earlier start has found is taken from {file}"
    ]
    assert again_loss == loss
    assert plan_of(again) == plan_of(first)
    assert f"what an earlier start has found ({file})" in str(again)
    assert stored() == [file]


@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    [
        {"memory_budget_bytes": 690_000},
        {"inputs": rows(16), **BUDGET},
        {"optimizer": "sgd", **BUDGET},
        {"bucket_bytes": 1000, **BUDGET},
    ],
)
def test_another_job_searches_for_its_own(start, other):
    start()
    _, told, said = start(**other)
    assert not said
    assert not told.frames[0].stored
    assert len(stored()) == 2


@pytest.mark.slow
def test_other_code_and_another_machine_search_again(start, monkeypatch):
    start()
    monkeypatch.setattr(stored_plans, "_code", lambda: "another")
    assert not start()[2]
    assert len(stored()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("spoil", ["cut", "another byte", "another form", "empty"])
def test_a_damaged_file_is_none_and_is_written_anew(start, spoil):
    start()
    (file,) = stored()
    text = file.read_text()
    changed = {
        "cut": text[: len(text) // 2],
        "another byte": text.replace('"bucket_bytes": ', '"bucket_bytes": 1', 1),
        "another form": json.dumps([1]),
        "empty": "",
    }
    file.write_text(changed[spoil])
    assert not start()[2]
    assert file.read_text() == text
    assert len(start()[2]) == 1


@pytest.mark.slow
def test_a_plan_that_cannot_be_held_to_is_an_error_once(start):
    """One that was written so by hand: its digest is right."""
    start()
    (file,) = stored()
    data = json.loads(file.read_text())
    data["plan"]["decisions"]["frames"][0]["distances"]["forward"]["of no unit"] = 3
    data["digest"] = stored_plans.digest_of(data["plan"])
    file.write_text(json.dumps(data))
    with pytest.raises(ZeroError, match=f"plan '{file}': distances.forward names 'of no unit'"):
        start()
    assert stored() == []
    assert not start()[2]


def test_nothing_is_stored_where_nothing_is_searched_for(start):
    start(stage=3)
    assert stored() == []


def test_a_folder_that_takes_no_files_is_no_error(start):
    stored_plans.folder().parent.mkdir(parents=True)
    stored_plans.folder().touch()
    start()
    assert not start()[2]


@pytest.mark.slow
def test_the_oldest_make_room(start, monkeypatch):
    monkeypatch.setattr(stored_plans, "_MOST_FILES", 2)
    for budget in (700_000, 690_000, 680_000):
        start(memory_budget_bytes=budget)
    assert len(stored()) == 2
