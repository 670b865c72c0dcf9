"""In which collective of ``torch.distributed`` a thread of this process waits, and how many it has entered.

A rank that waits for others in a collective of the user's, while they wait for it in a call of this package, would wait
for the timeout of the process group. torch does not say in which collective a process is, so the thread that serves the
peers' connections reads it from the stacks of the threads that may be in one. It only looks: torch is not patched.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

from ..call_stack import locals_of

_OF_TORCH = frozenset({dist.distributed_c10d.__file__, dist.c10d_logger.__file__, collectives.__file__})
# In these one rank may wait that another one has long left: they go from one rank or to one.
_ONE_SIDED = frozenset(
    "send recv isend irecv batch_isend_irecv send_object_list recv_object_list broadcast broadcast_object_list reduce "
    "gather gather_object scatter scatter_object_list".split()
)


def entered(pg: Any) -> int:
    """How many collectives this rank has entered over a process group; 0 where its backend does not count them."""
    try:
        return int(pg._get_sequence_number_for_group())
    except RuntimeError:
        return 0


def waited_in(pg: object, threads: Iterable[int | None]) -> str | None:
    """The function of ``torch.distributed`` over ``pg`` in which one of these ``threads`` of this process waits; None
    where none does, or where it may wait for one rank alone."""
    frames = sys._current_frames()
    try:
        found = [_collective_of(frames.get(thread or 0), pg) for thread in threads]
    finally:
        # This function's own frame is among them: the circle would keep what all threads have on their stacks.
        frames.clear()
    return next((name for name in found if name is not None), None)


def _collective_of(frame: types.FrameType | None, pg: object) -> str | None:
    while frame is not None and frame.f_code.co_filename == torch._ops.__file__:
        frame = frame.f_back
    names, outermost = [], None
    while frame is not None and frame.f_code.co_filename in _OF_TORCH:
        if frame.f_code.co_name != "wrapper":
            names.append(frame.f_code.co_name)
            outermost = frame
        frame = frame.f_back
    if (
        outermost is None
        or _ONE_SIDED.intersection(names)
        or not _is_over(locals_of(outermost).get("group"), pg)
    ):
        return None
    return names[-1]


def _is_over(group: object, pg: object) -> bool:
    """Whether a function of ``torch.distributed`` that was given this ``group`` speaks to the ranks of ``pg``."""
    if group is None:
        return pg is dist.group.WORLD
    return group is pg or (isinstance(group, str) and group == getattr(pg, "group_name", None))
