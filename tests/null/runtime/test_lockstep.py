"""Ranks as threads of one process, which the reference executor runs in step."""

from __future__ import annotations

import lockstep
import pytest
from lockstep import Lockstep

from zero_compiler.errors import TransferError


def test_each_rank_gets_its_own_result():
    lock = Lockstep(3)

    def body(rank: int) -> tuple[int, int]:
        return lock.together(rank, lambda given: [10 * g for g in given]), lock.together(rank, list)

    assert lock.map(body) == [(0, 0), (10, 1), (20, 2)]


@pytest.mark.parametrize("where", ["rank", "program"])
def test_the_error_of_a_rank_reaches_the_caller(where):
    lock = Lockstep(2)

    def broken(given):
        raise ValueError("in a Program")

    def body(rank: int) -> None:
        if where == "rank" and rank == 1:
            raise ValueError("in a rank")
        lock.together(rank, broken if where == "program" else list)

    for _ in range(2):
        with pytest.raises(ValueError, match=f"in a {'rank' if where == 'rank' else 'Program'}"):
            lock.map(body)
    assert lock.map(lambda rank: lock.together(rank, list)) == [0, 1]


def test_who_does_not_come_is_named(monkeypatch):
    monkeypatch.setattr(lockstep, "_PATIENCE_S", 0.2)
    lock = Lockstep(3)

    def body(rank: int) -> None:
        if rank != 1:
            lock.together(rank, list)

    with pytest.raises(TransferError, match=r"ranks \[0, 2\] waited .*; ranks \[1\] have returned"):
        lock.map(body)
    assert lock.map(lambda rank: lock.together(rank, list)) == [0, 1, 2]
