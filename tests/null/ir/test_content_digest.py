"""Digits that stand for a value."""

from zero_compiler.ir.content_digest import digest_of


def test_equal_values_have_equal_digests_whatever_the_order_of_keys():
    assert digest_of({"a": 1, "b": [2]}) == digest_of({"b": [2], "a": 1})
    assert digest_of("a") == "ca978112ca1bbdca"
    assert len({digest_of(v) for v in ("a", ["a"], {"a": 1}, {"a": 2})}) == 4
