"""Ranges in the traces of ``torch.profiler``: what a thread does, and which transfers are under way meanwhile.

Without a profiler a range costs the question whether there is one. Every name begins with that of the lane, since a
trace does not always know which row is whose: "zero compute: ..." is what a thread does itself, and "zero nvme-read:
..." a transfer that is under way. The trace of a plan (``zero.inspect(model).save_trace``) has the same names.
"""

from __future__ import annotations

import contextlib
import threading
from contextlib import AbstractContextManager

from . import torch_cpp

COMPUTE = "compute"  # the lane of what a thread does itself, as `zero_compiler.ir.transfers` has it

name_on = torch_cpp.name_on  # of what is done or moved on a lane, in traces
profiled = torch_cpp.profiled  # whether something listens to ranges of this thread

_innermost = threading.local()


def lane_and_what(name: str) -> tuple[str, str]:
    """Of a name that :func:`name_on` has made."""
    lane, _, what = name.removeprefix("zero ").partition(": ")
    return lane, what


def started_here() -> str:
    """The label of the transfer that this thread starts at the moment; "" where it is doing something else."""
    return getattr(_innermost, "starts", "")


class Range:
    """A range of this thread, for as long as the context lasts.

    Args:
        what: what the thread does.
        starts: label of the transfer that it starts by that, if any.
    """

    __slots__ = ("_outer", "_range", "_starts")

    def __init__(self, what: str, starts: str = "") -> None:
        self._starts, self._range = starts, torch_cpp.Range(COMPUTE, what)

    def __enter__(self) -> None:
        self._outer = started_here()
        _innermost.starts = self._starts
        self._range.__enter__()

    def __exit__(self, *exc: object) -> None:
        self._range.__exit__()
        _innermost.starts = self._outer


_nothing = contextlib.nullcontext()


def ranged(what: str, starts: str = "") -> AbstractContextManager[None]:
    """A :class:`Range` where a profiler runs, else nothing."""
    return Range(what, starts) if profiled() else _nothing


class Lanes:
    """Transfers that are under way on threads which torch's profiler does not know, each lane as a row of its own."""

    def __init__(self) -> None:
        self._lanes: dict[str, torch_cpp.Lane] = {}

    def begin(self, lane: str, what: str) -> tuple[object, torch_cpp.Lane] | None:
        """A transfer begins on ``lane``. It is called as the thread says that starts it, or else ``what`` it is.

        Returns:
            What is held until the transfer is done, and its row, to be settled then; None where no profiler runs.
        """
        if not profiled():
            if self._lanes:
                self._lanes.clear()  # with their threads
            return None
        row = self._lanes.get(lane)
        if row is None:
            row = self._lanes[lane] = torch_cpp.Lane(lane)
        held = row.begin(started_here() or what)
        return None if held is None else (held, row)
