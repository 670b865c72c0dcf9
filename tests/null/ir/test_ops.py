"""The graph's own operators: shapes of their results, and sizes that go through a schema."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zero_compiler.ir import ops


@pytest.mark.parametrize("shapes", [[], [()], [(3, 4), (5,)], [(0, 2), (), (1, 2, 3)]])
def test_shapes_survive_being_flat(shapes):
    assert ops.unflat_sizes(*ops.flat_sizes(shapes)) == shapes


def test_a_transfer_gives_tensors_of_the_shapes_that_it_names():
    sizes, dims = ops.flat_sizes([(3, 4), (5,)])
    with FakeTensorMode():
        started = ops.gather(["a", "b"], sizes, dims, torch.bfloat16, torch.device("cpu"))
        given = ops.wait(started)
    assert [(tuple(t.shape), t.dtype) for t in given] == [((3, 4), torch.bfloat16), ((5,), torch.bfloat16)]


def test_an_owner_lives_as_long_as_somebody_holds_it():
    class Owner:
        pass

    owner = Owner()
    ops.bind_owner("test_ops", owner)
    assert ops.owner_of("test_ops") is owner
    assert owner in ops.owners()
    del owner
    assert all(type(o).__name__ != "Owner" for o in ops.owners())
