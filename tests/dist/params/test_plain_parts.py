"""Plain models that ranks hold unlike, and plain parts beside sharded ones: what is averaged, and what is told."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from dist.loops import batches
from dist.spawn import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zero_compiler as zero
from zero_compiler.errors import GradientError, RankMismatchError

pytestmark = pytest.mark.dist


def disagreeing(rank, world):
    """Ranks may evaluate as they like; averages that do not belong together are errors on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    sharded = zero.shard(copy.deepcopy(model), stage=3)
    twin = copy.deepcopy(model)
    step = torch.compile(model, backend="zero", options={"compute": "aten"})
    x = torch.full((1, 3), rank + 1.0)
    for _ in range(2):
        if rank == 1:  # also as a part of another model, and before it is trained
            with torch.no_grad():
                torch.compile(nn.Sequential(model, nn.ReLU()), backend="zero", options={"compute": "aten"})(x)
                step(x)
        step(x).sum().backward()
        twin(x).sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        dist.all_reduce(q.grad)
        torch.testing.assert_close(p.grad, q.grad / world)
    model.zero_grad()

    # Another model on each rank, with as many elements and with the same values.
    other = nn.Linear(2, 3, bias=False) if rank == 0 else nn.Linear(3, 2, bias=False)
    nn.init.ones_(other.weight)
    opt = torch.optim.SGD(other.parameters(), lr=0.1)
    run = torch.compile(other, backend="zero", options={"compute": "aten"})
    with pytest.raises(
        RankMismatchError,
        match=r"'weight' of shape \[3, 2\], .* rank 0 of 2, .* rank 1; there 'weight' of shape \[2, 3\] got one",
    ):
        run(torch.ones(1, 2 + rank)).sum().backward()
    with pytest.raises(GradientError, match="those of this rank alone"):
        opt.step()
    assert torch.equal(other.weight, torch.ones_like(other.weight))

    # A model more on one rank.
    with pytest.raises(
        RankMismatchError,
        match=r"'average of the gradients of .* not sharded' on rank 0 of 2, 'eager gather of 0.weight' on rank 1 of 2",
    ):
        if rank == 0:
            step(x).sum().backward()
        else:
            sharded(x)
    model.zero_grad()
    step(x).sum().backward()  # all ranks know, and may go on
    return model[0].weight.grad.tolist()


def test_ranks_that_do_not_train_one_model():
    first, second = run_ranks(disagreeing, 2, timeout=60, group_timeout=20)
    assert first == second


def given_since(rank, world, how):
    """An adapter that a sharded model was given after zero.shard."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
    twin = copy.deepcopy(ours)
    zero.shard(ours, stage=3)
    adapter = nn.Linear(6, 1)
    ours.append(copy.deepcopy(adapter))
    twin.append(adapter)
    call = torch.compile(ours, backend="zero", options={"compute": "aten"}) if how == "compiled" else ours
    for x in batches(rank, 2):
        with torch.no_grad():
            call(x)
        call(x).square().mean().backward()
        twin(x).square().mean().backward()
    for (name, p), q in zip(ours.named_parameters(), twin.parameters(), strict=True):
        dist.all_reduce(q.grad)
        mine = p.grad.full_tensor() if name.startswith("0.") else p.grad
        torch.testing.assert_close(
            mine, q.grad / world, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}"
        )
    return True


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_plain_parameters_given_after_the_shard(how):
    assert run_ranks(given_since, 2, how, timeout=200) == [True, True]


def partly_sharded(rank, world):
    """One half is sharded, the other is not, as with adapters that are added to a sharded model."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), nn.Linear(3, 1))
    twin = copy.deepcopy(ours)
    zero.shard(ours[2], stage=3)
    call = torch.compile(ours, backend="zero", options={"compute": "aten"})
    opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, twin)]
    for step in range(3):
        quiet, loud = batches(rank, 2)
        with zero.no_sync(call):
            call(quiet).square().mean().backward()
        call(loud).square().mean().backward()
        for x in (quiet, loud):
            twin(x).square().mean().backward()
        for (name, p), q in zip(ours.named_parameters(), twin.parameters(), strict=True):
            dist.all_reduce(q.grad)
            q.grad /= world
            mine = p.grad.full_tensor() if name.startswith("2.") else p.grad
            torch.testing.assert_close(
                mine, q.grad, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{step} {n}: {m}"
            )
        for opt in opts:
            opt.step()
            opt.zero_grad()
    return True


def test_what_stands_beside_a_sharded_part_is_averaged():
    assert run_ranks(partly_sharded, 2, timeout=200) == [True, True]


def other_values(rank, world):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1, bias=False))
    nn.init.ones_(model[0].weight)
    nn.init.ones_(model[0].bias)
    step = torch.compile(model, backend="zero", options={"compute": "aten"})
    with pytest.raises(
        RankMismatchError, match=r"different values of parameter '1\.weight', which is not sharded"
    ):
        step(torch.ones(1, 3)).sum().backward()
    return True


def test_ranks_that_begin_with_different_values_are_told():
    assert run_ranks(other_values, 2, timeout=200) == [True, True]


def sharded_later(rank, world):
    """Nothing of the plain model, which holds whole parameters, goes on with the sharded one."""
    model = nn.Linear(4, 6)
    torch.compile(model, backend="zero", options={"compute": "aten"})(torch.ones(2, 4)).sum().backward()
    model.zero_grad()
    whole = [weakref.ref(p) for p in model.parameters()]
    zero.shard(model)
    torch._dynamo.reset()
    gc.collect()
    assert not any(ref() is not None for ref in whole)
    model(torch.full((2, 4), float(rank))).sum().backward()
    return model.weight.grad.full_tensor().tolist()


def test_a_plain_model_that_is_sharded_later_is_not_held():
    assert run_ranks(sharded_later, 2) == [[[1.0] * 4] * 6] * 2


def group_made_late(rank, world, path):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    step = torch.compile(model, backend="zero", options={"compute": "aten"})
    step(torch.ones(1, 3)).sum().backward()
    model.zero_grad()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    step(torch.full((1, 3), float(rank))).sum().backward()
    return model.weight.grad.tolist()


def test_a_process_group_made_after_the_first_call(tmp_path):
    first, second = run_ranks(group_made_late, 2, str(tmp_path / "store"), group=False)
    assert first == second == [[0.5] * 3] * 2


def beside_a_part_of_some_ranks(rank, world):
    """Two of three ranks train a model together: what is plain in it is theirs too."""
    pair = dist.new_group([0, 2])
    if rank == 1:
        return True
    mesh = DeviceMesh.from_group(pair, "cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    twin = copy.deepcopy(model)
    zero.shard(model[0], mesh=mesh, device="cpu")
    call = torch.compile(model, backend="zero", options={"compute": "aten"})
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(rank))
    call(x).square().mean().backward()
    twin(x).square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        dist.all_reduce(q.grad, group=pair)
        mine = p.grad.full_tensor() if name.startswith("0.") else p.grad
        torch.testing.assert_close(mine, q.grad / 2, rtol=1e-5, atol=1e-7)
    return True


def test_what_stands_beside_a_part_of_some_ranks_is_averaged_over_those():
    assert run_ranks(beside_a_part_of_some_ranks, 3, timeout=60, group_timeout=20) == [True] * 3
