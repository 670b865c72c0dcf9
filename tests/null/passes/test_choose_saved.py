"""What forward saves within a number of bytes: the best choice at a price, and the budget kept."""

from __future__ import annotations

import itertools

import pytest
from expecttest import TestCase
from hypothesis import given, settings
from hypothesis import strategies as st
from null.graphs import Build, aten, lower_joint
from null.passes.test_activations import SPEC, two_layers

from zero_compiler.cost.cost import CostModel
from zero_compiler.errors import MemoryBudgetError, PassRefused
from zero_compiler.passes import NamedValues
from zero_compiler.passes.activations import Activations
from zero_compiler.passes.choose_saved import choose


class Goldens(TestCase):
    def test_choose_saved(self):
        both, one = 2 * 5 * 8 * 4, 5 * 8 * 4
        self.assertExpectedInline(
            tagged(two_layers(), activation_bytes=both),
            """\
w1_full: MUST_RECOMPUTE
t_default: MUST_RECOMPUTE
mm_default: MUST_SAVE
gelu_default: MUST_SAVE
w2_full: MUST_RECOMPUTE
t_default_1: MUST_RECOMPUTE""",
        )
        self.assertExpectedInline(
            tagged(two_layers(), activation_bytes=one),
            """\
w1_full: MUST_RECOMPUTE
t_default: MUST_RECOMPUTE
mm_default: MUST_RECOMPUTE
gelu_default: MUST_SAVE
w2_full: MUST_RECOMPUTE
t_default_1: MUST_RECOMPUTE""",
        )

    def test_named_values(self):
        named = NamedValues(frozenset({"gelu_default"}), frozenset({"mm_default"}), frozenset())
        self.assertExpectedInline(
            tagged(two_layers(), named=named),
            """\
w1_full: MUST_RECOMPUTE
t_default: MUST_RECOMPUTE
mm_default: MUST_RECOMPUTE
gelu_default: MUST_SAVE
w2_full: MUST_RECOMPUTE
t_default_1: MUST_RECOMPUTE""",
        )


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"saved": {"nothing"}, "moved": {"nothing"}}, "there is no value 'nothing' in forward"),
        (
            {"saved": {"t_default"}, "moved": {"t_default"}},
            "value 't_default' cannot be saved: it is made again by what it is",
        ),
        (
            {"again": {"mm_default"}, "moved": {"mm_default"}},
            "value 'mm_default' cannot be made again: it draws random numbers, writes, or is sent between ranks, or it "
            "reads a weight that backward does not gather",
        ),
        (
            {"away": {"gelu_default"}, "moved": {"gelu_default"}},
            "value 'gelu_default' cannot wait elsewhere: no tier was given for activations, the caller holds it, or it "
            "is so small that a transfer takes longer to begin than to move it",
        ),
    ],
)
def test_names_of_what_cannot_be_so_are_refused(fields, sentence):
    named = NamedValues(**{f: frozenset(fields.get(f, ())) for f in ("saved", "again", "away", "moved")})
    with pytest.raises(PassRefused) as caught:
        # Costly operators are not run again here.
        lower_joint(two_layers(), recompute=False, machine=SPEC, forward_outputs=1, named=named)
    assert str(caught.value) == sentence


def tagged(b: Build, **fields) -> str:
    """The policy of every value of forward that has one."""
    lower_joint(b, recompute=True, machine=SPEC, forward_outputs=1, **fields)
    rows = []
    for n in b.graph.nodes:
        policy = n.meta.get("recompute")
        if policy is not None:
            rows.append(f"{n.name}: {policy.name}")
    return "\n".join(rows)


@st.composite
def chains(draw):
    """A joint graph in which each value reads one or two before it, and backward wants some of them."""
    b = Build()
    values = [b.input("primals_1", 2)]
    tangent = b.input("tangents_1", 2)
    for _ in range(draw(st.integers(2, 7))):
        i, k = draw(st.integers(0, len(values) - 1)), draw(st.integers(0, len(values) - 1))
        values.append(b.op(aten.add.Tensor, values[i], values[k]))
    wanted = draw(st.sets(st.integers(1, len(values) - 1), min_size=1))
    grad = tangent
    for k in sorted(wanted):
        grad = b.op(aten.mul.Tensor, grad, values[k])
    b.done(values[-1], grad)
    acts = Activations(b.graph, 1, CostModel(SPEC), fused=False, small_bytes=0, recompute=True)
    for v in values[1:]:
        acts.us[v], acts.bytes[v] = float(draw(st.integers(0, 20))), draw(st.integers(1, 20))
    acts.required = set(values)
    return acts, values[1:]


@given(chains(), st.sampled_from([0.0, 0.5, 1.0, 3.0, 1000.0]))
@settings(max_examples=80, deadline=None)
def test_at_a_price_no_choice_is_better(drawn, price):
    acts, values = drawn
    every = [
        acts.choice(frozenset(again))
        for n in range(len(values) + 1)
        for again in itertools.combinations(values, n)
    ]
    got = acts.choice(acts.cheapest(price))
    best = min(c.us + price * c.saved_bytes for c in every)
    assert got.us + price * got.saved_bytes == pytest.approx(best)


def least_of(acts: Activations) -> int:
    with pytest.raises(MemoryBudgetError) as caught:
        choose(acts, -1)
    return caught.value.least_bytes


@given(chains(), st.integers(1, 60))
@settings(max_examples=80, deadline=None)
def test_a_budget_is_kept_and_refused_only_with_the_least_found(drawn, budget):
    acts, _ = drawn
    if budget < (least := least_of(acts)):
        with pytest.raises(MemoryBudgetError) as caught:
            choose(acts, budget)
        assert caught.value.least_bytes == least
    else:
        assert choose(acts, budget).peak_bytes <= budget
