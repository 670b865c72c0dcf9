"""Which parameter of one rank is which of another's: by values, names and order, on lists that are made by hand."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from zero_compiler.errors import RankMismatchError
from zero_compiler.replicated.matching import (
    Described,
    Matched,
    NeverAveraged,
    find_like,
    match,
    names_agree,
    not_found,
    value_of,
)


def described(
    name: str, value: int = 0, shape: tuple[int, ...] = (2,), place: tuple[int, int] = (0, 1)
) -> Described:
    return Described(name, shape, "torch.float32", value, place, place)


def pairs(lists):
    """Names of each parameter on the ranks that have it."""
    return [{rank: lists[rank][i].name for rank, i in each.at.items()} for each in match(lists)]


def test_equal_lists_are_matched_in_their_order():
    mine = [described("b", 1), described("a", 2), described("a", 2)]
    assert [each.at for each in match([mine, mine])] == [{0: 0, 1: 0}, {0: 1, 1: 1}, {0: 2, 1: 2}]


def test_another_order_is_matched_by_values_and_then_by_names():
    lists = [
        [described("x.weight", 1), described("x.bias"), described("y.bias")],
        [described("y.bias"), described("x.bias"), described("x.weight", 1)],
    ]
    assert pairs(lists) == [{0: name, 1: name} for name in ("x.weight", "x.bias", "y.bias")]


def test_names_of_a_module_around_another():
    lists = [[described("0.1.weight", 1)], [described("1.weight", 1)]]
    assert pairs(lists) == [{0: "0.1.weight", 1: "1.weight"}]
    assert names_agree("weight", "a.weight")
    assert not names_agree("weight", "a.overweight")
    assert not names_agree("a.weight", "b.weight")


def test_a_parameter_that_one_rank_has_not_used():
    lists = [[described("a", 1)], [described("a", 1), described("b", 1)]]
    assert pairs(lists) == [{0: "a", 1: "a"}, {1: "b"}]


def test_what_nothing_tells_apart_is_refused():
    zeros = [described("weight", place=(i, 2)) for i in range(2)]
    for lists in (
        [zeros[:1], zeros[1:]],  # each rank has used another one of two copies
        [zeros[:1], zeros],  # or one of them both
        [[described("weight")], [described("0.weight"), described("1.weight")]],
        [zeros[:1], [described("norm.weight", place=(1, 2))]],
    ):
        with pytest.raises(RankMismatchError, match="several parameters 'weight'"):
            match(lists)
    assert [each.at for each in match([zeros, zeros])] == [{0: 0, 1: 0}, {0: 1, 1: 1}]


def test_copies_are_told_apart_by_what_is_averaged_already():
    """Of a module that trains, one rank has a copy too, which never did."""
    mine = Described("rare", (2,), "torch.float32", 0, (0, 1), (0, 1), companion=4)
    copied = Described("rare", (2,), "torch.float32", 0, (1, 2), (1, 2), companion=None)
    theirs = Described("rare", (2,), "torch.float32", 0, (0, 2), (0, 2), companion=4)
    assert [each.at for each in match([[mine], [copied, theirs]])] == [{0: 0, 1: 1}, {1: 0}]
    assert [each.at for each in match([[copied, theirs], [mine]])] == [{0: 1, 1: 0}, {0: 0}]
    two = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    wanted = Described("rare", (2,), "torch.float32", value_of(two[0]))
    known = [NeverAveraged("rare", two[0], "copy"), NeverAveraged("rare", two[1], "model")]
    assert find_like(wanted, known, {"model"}) is two[1]
    assert find_like(wanted, known, set()) is None
    assert find_like(wanted, [NeverAveraged("rare", p, "model") for p in two], {"model"}) is None


def test_what_one_rank_alone_has_besides_makes_no_difference():
    assert pairs([[described("weight", place=(1, 2))], [described("weight")]]) == [{0: "weight", 1: "weight"}]
    # Another parameter whose name ends in that of this one: the whole name says which is meant.
    more = Described("norm.weight", (2,), "torch.float32", 0, (0, 1), (1, 3))
    other = [described("b", 5), more]
    assert pairs([other[::-1], other]) == [{0: "norm.weight", 1: "norm.weight"}, {0: "b", 1: "b"}]


def test_the_error_of_one_that_is_not_found_says_why():
    lists = [[described("a", 1)], [described("a", 2)]]
    found = match(lists)
    assert "different values of parameter 'a'" in str(not_found(found[0], found, 2))
    lone = Matched(described("b", 3), {1: 0})
    text = str(not_found(lone, [lone, Matched(described("c", 4, (5,)), {0: 0})], 2))
    assert "'b' of shape [2]" in text
    assert (
        "on rank 1 of 2, and none, or several, that began with the same values are known on rank 0; there 'c'"
        in text
    )


def test_a_parameter_that_this_rank_knows():
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    known = [NeverAveraged("a.bias", one), NeverAveraged("b.bias", other)]
    assert find_like(described("b.bias", value_of(one)), known, ()) is other
    assert find_like(described("bias", value_of(one)), known, ()) is None  # it may be either
    assert find_like(described("a.bias", value_of(one) + 1), known, ()) is None
    assert find_like(described("a.bias", value_of(one), (3,)), known, ()) is None
    alike = [NeverAveraged("bias", one), NeverAveraged("bias", other)]
    assert find_like(described("bias", value_of(one), place=(1, 2)), alike, ()) is None


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_of_one_script_every_rank_finds_the_same(data):
    """Ranks that use random parameters of one model, in random orders: each is matched with itself."""
    names = [f"{part}.{what}" for part, what in itertools.product("abc", ("weight", "bias"))]
    model = [described(name, 0 if "bias" in name else i) for i, name in enumerate(names)]
    lists = [
        data.draw(st.lists(st.sampled_from(model), unique=True, min_size=1))
        for _ in range(data.draw(st.integers(2, 4)))
    ]
    found = match(lists)
    for each in found:
        assert {lists[rank][i] for rank, i in each.at.items()} == {each.described}
        assert set(each.at) == {rank for rank, one in enumerate(lists) if each.described in one}
    assert len(found) == len({each for one in lists for each in one})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (5, 7), (1 << 19,)])
def test_the_number_of_values_depends_on_their_places_and_signs(shape, dtype):
    one = nn.Parameter(torch.randn(shape).to(dtype))
    assert value_of(one) == value_of(nn.Parameter(one.detach().clone()))
    if one.numel() > 1:
        changed = [one.detach().clone() for _ in range(4)]
        changed[0].view(-1)[[0, -1]] = changed[0].view(-1)[[-1, 0]]
        changed[1].neg_()
        changed[2].view(-1)[:2].neg_()
        changed[3].view(-1)[::2].neg_()
        assert len({value_of(x) for x in [one, *changed]}) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_pattern_of_signs_is_another_number(dtype):
    values = torch.randn(12).to(dtype)
    patterns = itertools.product((1, -1), repeat=12)
    found = {value_of(nn.Parameter(values * torch.tensor(signs).to(dtype))) for signs in patterns}
    assert len(found) == 2**12
