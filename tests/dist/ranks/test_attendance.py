"""Whether all ranks come to a call, on two ranks."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from dist.cases import Cases
from torch.distributed import _functional_collectives as collectives

from zero_compiler.ranks.attendance import all_come
from zero_compiler.ranks.call_handshake import begin
from zero_compiler.ranks.failing import begun
from zero_compiler.ranks.mesh import make_group

pytestmark = pytest.mark.dist
cases = Cases(__name__, group_timeout=30.0)


@cases.add
def they_come_one_after_the_other(rank):
    group, out = make_group(None, "cpu"), []
    for late in (0, 1, 0):
        time.sleep(0.5 * (rank == late))
        out += [] if all_come(group, "a test", 20.0) else [f"rank {late} came late"]
    begin(group, "a test")
    return out


@cases.add
def one_does_not_come(rank):
    group = make_group(None, "cpu")
    came = all_come(group, "a test", 0.3) if rank == 0 else not begun(group)
    dist.barrier()
    return ["rank 1 never came"] if came else []


@cases.add
def one_waits_in_a_collective(rank):
    """Which the other has not entered, and would not before it knows."""
    group, out = make_group(None, "cpu"), []
    begin(group, "a test")

    def functional():  # as DTensor.full_tensor()
        collectives.wait_tensor(collectives.all_reduce(torch.zeros(2), "sum", dist.group.WORLD))

    for wait in (dist.barrier, functional):
        if rank == 0:
            since = time.monotonic()
            came, taken = all_come(group, "a test", 60.0), time.monotonic() - since
            out += ["rank 1 was elsewhere"] if came else []
            out += [f"it took {taken:.0f} s"] if taken > 25 else []
        else:
            begun(group)  # the call that it was to come to
        wait()
    begin(group, "a test")
    return out


@cases.add
def a_collective_that_both_are_in_is_none(rank):
    """One that comes late from a collective is waited for: the other has entered it before."""
    group = make_group(None, "cpu")
    begin(group, "a test")
    dist.all_reduce(torch.zeros(2))
    if rank == 1:
        time.sleep(5.0)
    return [] if all_come(group, "a test", 60.0) else ["rank 1 came late"]


@pytest.mark.parametrize("name", cases.names)
def test_it(name):
    cases.check(name)
