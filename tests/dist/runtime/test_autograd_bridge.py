"""A backward that one rank alone refuses, as it has written to a weight, say: every rank hears why it ends."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from dist.cases import Cases
from null.small import mlp, use

import zero_compiler as zero
from zero_compiler.errors import ShardError, ZeroError

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
                what = {"compiled": "begin its part of this call", "eager": "complete its backward"}[how]
                who = "" if rank == 1 else f"rank 1 of 2 could not {what}"
                if said not in str(error) or who not in str(error):
                    out.append(f"{how}, {wanted}: {error}")
    return out


def written(model):
    with torch.no_grad():
        model[0].weight.mul_(2)
    return "'0.weight' was modified in place between forward and backward"


def hooked(model):
    model[0].weight.register_hook(lambda grad: None)
    return "'0.weight' has a hook for its gradient"


def penalised(model):
    model.penalty = model[0].weight.square().sum()
    return "is computed from sharded parameters outside of the model's forward"


@cases.add
def one_rank_is_refused_where_no_gradient_is_reduced(rank):
    """An eager backward under zero.no_sync meets nobody: the other rank is in a collective of the script's own by then,
    and hears of it at its next call."""
    out = []
    for wrong in (written, hooked, penalised):
        model, x = zero.shard(mlp(), device="cpu"), torch.ones(2, 4)
        error, said = None, ""
        with zero.no_sync(model):
            loss = model(x).square().sum()
            if rank == 1:
                said = wrong(model)
                loss = loss + model.__dict__.pop("penalty", 0.0)
            try:
                loss.backward()
            except ZeroError as refused:
                error = refused
        dist.all_reduce(torch.ones(1))
        if rank == 0:
            said = "rank 1 of 2 could not complete its backward: "
            try:
                model(x)
            except ZeroError as told:
                error = told
        if said not in str(error):
            out.append(f"{wrong.__name__}: {error}")
        model(x)  # ranks meet again
    return out


@pytest.mark.parametrize("name", cases.names)
def test_it(name):
    cases.check(name)
