"""What one rank does alone, has alone or fails at alone: the others wait for it nowhere, or hear of it at once."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dist.pool import Pool
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zero_compiler as zero
from zero_compiler.errors import RankMismatchError, StorageError
from zero_compiler.params.modules import sharded_models_of
from zero_compiler.ranks import transport
from zero_compiler.storage.stores import Region

pytestmark = pytest.mark.dist

RANKS = 3
X = torch.ones(2, 4)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    ranks = Pool(RANKS)
    yield ranks
    ranks.close()


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def _run(model: nn.Module, **options: Any) -> float:
    torch._dynamo.reset()
    run = torch.compile(model, backend="zero", options={"compute": "aten"} | options)
    loss = run(X).sum()
    loss.backward()
    return float(loss)


def _error(kind: type[Exception], do: Any) -> str:
    try:
        do()
    except kind as error:
        return str(error)
    return "no error"


def makes_one_alone(rank, world):
    """Models and constructions of one rank, which those of all ranks do not count."""
    with_mesh = [DeviceMesh("cpu", [r]) for r in range(world)]
    if rank == 1:
        zero.shard(_net(), mesh=with_mesh[rank])
        with zero.init(mesh=with_mesh[rank]):
            _net()
    model = zero.shard(_net())
    with zero.init():
        other = _net()
    return [
        _run(model),
        _run(other),
        sharded_models_of(model)[0].identity.title() == sharded_models_of(other)[0].identity.title(),
    ]


def copies_one_alone(rank, world):
    """A copy that one rank makes, for an average of weights or a look at them, and one that all make and train."""
    model = zero.shard(_net(), memory_budget_bytes=1 << 20, transport="c10d")
    if rank == 2:
        copy.deepcopy(copy.deepcopy(model))
    trained = copy.deepcopy(model)
    return [
        _run(trained),
        _run(model),
        sharded_models_of(trained)[0].identity.title() != sharded_models_of(model)[0].identity.title(),
    ]


def is_in_more_groups(rank, world):
    """A mesh of some ranks, of which one is in more process groups than the others."""
    dist.new_group([0])
    flat = torch.tensor([[0, 1]])
    mesh = DeviceMesh("cpu", flat, mesh_dim_names=("replicate", "shard"))
    if rank == 2:
        return ["not in it"] * 2
    first = zero.shard(_net(), mesh=mesh)
    second = zero.shard(_net(), mesh=mesh)
    groups = {id(sharded_models_of(m)[0].group.everyone.pg) for m in (first, second)}
    return [_run(first) == _run(second), len(groups)]


def has_collected(rank, world):
    """A module that was made in a scope and dropped, in a cycle that one rank has collected when the scope ends."""
    gc.collect()
    gc.disable()
    try:
        with zero.init():
            spare = nn.Linear(4, 4)
            spare.itself = [spare]
            del spare
            model = _net()
            if rank == 0:
                gc.collect()
        return [_run(model)]
    finally:
        gc.enable()


def gives_up_for_a_while(rank, world):
    """A part that no rank can build, then one that a rank alone cannot: both are left out, and building goes on."""
    seen = []
    with zero.init():
        for who in (range(world), [1]):
            try:
                with zero.init(stage=0):
                    nn.Linear(4, 4)
                    if rank in who:
                        raise ValueError("cannot be built")
                    first = nn.Linear(4, 4)
                    first.weight.sum().item()
                    nn.Linear(4, 4).weight.data.sum()
            except (ValueError, RankMismatchError) as error:
                seen.append(type(error).__name__)
        model = _net()
    expected = ["ValueError", "ValueError" if rank == 1 else "RankMismatchError"]
    return [seen == expected, _run(model)]


def has_lost_a_model(rank, world):
    """A step that clips, of a model that was dropped, and that one rank has collected."""
    model = zero.shard(_net(), transport="c10d")
    model(X).sum().backward()
    optimizer = zero.optimizer(torch.optim.SGD, model, lr=0.1, max_grad_norm=1.0)
    params = list(model.parameters())
    gc.collect()
    gc.disable()
    try:
        model.itself = [model]
        del model
        if rank == 0:
            gc.collect()
        optimizer.step()
    finally:
        gc.enable()
    return [bool(optimizer.grad_norm > 0), len(params)]


@contextlib.contextmanager
def _on(rank: int, of: int, target: Any, name: str, **kw: Any) -> Iterator[None]:
    with mock.patch.object(target, name, **kw) if rank == of else contextlib.nullcontext():
        yield


def has_no_room(rank, world, folder):
    """The file of one rank takes no rows while the others go on to the next parameter's."""
    with _on(rank, 1, Region, "fill", side_effect=StorageError("the disk is full")):
        made = _error(
            StorageError, lambda: zero.shard(_net(), offload_params="nvme", nvme_dir=folder, transport="c10d")
        )
    return [made, _run(zero.shard(_net()))]


def knows_no_host(rank, world):
    with _on(rank, 1, transport, "_host", side_effect=PermissionError("/proc")):
        model = zero.shard(_net())
    return [sharded_models_of(model)[0].storage.transport.reason, _run(model)]


def maps_no_memory(rank, world):
    with _on(rank, 2, transport.mmap, "mmap", side_effect=OSError("no address space")):
        model = zero.shard(_net())
    return [sharded_models_of(model)[0].storage.transport.reason, _run(model)]


def has_no_values(rank, world):
    """Of what lies on meta nothing is sent."""
    with torch.device("meta" if rank == 1 else "cpu"):
        model = _net()
    return [_error(RankMismatchError, lambda: zero.shard(model))]


def has_frozen_one(rank, world, folder):
    """Gradients and states of what is frozen have no room in files."""
    model = _net()
    model[0].weight.requires_grad_(rank != 2)
    return [_error(RankMismatchError, lambda: zero.shard(model, offload_grads="nvme", nvme_dir=folder))]


def has_no_folder(rank, world, folder):
    given = {"nvme_dir": folder} if rank == 0 else {}
    return [_error(RankMismatchError, lambda: zero.shard(_net(), device_rest_bytes=1 << 20, **given))]


def has_deleted_one(rank, world):
    """A parameter that one rank has deleted is not gathered there."""
    model = zero.shard(_net())
    if rank == 1:
        del model[1].weight

    def gather() -> None:
        with zero.gathered(model):
            pass

    return [_error(RankMismatchError, gather)]


SAME = -1.0


def _same(found: list[Any]) -> list[Any]:
    """Losses of one model are alike; those of several kinds of making too."""
    return [SAME if isinstance(v, float) else v for v in found]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (makes_one_alone, [SAME, SAME, False]),
        (copies_one_alone, [SAME, SAME, True]),
        (has_collected, [SAME]),
        (gives_up_for_a_while, [True, SAME]),
        (has_lost_a_model, [True, 4]),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_what_one_rank_does_alone(pool, body, expected):
    for found in pool.run(body, timeout=60.0):
        assert _same(found) == expected


def test_that_is_in_more_process_groups(pool):
    assert pool.run(is_in_more_groups, timeout=60.0) == [[True, 1], [True, 1], ["not in it"] * 2]


def test_that_has_no_room(pool, tmp_path):
    for rank, (made, loss) in enumerate(pool.run(has_no_room, str(tmp_path), timeout=60.0)):
        told = "" if rank == 1 else "rank 1 of 3 could not place its part of the model: "
        assert made == f"{told}the disk is full"
        assert isinstance(loss, float)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (knows_no_host, "rank 1 cannot tell on which host it runs"),
        (maps_no_memory, "rank 2: no address space"),
    ],
)
def test_that_can_share_no_memory(pool, body, reason):
    for found, loss in pool.run(body, timeout=60.0):
        assert reason in found
        assert isinstance(loss, float)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (has_no_values, "parameter 0.weight has no values"),
        (has_frozen_one, "parameter 0.weight is frozen"),
        (has_no_folder, "nvme_dir = given"),
        (has_deleted_one, "gathers 1.weight"),
    ],
)
def test_what_one_rank_has_alone_is_an_error_on_all(pool, tmp_path, body, said):
    args = [str(tmp_path)] if body in (has_frozen_one, has_no_folder) else []
    for (error,) in pool.run(body, *args, timeout=60.0):
        assert said in error
