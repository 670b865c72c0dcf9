"""Python's call stack: memory for it in one piece, where a function calls many others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")
_SLOTS = 1 << 17  # values on the stack of one function: 1 MiB, so that its piece is of 2 and leaves 1


def in_one_piece(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """``function``, whose calls of other functions, and what these call, do not ask the system for memory.

    CPython lays what Python functions need while they run into pieces of 16 KiB (``push_chunk`` in Python/pystate.c,
    seen in 3.11 to 3.13). It takes a piece when a call does not fit the one before, and gives it back when that call
    returns: a loop that stands at the end of a piece takes one in every iteration, with a page that is touched for the
    first time. A fifth of the CPU time of the plan of a trillion parameters in README.md went there. A piece is
    as large as the call that begins it needs: so ``function`` is called by one that asks for a stack of 1 MiB, of
    which it uses none.
    """

    @functools.wraps(function)
    def call(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        return function(*args, **kwargs)

    made: Any = call
    made.__code__ = made.__code__.replace(co_stacksize=_SLOTS)
    return call
