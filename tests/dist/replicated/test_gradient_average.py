"""Gradients of models that are not sharded, on two ranks: those of DistributedDataParallel."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dist.averages import (
    Parts,
    compare_and_clear,
    compiled,
    gradients_are_means,
    rows,
    same_gradients,
    square,
    steps,
)
from dist.loops import batches
from dist.spawn import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zero_compiler as zero
from zero_compiler.errors import GradientError, RankMismatchError, ZeroError
from zero_compiler.replicated import gradient_average

pytestmark = pytest.mark.dist


class Mixed(nn.Module):
    """An LSTM and a graph break: some parameters are used by eager frames only, some by one rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 6)
        self.lstm = nn.LSTM(6, 5, batch_first=True)
        self.out = nn.Linear(5, 2)
        self.rare = nn.Linear(5, 2)
        self.eager = nn.Parameter(torch.randn(2))
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x, rare):
        h = torch.relu(self.inp(x))
        h, _ = self.lstm(h)
        torch._dynamo.graph_break()
        y = self.out(h)
        if rare:
            y = y + self.rare(h)
        return self.scaled(y).square().mean()

    @torch._dynamo.disable
    def scaled(self, y):
        return y * self.eager


def beside_ddp(rank, world):
    torch.manual_seed(0)
    ours = Mixed()
    reference = nn.parallel.DistributedDataParallel(copy.deepcopy(ours), find_unused_parameters=True)
    call = torch.compile(ours, backend="zero", options={"compute": "aten"})
    opts = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, reference)]

    def compare(where):
        for (name, p), q in zip(ours.named_parameters(), reference.module.parameters(), strict=True):
            if q.grad is None:
                assert p.grad is None, (where, name)
            else:
                torch.testing.assert_close(
                    p.grad, q.grad, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{where} {n}: {m}"
                )
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)

    rare = rank == 1  # `rare` is used on one rank only
    for step in range(3):
        xs = batches(rank, 3)
        # a plain step
        call(xs[0], rare).backward()
        reference(xs[0], rare).backward()
        compare(f"step {step}, one backward")
        # accumulation with communication
        call(xs[1], rare).backward()
        reference(xs[1], rare).backward()
        compare(f"step {step}, two backwards")
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=step != 1)
        # accumulation without
        with zero.no_sync(call), reference.no_sync():
            call(xs[0], rare).backward()
            reference(xs[0], rare).backward()
        call(xs[2], rare).backward()
        reference(xs[2], rare).backward()
        compare(f"step {step}, no_sync")
        for opt in opts:
            opt.step()
            opt.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(call(xs[0], rare), reference.module(xs[0], rare))
    assert ours.never.grad is None
    dist.barrier()
    return True


def test_gradients_are_those_of_ddp():
    assert run_ranks(beside_ddp, 2, timeout=200) == [True, True]


def no_sync_first(rank, world):
    """zero.no_sync before the first call, on the module and on what compile returns."""
    for form in ("module", "compiled"):
        torch.manual_seed(0)
        ours = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
        twin = copy.deepcopy(ours)
        call = torch.compile(ours, backend="zero", options={"compute": "aten"})
        xs = [torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * i + rank)) for i in range(2)]
        with zero.no_sync(ours if form == "module" else call):
            call(xs[0]).sum().backward()
        local = ours[0].weight.grad.clone()
        twin(xs[0]).sum().backward()
        torch.testing.assert_close(local, twin[0].weight.grad)  # no communication yet
        call(xs[1]).sum().backward()
        twin(xs[1]).sum().backward()
        gradients_are_means(ours, twin)
    return True


def test_no_sync_before_the_first_call():
    assert run_ranks(no_sync_first, 2, timeout=200) == [True, True]


def waiting(rank, world):
    """No step before gradients are averaged, and no harm from a backward that breaks off."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    twin = copy.deepcopy(ours)
    call = torch.compile(ours, backend="zero", options={"compute": "aten"})
    opt = torch.optim.SGD(ours.parameters(), lr=0.1)
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(rank))

    def gradients_are_right():
        twin.zero_grad()
        twin(x).sum().backward()
        gradients_are_means(ours, twin)

    for forget in (True, False):
        with zero.no_sync(call):
            call(x).sum().backward()
        before = [p.detach().clone() for p in ours.parameters()]
        with pytest.raises(GradientError, match="those of this rank alone.* outside zero.no_sync"):
            opt.step()
        assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), before, strict=True))
        if forget:  # they no longer wait for anything
            opt.zero_grad()
            opt.step()
            with zero.no_sync(call):
                call(x).sum().mul(0.25).backward()
        call(x).sum().mul(0.75 if forget else 0.0).backward()
        gradients_are_right()
        opt.step()
        opt.zero_grad()
        twin.load_state_dict(ours.state_dict())

    for sync, who in ((True, (0, 1)), (False, (0, 1)), (True, (1,))):
        with zero.no_sync(call):
            call(x).sum().backward()
        if rank in who:
            torch.nn.utils.clip_grad_norm_(ours.parameters(), 1e-3)
        with pytest.raises(
            GradientError, match=r"gradient of parameter '.*' was written to .* and clip after it"
        ):
            with contextlib.nullcontext() if sync else zero.no_sync(call):
                call(x).sum().backward()
        opt.zero_grad(set_to_none=sync)

    def broken(grad):
        raise KeyError

    handle = ours[0].weight.register_hook(broken)
    with pytest.raises(KeyError):
        call(x).sum().backward()
    handle.remove()
    opt.zero_grad()
    call(x).sum().backward()
    gradients_are_right()
    return True


def test_no_step_before_gradients_are_averaged():
    assert run_ranks(waiting, 2, timeout=200) == [True, True]


class Rare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.rare = nn.Parameter(torch.ones(3))

    def forward(self, x, rare):
        y = torch.tanh(self.first(x))
        return (y * self.rare if rare else y).sum()


def skipped_after_no_sync(rank, world):
    """A gradient that waited and was set to None waits for nothing: what comes later was written by nobody."""
    torch.manual_seed(0)
    ours = Rare()
    twin = copy.deepcopy(ours)
    call = torch.compile(ours, backend="zero", options={"compute": "aten"})
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(rank))
    with zero.no_sync(call):
        call(x, True).backward()
    ours.zero_grad()
    for rare in (rank == 0, True):
        call(x, rare).backward()
        twin(x, rare).backward()
    gradients_are_means(ours, twin)
    return True


def test_a_step_that_was_skipped_after_no_sync():
    assert run_ranks(skipped_after_no_sync, 2, timeout=200) == [True, True]


def accumulating(rank, world):
    """Every order of four of: a backward, one under no_sync, both forms of zero_grad; the last is a backward."""
    torch.manual_seed(0)
    ours = Rare()
    twin = copy.deepcopy(ours)
    call = torch.compile(ours, backend="zero", options={"compute": "aten"})
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(rank))

    def backward(model, rare):
        model(x, rare).backward()

    for order in itertools.product("bnz0", repeat=3):
        ours.zero_grad()
        twin.zero_grad()
        for what in [*order, "b"]:
            rare = rank == 1 and what == "n"  # `rare` waits on one rank only
            if what in "z0":
                for model in (ours, twin):
                    model.zero_grad(set_to_none=what == "z")
                continue
            if what == "n":
                with zero.no_sync(call):
                    backward(call, rare)
            else:
                backward(call, rare)
            backward(twin, rare)
        same_gradients(ours, twin, "".join(order))
    return True


def test_accumulation_in_every_order():
    assert run_ranks(accumulating, 2, timeout=200) == [True, True]


def without_backward(rank, world):
    """torch.autograd.grad gives this rank's gradients: no collective, and .grad stays what it is."""
    torch.manual_seed(0)
    ours = Rare()
    twin = copy.deepcopy(ours)
    call = torch.compile(ours, backend="zero", options={"compute": "aten"})
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(rank))
    params = list(ours.parameters())

    def look():
        if rank == 0:  # alone
            got = torch.autograd.grad(call(x, True), params)
            want = torch.autograd.grad(twin(x, True), list(twin.parameters()))
            for g, w in zip(got, want, strict=True):
                torch.testing.assert_close(g, w)

    look()
    assert all(p.grad is None for p in params)
    call(x, True).backward(inputs=params[:1])
    assert [p.grad is None for p in params] == [False, True, True]
    call(x, True).backward(inputs=params[1:])
    before = [(p.grad, p.grad.clone()) for p in params]
    look()
    for p, (grad, values) in zip(params, before, strict=True):
        assert p.grad is grad
        assert torch.equal(grad, values)
    twin(x, True).backward()
    for p, q in zip(params, twin.parameters(), strict=True):
        dist.all_reduce(q.grad)
        torch.testing.assert_close(p.grad, q.grad / world)
    torch.optim.SGD(params, lr=0.1).step()  # nothing waits
    return True


def test_gradients_without_backward():
    assert run_ranks(without_backward, 2, timeout=200) == [True, True]


def sparse_beside(rank, world):
    for sharded in (True, False):
        torch.manual_seed(0)
        core = nn.Linear(4, 4)
        if sharded:
            zero.shard(core)
        net = nn.Sequential(nn.Embedding(7, 4, sparse=True), core)
        call = torch.compile(net, backend="zero", options={"compute": "aten"})
        with pytest.raises(
            GradientError, match=r"parameter '0.weight', which is not sharded, is sparse.*sparse=False"
        ):
            call(torch.arange(4)).sum().backward()
    return True


def test_sparse_gradients_are_refused_by_name():
    assert run_ranks(sparse_beside, 2, timeout=200) == [True, True]


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(3, 3)
        self.adapter = nn.Identity()

    def forward(self, x):
        return self.adapter(self.base(x))


def in_groups_that_overlap(rank, world):
    """Of the ranks 0 and 1, then of 1 and 2: rank 1 has averaged another model before, rank 2 none."""
    for ranks in ((0, 1), (1, 2)):
        mesh = DeviceMesh("cpu", list(ranks))
        if rank not in ranks:
            continue
        torch.manual_seed(0)
        plain = Adapted()
        model = zero.shard(copy.deepcopy(plain), mesh=mesh)
        plain.adapter = nn.Linear(3, 3)
        model.adapter = copy.deepcopy(plain.adapter)
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(rank))
        for _ in range(2):
            for one in (model, plain):
                one.zero_grad()
                one(x).square().mean().backward()
            gradients_are_means(model.adapter, plain.adapter, mesh.get_group())
    dist.barrier()
    return True


def test_models_are_numbered_apart_for_each_group():
    assert run_ranks(in_groups_that_overlap, 3, timeout=100) == [True] * 3


def one_of_two_is_held_back(rank, world):
    """zero.no_sync of a discriminator: the generator that the same function calls is averaged, and stepped."""
    torch.manual_seed(0)
    made, judged = nn.Linear(4, 4), nn.Linear(4, 1)
    twins = copy.deepcopy((made, judged))

    @torch.compile(backend="zero", options={"compute": "aten"})
    def loss_of(x):
        return square(judged(torch.tanh(made(x))))

    both = nn.ModuleList([made, judged])
    opts = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (made, twins[0])]
    for step in range(2):
        with zero.no_sync(judged):
            with zero.no_sync(both):
                pass  # and the rest is not held back any longer
            loss_of(rows(rank, step)).backward()
        square(twins[1](torch.tanh(twins[0](rows(rank, step))))).backward()
        same_gradients(made, twins[0], f"step {step}, generator")
        same_gradients(judged, twins[1], f"step {step}, discriminator", averaged=False)
        for q in twins[0].parameters():
            dist.all_reduce(q.grad)
            q.grad /= world
        for opt in opts:
            opt.step()
        for module in (made, judged, *twins):
            module.zero_grad()
    return True


def test_no_sync_of_one_of_two_modules():
    assert run_ranks(one_of_two_is_held_back, 2, timeout=200) == [True, True]


def steps_differ(rank, world):
    """A rank whose backward brought no gradient of these has stepped once more when it comes to its next average."""
    torch.manual_seed(0)
    holder = Parts(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(holder.parts[0].parameters(), lr=0.1)
    square(holder.calls[0](rows(rank))).backward()
    optimizer.step()
    if rank == 1:
        optimizer.step()  # of a batch in which nothing was to be learned
    with pytest.raises(
        RankMismatchError, match=r"rank 0 of 2 has stepped its optimizers 1 times and rank 1 of 2 2 tim"
    ):
        square(holder.calls[0](rows(rank))).backward()
    return True


def test_a_rank_that_missed_an_average():
    assert run_ranks(steps_differ, 2, timeout=100) == [True, True]


def out_of_memory(rank, world):
    """A rank fails among the collectives of an average: the other ends with its reason, and soon; nobody steps."""
    torch.manual_seed(0)
    holder = Parts(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(holder.parts[0].parameters(), lr=0.1)
    square(holder.calls[0](rows(rank))).backward()
    optimizer.step()

    def fails(grads, group):
        raise MemoryError("no room for a bucket")

    began = time.monotonic()
    with mock.patch.object(
        gradient_average, "_average_in_buckets", fails if rank else gradient_average._average_in_buckets
    ):
        with pytest.raises((MemoryError, ZeroError), match="no room for a bucket"):
            square(holder.calls[0](rows(rank))).backward()
    assert time.monotonic() - began < 20
    with pytest.raises(GradientError, match="those of this rank alone"):
        optimizer.step()
    return True


def test_an_average_that_fails_on_one_rank():
    assert run_ranks(out_of_memory, 2, timeout=100, group_timeout=60) == [True, True]


def swapped(rank, world):
    """torch.utils.swap_tensors takes the hooks of a parameter along, and not what calls them."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.manual_seed(0)
    ours = nn.Linear(4, 4)
    twin = copy.deepcopy(ours).double()
    call = compiled(ours)
    ours.double()
    for step in range(2):
        square(call(rows(rank, step).double())).backward()
        square(twin(rows(rank, step).double())).backward()
        compare_and_clear(ours, twin, f"step {step}")
    return True


def test_parameters_that_were_swapped():
    assert run_ranks(swapped, 2, timeout=200) == [True, True]


def heads(rank, world):
    """A backbone with a new head for each task: a model that one rank has let go of, and the other has not, is no
    difference; and heads that are gone are not kept."""
    backbone = nn.Linear(4, 4)
    torch.manual_seed(0)
    twin = nn.Linear(4, 4)
    backbone.load_state_dict(twin.state_dict())
    kept, weights = [], []
    for task in range(4):
        torch.manual_seed(task)
        model = nn.Sequential(backbone, nn.Linear(4, 2 + task))
        reference = nn.Sequential(twin, copy.deepcopy(model[1]))
        if rank == 1 and task < 2:
            kept.append(model)
        weights.append(weakref.ref(model[1].weight))
        square(compiled(model)(rows(rank, task))).backward()
        square(reference(rows(rank, task))).backward()
        compare_and_clear(model, reference, f"task {task}")
        del model
        torch._dynamo.reset()
        for _ in range(2):
            gc.collect()
    assert sum(ref() is not None for ref in weights) <= len(kept) + 1
    return True


def test_a_new_head_for_each_task():
    assert run_ranks(heads, 2, timeout=200) == [True, True]


class Kinds(nn.Module):
    """Parameters of every form: a scalar, none at all, complex, half, transposed, with channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.pairs = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.low = nn.Parameter(torch.randn(4).bfloat16())
        self.transposed = nn.Parameter(torch.randn(4, 6).t())
        self.conv = nn.Conv2d(1, 2, 2).to(memory_format=torch.channels_last)

    def forward(self, x):
        y = self.linear(x) * self.scalar + self.empty.sum() + self.low.float()
        y = y + torch.view_as_real(self.pairs * self.pairs).sum(-1)
        return square((y @ self.transposed.t()).sum(-1) + self.conv(x.reshape(1, 1, 3, 4)).square().sum())


def of_every_kind(rank, world):
    torch.manual_seed(0)
    ours = Kinds()
    steps(ours, compiled(ours), copy.deepcopy(ours), rank, "kinds")
    return True


def test_parameters_of_every_kind():
    assert run_ranks(of_every_kind, 2, timeout=200) == [True, True]


def halves(rank, world):
    """A sum over ranks that is more than float16 holds, and a mean that is not."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False).half()
    compiled(model)(torch.full((1, 2), 40000.0).half()).sum().backward()
    assert model.weight.grad.tolist() == [[40000.0, 40000.0]]
    return True


def test_a_mean_of_halves_does_not_overflow():
    assert run_ranks(halves, 2, timeout=200) == [True, True]
