"""Whether all ranks come to a call, on two ranks."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist
from dist.cases import Cases

from zero_compiler.ranks.attendance import all_come
from zero_compiler.ranks.call_handshake import begin
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
    came = rank == 0 and all_come(make_group(None, "cpu"), "a test", 0.3)
    dist.barrier()
    return ["rank 1 never came"] if came else []


@pytest.mark.parametrize("name", cases.names)
def test_it(name):
    cases.check(name)
