"""The cheapest option of each of many things within rooms of bytes, beside every choice that there is."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from zero_compiler.cost.assign import Option, assign

options = st.builds(Option, st.tuples(st.integers(0, 5), st.integers(0, 5)), st.integers(0, 9).map(float))


@given(
    st.lists(st.lists(options, min_size=1, max_size=3).map(tuple), min_size=1, max_size=5),
    st.tuples(st.integers(0, 12), st.none() | st.integers(0, 12)),
)
@settings(max_examples=60, deadline=None)
def test_no_choice_that_fits_costs_less(items, rooms):
    def fits(chosen):
        return all(room is None or sum(o.nbytes[k] for o in chosen) <= room for k, room in enumerate(rooms))

    costs = [sum(o.cost for o in chosen) for chosen in itertools.product(*items) if fits(chosen)]
    found = assign(items, rooms)
    if found is None:
        assert not costs
    else:
        chosen = [item[k] for item, k in zip(items, found, strict=True)]
        assert fits(chosen)
        assert sum(o.cost for o in chosen) == min(costs)


def test_many_equal_things_take_no_longer_than_their_sums():
    items = [(Option((3,), 1.0), Option((0,), 2.0))] * 2000
    found = assign(items, [3000])
    assert found is not None
    assert sum(3 for k in found if k == 0) == 3000
