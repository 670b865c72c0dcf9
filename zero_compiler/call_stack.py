"""Python's call stack: memory for it in one piece, where a function calls many others; and the variables on it."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")
_OF_FRAME_ALONE = 3  # references to a dict: of its frame, of a variable, of the argument that counts
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


def locals_of(frame: types.FrameType) -> dict[str, Any]:
    """The variables of a function that runs, none of which is kept by that.

    Up to Python 3.12 ``frame.f_locals`` makes a dict that the frame then keeps until it ends: a model or a batch that
    the function has let go of would live on in it. So it is emptied, unless another has it too (a debugger, or the
    function itself, by ``locals()``). From 3.13 on it is a view.
    """
    variables = frame.f_locals
    found = dict(variables)
    of_function = bool(
        frame.f_code.co_flags & inspect.CO_OPTIMIZED
    )  # else they are those of a module or class
    if of_function and isinstance(variables, dict) and sys.getrefcount(variables) == _OF_FRAME_ALONE:
        variables.clear()
    return found
