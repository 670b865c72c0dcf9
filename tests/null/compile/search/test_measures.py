"""Each measure for a budget: what the first rank decides of it, and what a trial leaves behind."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from zero_compiler.compile.plan_choice import PlanChoice
from zero_compiler.compile.search import measures as measures_module
from zero_compiler.compile.search.measures import Measures
from zero_compiler.compile.search.rank_decisions import RankDecisions
from zero_compiler.errors import MemoryBudgetError
from zero_compiler.ir.facts import ParamRef
from zero_compiler.plan.activation_search import Phases
from zero_compiler.sharded.agreed_choices import AgreedChoices


def measures_of(state: SimpleNamespace, overrun: SimpleNamespace, weight_tiles: object = None) -> Measures:
    def adopt(choice: PlanChoice) -> None:
        state.choice = choice

    return Measures(state, overrun, weight_tiles, RankDecisions(state), adopt)


def fitted(decided: str | None = None) -> tuple[Phases, SimpleNamespace]:
    """Phases of a frame whose plan fits in no buckets, and its state. Activations fit in the largest buckets alone, and
    what was tried for them elsewhere is left behind. The first rank wants what is ``decided``, else what this one does.
    """
    state = SimpleNamespace(
        choice=PlanChoice(80_000),
        smaller_buckets=lambda: [40_000, 20_000, 10_000],
        first=SimpleNamespace(agreed=AgreedChoices()),
        settled=lambda key: None,
        loader=SimpleNamespace(decide=lambda first, key, text: decided or text),
        tried=[],
    )

    def set_bucket_bytes(nbytes: int, why: str) -> None:
        state.choice = replace(state.choice, bucket_bytes=nbytes)

    state.set_bucket_bytes = set_bucket_bytes
    state.settled = state.first.agreed.decided.get

    def planned() -> Phases:
        choice = state.choice
        state.tried.append((choice.bucket_bytes, choice.tile_mlp))
        if choice.bucket_bytes < 80_000:
            state.choice = replace(choice, tile_mlp=True)
            raise MemoryBudgetError(f"no activations in {choice.bucket_bytes}")
        return {}

    measures = measures_of(state, SimpleNamespace(over_in_small_tiles=lambda graphs, budget_bytes: 1))
    return measures.fit_buckets("buckets", planned, {}, 1 << 20), state


def test_a_size_in_which_activations_do_not_fit_leaves_nothing_behind():
    _, state = fitted()
    assert state.choice == PlanChoice(80_000)
    assert state.tried == [(size, False) for size in (40_000, 20_000, 10_000)]


@pytest.mark.parametrize("decided", ["40000", "10000"])
def test_a_size_that_the_first_rank_decides_and_that_does_not_do_here_is_refused(decided):
    """And is not said of phases that were planned in another one."""
    with pytest.raises(MemoryBudgetError, match=f"no activations in {decided}"):
        fitted(decided)


@pytest.mark.parametrize("within", ["_within_heads", "_within_memory"])
@pytest.mark.parametrize("wanted", [False, True])
def test_a_trial_that_the_first_rank_drops_leaves_nothing_behind(within, wanted, monkeypatch):
    """Ranks ask from the state in which those are that try nothing: what is asked is named by the order of weights."""
    owner = ParamRef("model", "w")
    asked = []

    def decide(first, key, text):
        asked.append(key)
        return str(wanted)

    state = SimpleNamespace(
        choice=PlanChoice(80_000, order=(owner,), away=frozenset({"a"})),
        first=SimpleNamespace(agreed=AgreedChoices()),
        settled=lambda key: None,
        config=SimpleNamespace(tile_bytes=None),
        loader=SimpleNamespace(decide=decide),
    )
    state.settled = state.first.agreed.decided.get
    before = state.choice

    def cut(nbytes):
        gathered = frozenset({owner})
        state.choice = replace(
            state.choice, order=(owner, owner), away=frozenset({"b"}), backward_params=gathered
        )
        return {"forward": None, "backward": None}

    overrun = SimpleNamespace(
        over=lambda graphs, budget_bytes: 1,
        held_over=lambda graphs: False,
        held_bytes=None,
        over_in_small_tiles=lambda graphs, budget_bytes: 1,
    )
    least = SimpleNamespace(least_peak=lambda graphs, budget_bytes: 100 - 10 * len(state.choice.order))
    monkeypatch.setattr(measures_module, "within_memory", lambda cut, graphs, over, held: graphs)
    measures = measures_of(state, overrun, least)
    key = measures.decisions.key({"_within_heads": "heads", "_within_memory": "mlp-memory"}[within])
    whole = {}
    out = getattr(measures, within)(cut, whole, 1)
    after = state.choice
    assert (out is whole) == (not wanted)
    assert (after == before) == (not wanted)
    assert after.away == frozenset({"b"} if wanted else {"a"})
    assert asked == [key]
