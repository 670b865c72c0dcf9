"""A weight that one rank alone writes to between forward and backward: every rank hears why the backward ends."""

from __future__ import annotations

import pytest
import torch
from dist.cases import Cases
from null.small import mlp, use

import zero_compiler as zero
from zero_compiler.errors import ShardError

pytestmark = pytest.mark.dist
cases = Cases(__name__, group_timeout=20.0)


@cases.add
def one_rank_writes(rank):
    out = []
    for how in ("compiled", "eager"):
        for wanted in ("all", "the input"):
            model = zero.shard(mlp(), device="cpu", compute="aten")
            x = torch.ones(2, 4, requires_grad=True)
            loss = use(model, how)(x).square().sum()
            if rank == 1:
                with torch.no_grad():
                    model[0].weight.mul_(2)
            try:
                if (
                    wanted == "all" or how == "eager"
                ):  # eager code of several ranks computes with the forward's copies
                    loss.backward()
                else:
                    torch.autograd.grad(loss, [x])
                out.append(f"{how}, {wanted}: no error")
            except ShardError as error:
                said = "'0.weight' was modified in place between forward and backward"
                who = "" if rank == 1 else "rank 1 of 2 could not begin its part of this call"
                if said not in str(error) or who not in str(error):
                    out.append(f"{how}, {wanted}: {error}")
    return out


@pytest.mark.parametrize("name", cases.names)
def test_it(name):
    cases.check(name)
