"""``state_dict()`` of a sharded model on two ranks: what is pickled says whose rows it holds, and is read back by any."""

from __future__ import annotations

import copy
import io
import logging
from collections import OrderedDict

import pytest
import torch
from dist.cases import Cases
from null.small import mlp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import zero_compiler as zero
from zero_compiler.params.sharded_state import ShardedStateDict

pytestmark = pytest.mark.dist
cases = Cases(__name__)


def sharded(stage=3):
    return zero.shard(mlp(), device="cpu", compute="aten", stage=stage)


def said_by(call):
    """What the project logs in a call, where nothing was said before."""
    ShardedStateDict.said, said = False, []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("zero_compiler")
    logger.addHandler(handler)
    try:
        call()
    finally:
        logger.removeHandler(handler)
    return said


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@cases.add
def what_a_file_of_one_rank_holds_is_said_once(rank):
    model, out = sharded(), []
    for value in (model.state_dict(), {"model": model.state_dict(), "step": 3}):
        said = said_by(lambda value=value: (saved(value), saved(value)))
        if len(said) != 1 or f"the rows of rank {rank} alone, and only that rank of 2" not in said[0]:
            out.append(f"said {said}")
    return out


@cases.add
def it_is_loaded_without_this_project(rank):
    model, out = sharded(), []
    found = torch.load(saved(model.state_dict()), weights_only=True)
    if type(found) is not OrderedDict or found._metadata != model.state_dict()._metadata:
        out.append(f"a {type(found)}")
    other = sharded()
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    other.load_state_dict(found)
    return out + [
        name
        for (name, p), q in zip(other.named_parameters(), model.parameters(), strict=True)
        if not torch.equal(p.to_local(), q.to_local())
    ]


@cases.add
def nothing_is_said_of_what_is_whole_or_no_file(rank):
    model, whole = sharded(), sharded(stage=0)

    def quiet():
        with zero.gathered(model):
            saved(model.state_dict())
        saved(whole.state_dict())
        saved(OrderedDict((name, p.full_tensor()) for name, p in model.state_dict().items()))
        copy.deepcopy(model.state_dict()), copy.copy(model.state_dict())

    return said_by(quiet)


@cases.add
def it_is_the_dictionary_that_it_was(rank):
    model, out = sharded(), []
    found = model.state_dict()
    full = pytree.tree_map(lambda v: v.full_tensor() if isinstance(v, DTensor) else v, found)
    out += [] if list(full) == list(found) and full["0.weight"].shape == (6, 4) else [f"a tree of {full}"]
    for made in (copy.deepcopy(found), copy.copy(found)):
        if list(made) != list(found) or made._metadata != found._metadata:
            out.append(f"a copy of {made}")
    if list(get_model_state_dict(model)) != list(found):
        out.append("DCP")
    given = OrderedDict()
    if model.state_dict(destination=given, prefix="a.") is not given:
        out.append("a destination")
    return out


@pytest.mark.parametrize("name", cases.names)
def test_it(name):
    cases.check(name)
