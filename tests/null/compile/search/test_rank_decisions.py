"""What was decided for all ranks holds for one that compiles again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from zero_compiler.compile.plan_choice import PlanChoice
from zero_compiler.compile.search.rank_decisions import FIRST, LAST, RankDecisions
from zero_compiler.ir.facts import ParamRef


def decisions(decided: dict[str, str], asked: list[str]) -> RankDecisions:
    def decide(first, key, text):
        asked.append(key)
        return decided.setdefault(key, text)

    return RankDecisions(
        SimpleNamespace(
            choice=PlanChoice(1, order=(ParamRef("model", "w"),)),
            first=SimpleNamespace(),
            settled=decided.get,
            loader=SimpleNamespace(decide=decide),
        )
    )


def test_what_was_decided_is_asked_for_once():
    asked: list[str] = []
    of = decisions({}, asked)
    assert of.decided("heads") is None
    assert of.agreed("heads", True)
    assert of.decided("heads")
    assert of.agreed("heads", False)  # this rank finds otherwise, and holds to it
    assert asked == [of.key("heads")]


@pytest.mark.parametrize(("order", "held"), [(None, True), (LAST, True), (FIRST, False)])
def test_a_measure_of_an_order_that_was_dropped_is_not_held_to(order, held):
    decided: dict[str, str] = {}
    of = decisions(decided, [])
    of.agreed("heads", True)
    if order is not None:
        decided[of.key("order")] = order
    assert of.is_held_to("heads") is held


def test_a_frame_without_weights_decides_for_itself():
    of = decisions({}, asked := [])
    of.state.first = None
    assert (of.agreed("heads", True), of.agreed("heads", False), of.decided("heads")) == (True, False, None)
    assert asked == []
