"""When a backward ends, the gradients of replicated parameters that it brought, from compiled and eager frames alike,
are averaged.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from ..ranks.failure_broadcast import fail_later
from ..ranks.group import Group
from .gradient_average import DOING, GradientAverage
from .parameters import ATTRIBUTE, ReplicatedParameter, averaged_of, group_of, known_of, pg_of, several_ranks


class EndOfBackward:
    """What is averaged when one backward ends."""

    # By the backward: one may run within another. An end lives as long as its backward, also one that fails.
    _of_tasks: weakref.WeakValueDictionary[int, EndOfBackward] = weakref.WeakValueDictionary()

    def __init__(self, task: int) -> None:
        self._task = task
        self._arrived: dict[ReplicatedParameter, None] = {}
        self._changed: ReplicatedParameter | None = None  # written to after a backward under zero.no_sync
        torch.autograd.Variable._execution_engine.queue_callback(self._begin)

    @classmethod
    def pending(cls) -> EndOfBackward | None:
        """Of the backward that runs, where it will average something."""
        return cls._of_tasks.get(torch._C._current_graph_task_id())

    @classmethod
    def that_runs(cls) -> EndOfBackward:
        if (found := cls.pending()) is None:
            task = torch._C._current_graph_task_id()
            found = cls._of_tasks[task] = EndOfBackward(task)
        return found

    def arriving(self, known: ReplicatedParameter) -> None:
        """A gradient of a parameter goes to ``.grad``."""
        self._arrived[known] = None
        if known.written():
            self._changed = known
        known.waiting = True

    @torch._dynamo.disable(reason="a backward within a compiled function ends with it")
    def _begin(self) -> None:
        """Come behind all else that is to be done at this end, in whichever order a rank has come to it."""
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    @torch._dynamo.disable(reason="a backward within a compiled function ends with it")
    @torch.no_grad()
    def _finish(self) -> None:
        EndOfBackward._of_tasks.pop(self._task, None)
        groups: dict[Any, list[ReplicatedParameter]] = {}
        for known in self._arrived:
            groups.setdefault(pg_of(known.group), []).append(known)
        # In one order on all ranks, which may be in several of them.
        left = sorted(groups.values(), key=lambda arrived: _ranks_of(arrived[0].group))
        try:
            while left:
                GradientAverage(left.pop(0)).run(self._changed)
        except BaseException as error:
            for arrived in left:
                if several_ranks(arrived[0].group):
                    fail_later(group_of(arrived[0].group), error, DOING)
            raise


def averages_follow(params: Iterable[object]) -> bool:
    """Whether gradients of ``params`` may be averaged later at the end of the backward that ends now."""
    return EndOfBackward.pending() is not None and bool(averaged_of(params))


def _ranks_of(group: Group | None) -> tuple[list[int], str]:
    pg = pg_of(group)
    return ([], "") if pg is None else (dist.get_process_group_ranks(pg), pg.group_name)


def _arriving(known: ReplicatedParameter) -> None:
    EndOfBackward.that_runs().arriving(known)


def replicated_parameter(param: nn.Parameter) -> ReplicatedParameter | None:
    """What is known of a parameter from now on; None of one that can have no gradient, or has no shape yet."""
    if (known := known_of(param)) is not None:
        return known
    numbers = param.is_floating_point() or param.is_complex()
    if not numbers or not param.is_leaf or is_lazy(param) or param.is_inference():
        return None
    known = param.__dict__[ATTRIBUTE] = ReplicatedParameter(param, _arriving)
    return known
