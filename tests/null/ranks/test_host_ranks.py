"""Which ranks of a host share second shards, and where they cannot."""

from __future__ import annotations

import pytest

from zero_compiler.errors import ShardError
from zero_compiler.ranks.host_ranks import ranks_of_host


def hosts(text):
    """By a letter for each rank, on which host it is."""
    return {rank: ord(letter) for rank, letter in enumerate(text)}


def test_those_of_a_host_share_where_there_are_several_hosts():
    assert ranks_of_host([range(4)], hosts("aabb")) == 2
    assert ranks_of_host([range(6)], hosts("aabbcc")) == 2
    assert ranks_of_host([[0, 2], [1, 3]], hosts("aaaa")) == 0
    # Replicas, each over two hosts; and each within one.
    assert ranks_of_host([[0, 1, 4, 5], [2, 3, 6, 7]], hosts("aaaabbbb")) == 2
    assert ranks_of_host([[0, 1], [2, 3]], hosts("aabb")) == 0
    # A mesh in another order: ranks gather in that of their process group.
    assert ranks_of_host([[0, 2, 4, 1, 3, 5]], hosts("aaabbb")) == 3


@pytest.mark.parametrize(
    ("rows", "where", "sentence"),
    [
        (
            [range(4)],
            None,
            "needs to know on which host each rank is, and one of them cannot tell (it reads /proc)",
        ),
        ([range(4)], hosts("aaab"), "and hosts have ranks 0, 1, 2; 3; leave it out"),
        (
            [range(4)],
            hosts("abab"),
            "with numbers that follow each other, and hosts have ranks 0; 1; 2; 3; leave it",
        ),
        (
            [[0, 2, 4, 1, 3, 5]],
            hosts("ababab"),
            "with numbers that follow each other, and hosts have ranks 0; 1; 2; 3; 4; 5; leave it",
        ),
        (
            [range(2)],
            hosts("ab"),
            "would keep every weight whole, since each of 2 hosts has one rank; leave it out",
        ),
        (
            [[0, 1], [2, 3]],
            hosts("aaab"),
            "needs every replica to lie on as many hosts as the others, and they lie on 1, 2",
        ),
    ],
)
def test_other_places_are_refused(rows, where, sentence):
    with pytest.raises(ShardError, match='^second_shard="host" ') as error:
        ranks_of_host(rows, where)
    assert sentence in str(error.value)
