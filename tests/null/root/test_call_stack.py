"""Calls in a loop ask the system for no memory, wherever on the stack the loop stands."""

from __future__ import annotations

import inspect
import resource

import pytest

from zero_compiler.call_stack import in_one_piece

CALLS = 200


def _identity(x: int) -> int:
    return x


def _faults_at(depth: int) -> int:
    """Pages that are touched for the first time while a function so far down calls another ``CALLS`` times."""
    if depth:
        return _faults_at(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for i in range(CALLS):
        _identity(i)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _worst() -> int:
    return max(map(_faults_at, range(400)))


def test_calls_in_a_loop_take_no_memory_at_any_depth():
    in_one_piece(_worst)()  # whatever else is new
    assert in_one_piece(_worst)() < CALLS // 4


def test_a_function_stays_what_it_is():
    @in_one_piece
    def add(a: int, *, b: int = 2) -> int:
        """Adds."""
        if b < 0:
            raise ValueError("negative")
        return a + b

    assert (add(1), add(1, b=3), add.__doc__) == (3, 4, "Adds.")
    assert list(inspect.signature(add).parameters) == ["a", "b"]
    with pytest.raises(ValueError, match="negative"):
        add(1, b=-1)
