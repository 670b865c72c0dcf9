"""Calls in a loop ask the system for no memory, wherever on the stack the loop stands. Looks at variables keep none."""

from __future__ import annotations

import gc
import inspect
import resource
import sys
import weakref

import pytest

from zero_compiler.call_stack import in_one_piece, locals_of

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


class _Batch:
    pass


def _seen() -> dict[str, object]:
    return locals_of(sys._getframe(1))


def test_a_look_at_the_variables_of_a_function_keeps_none_of_them():
    batch = _Batch()
    kept = weakref.ref(batch)
    assert _seen()["batch"] is batch
    assert isinstance(batch, _Batch)  # it has its variables still
    batch = None
    gc.collect()
    assert kept() is None


def test_a_look_at_variables_leaves_what_others_have_of_them():
    batch = _Batch()
    held = locals()
    assert _seen()["batch"] is batch
    assert held["batch"] is batch
    of_a_module: dict[str, object] = {"look": _seen}
    exec("found = look()\nafter = found is not None", of_a_module)
    assert of_a_module["after"] is True
