"""When gradients of replicated parameters are averaged, on two ranks: at the end of any backward."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dist.averages import (
    Parts,
    compare_and_clear,
    compiled,
    rows,
    same_gradients,
    square,
)
from dist.loops import batches
from dist.spawn import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import zero_compiler as zero
from zero_compiler.errors import GradientError
from zero_compiler.replicated import averaged_modules

pytestmark = pytest.mark.dist


def overlapping(rank, world):
    """Updates while backward runs come after the average, whichever parameters got the first gradient."""
    for sharded in (None, 0, 2):
        torch.manual_seed(0)
        ours = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        twin = copy.deepcopy(ours)
        if sharded is not None:
            zero.shard(ours[sharded], stage=3)
        call = torch.compile(ours, backend="zero", options={"compute": "aten"})
        opt = zero.optimizer(torch.optim.SGD, ours, lr=0.1, overlap=True)
        plain = torch.optim.SGD(twin.parameters(), lr=0.1)
        for x in batches(rank, 2):
            call(x).square().sum().backward()
            opt.step()
            twin(x).square().sum().backward()
            for q in twin.parameters():
                dist.all_reduce(q.grad)
                q.grad /= world
            plain.step()
            plain.zero_grad()
        for (name, p), q in zip(ours.named_parameters(), twin.parameters(), strict=True):
            mine = p.full_tensor() if name.startswith(f"{sharded}.") else p
            torch.testing.assert_close(mine, q, msg=lambda m, n=name, s=sharded: f"{s} {n}: {m}")
        if sharded is None:
            with pytest.raises(GradientError, match="those of this rank alone"), zero.no_sync(call):
                call(x).sum().backward()
            assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), twin.parameters(), strict=True))
    return True


def test_updates_while_backward_runs_come_after_the_average():
    assert run_ranks(overlapping, 2, timeout=200) == [True, True]


def within_a_function(rank, world):
    """Of a backward within it, of a forward without gradients around it, and of a graph break a warning."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    twin = copy.deepcopy(model)

    @torch.compile(backend="zero", options={"compute": "aten"})
    def step(x):
        loss = square(model(x))
        loss.backward()
        return loss

    @torch.compile(backend="zero", options={"compute": "aten"})
    def loss_of(x):
        with torch.enable_grad():
            return square(other(x))

    said = []
    with mock.patch.object(averaged_modules.log, "warning", lambda *words: said.append(words[0] % words[1:])):
        step(rows(rank))
    assert (
        sum("function step has a graph break; parameters of modules that only" in line for line in said) == 1
    )
    square(twin(rows(rank))).backward()
    same_gradients(model, twin)
    other = nn.Linear(4, 2)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        loss = loss_of(rows(rank))
    loss.backward()
    twin.zero_grad()
    square(twin(rows(rank))).backward()
    same_gradients(other, twin)
    return True


def test_backward_and_gradients_within_a_function():
    assert run_ranks(within_a_function, 2, timeout=200) == [True, True]


def reentrant(rank, world):
    """A backward within another one (a checkpointed region), which averages by itself."""
    for use_reentrant in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        parts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        twin = copy.deepcopy(parts)
        calls = [compiled(part) for part in parts]

        def loss_of(first, middle, last, x, use_reentrant=use_reentrant):
            x = first(x)
            return square(last(checkpoint(middle, x, use_reentrant=use_reentrant)))

        for step in range(3):
            loss_of(*calls, rows(rank, step)).backward()
            loss_of(*twin, rows(rank, step)).backward()
            compare_and_clear(parts, twin, f"reentrant: {use_reentrant}, step {step}")
    return True


def test_a_backward_within_a_backward():
    assert run_ranks(reentrant, 2, timeout=200) == [True, True]


def in_two_groups(rank, world):
    """A backward of which parts are averaged over different groups, that ranks came to know in different orders."""
    mesh = DeviceMesh.from_group(dist.new_group([0, 1]), "cpu")
    held = Parts()
    torch.manual_seed(0)
    core, held.head = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 2)
    zero.shard(core, mesh=mesh)
    core.append(nn.Linear(4, 2))
    twins = copy.deepcopy((core[1], held.head))
    call = compiled(lambda x: square(held.head(x)))
    if rank == 1:
        call(rows(rank))
    x = rows(rank)
    (square(core(x)) + call(x)).backward()
    square(twins[1](x)).backward()
    same_gradients(held.head, twins[1])
    mean = [core[1].weight.grad.clone() for _ in range(2)]
    dist.all_reduce(mean[1])
    torch.testing.assert_close(*(m / (i + 1) for i, m in enumerate(mean)))
    return True


def test_averages_of_two_groups_in_one_backward():
    assert run_ranks(in_two_groups, 2, timeout=100, group_timeout=20) == [True, True]


def broken_off(rank, world):
    """A backward that failed, and then a model of which the other was a part."""

    def failing(grad):
        raise KeyError

    torch.manual_seed(0)
    holder = Parts(nn.Linear(4, 4), nn.Linear(4, 4))
    twin = nn.Sequential(*copy.deepcopy(holder.parts))
    x = rows(rank).requires_grad_()
    y = x * 1
    y.register_hook(failing)
    with pytest.raises(KeyError):
        square(holder.calls[1](y)).backward()
    holder.parts[1].zero_grad()
    whole = nn.Sequential(*holder.parts)
    square(compiled(whole)(rows(rank))).backward()
    square(twin(rows(rank))).backward()
    same_gradients(whole, twin)
    return True


def test_after_a_backward_that_failed():
    assert run_ranks(broken_off, 2, timeout=200) == [True, True]
