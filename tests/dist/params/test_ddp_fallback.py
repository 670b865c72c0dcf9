"""Plain models as stage 0 on two ranks, beside DistributedDataParallel: the gradients are the same."""

from __future__ import annotations

import contextlib
import copy
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dist.loops import batches
from dist.spawn import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zero_compiler as zero
from zero_compiler.errors import GradientError
from zero_compiler.params import plain_modules

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


def gradients_are_means(ours, twin, group=None):
    """Of ``ours`` those of ``twin``, which are summed over the ranks for that."""
    for p, q in zip(ours.parameters(), twin.parameters(), strict=True):
        dist.all_reduce(q.grad, group=group)
        torch.testing.assert_close(p.grad, q.grad / dist.get_world_size(group))


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


class Unseen(nn.Module):
    """Dynamo captures nothing of it: it takes no RNN, and skips what breaks the graph within a loop."""

    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        self.middle = nn.LSTM(4, 4) if recurrent else nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        if isinstance(self.middle, nn.LSTM):
            return self.last(self.middle(x)[0]).sum()
        for _ in range(2):
            x = self.middle(x)
            torch._dynamo.graph_break()
        return self.last(x).sum()


def unseen(rank, world):
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(rank))
    for recurrent in (False, True):
        torch.manual_seed(0)
        ours = Unseen(recurrent)
        twin = copy.deepcopy(ours)
        call = torch.compile(ours, backend="zero", options={"compute": "aten"})
        for quiet in (False, True, False):
            with zero.no_sync(call) if quiet else contextlib.nullcontext():
                call(x).backward()
            twin(x).backward()
        for (name, p), q in zip(ours.named_parameters(), twin.parameters(), strict=True):
            mean = q.grad.clone()
            dist.all_reduce(mean)
            torch.testing.assert_close(p.grad, mean / world, msg=lambda m, n=name: f"{n}: {m}")
    return True


def test_a_model_of_which_nothing_is_captured():
    assert run_ranks(unseen, 2, timeout=200) == [True, True]


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


def test_no_sync_before_the_first_call():
    assert run_ranks(no_sync_first, 2, timeout=200) == [True, True]


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
        for (name, p), q in zip(ours.named_parameters(), twin.named_parameters(), strict=True):
            mean = torch.zeros_like(p) if q[1].grad is None else q[1].grad.clone()
            dist.all_reduce(mean)
            mine = torch.zeros_like(p) if p.grad is None else p.grad
            torch.testing.assert_close(
                mine, mean / world, msg=lambda m, n=name, o=order: f"{''.join(o)} {n}: {m}"
            )
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


class OfTheCall(nn.Module):
    """It is given a parameter, makes one of its batch, or finds one that was not registered."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(4, 4)
        self.held = [nn.Parameter(torch.zeros(4))]

    def forward(self, x, given):
        if self.kind == "made":
            given = nn.Parameter(x.mean(0))
            x = x + given
            torch._dynamo.graph_break()
        elif self.kind == "held":
            given = self.held[0]
        return self.layer(x + given)


def of_the_call(rank, world):
    for kind, stage in itertools.product(("given", "made", "held"), (None, 1, 3)):
        torch.manual_seed(0)
        ours = OfTheCall(kind)
        twin = copy.deepcopy(ours)
        if stage is not None:
            zero.shard(ours, stage=stage)
        call = torch.compile(ours, backend="zero", options={"compute": "aten"})
        mine, plain = (nn.Parameter(torch.zeros(2 + rank, 4)) for _ in range(2))
        for k in range(2):
            x = torch.randn(2 + rank, 4, generator=torch.Generator().manual_seed(10 * k + rank))
            loss, want = call(x, mine).square().mean(), twin(x, plain).square().mean()
            torch.testing.assert_close(loss, want)
            loss.backward()
            want.backward()
        for a, b in ((mine, plain), (ours.held[0], twin.held[0])):
            assert (a.grad is None) == (b.grad is None), (kind, stage)
            if b.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, msg=lambda m, k=kind, s=stage: f"{k} {s}: {m}")
        for (name, p), q in zip(ours.named_parameters(), twin.parameters(), strict=True):
            mean = q.grad.clone()
            dist.all_reduce(mean)
            grad = p.grad if stage is None else p.grad.full_tensor()
            torch.testing.assert_close(
                grad, mean / world, msg=lambda m, n=name, k=kind, s=stage: f"{k} {s} {n}: {m}"
            )
    return True


def test_parameters_of_the_call_keep_the_gradients_of_their_rank():
    assert run_ranks(of_the_call, 2, timeout=200) == [True, True]


class Holder:
    """No module: the model is an attribute of what a compiled function closes over."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model


def in_a_function(rank, world):
    torch.manual_seed(0)
    holder = Holder(nn.Linear(4, 2))
    twin = copy.deepcopy(holder.model)
    mine = nn.Parameter(torch.zeros(4))
    theirs = nn.Parameter(torch.zeros(4))

    @torch.compile(backend="zero", options={"compute": "aten"})
    def loss_of(x, given):
        return holder.model(x + given).square().mean()

    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    said = []
    with mock.patch.object(plain_modules.log, "warning", lambda *words: said.append(words[0] % words[1:])):
        loss_of(x, mine).backward()
    assert (
        sum("parameter of shape [4] that is of no module; its gradient stays" in line for line in said) == 1
    )
    twin(x + theirs).square().mean().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)
    gradients_are_means(holder.model, twin)
    return True


def test_of_a_compiled_function_what_it_finds_in_modules_is_averaged():
    assert run_ranks(in_a_function, 2, timeout=200) == [True, True]


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


class Weighted(nn.Module):
    """A loss with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, y):
        return (y * self.weight).square().mean()


def two_modules(rank, world):
    for held in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        parts = [nn.Linear(4, 2), Weighted()]
        twins = copy.deepcopy(parts)
        model, loss = (None, None) if held else parts

        @torch.compile(backend="zero", options={"compute": "aten"})
        def loss_of(x, model=model, loss=loss, parts=parts):
            return parts[1](parts[0](x)) if model is None else loss(model(x))

        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
        loss_of(x).backward()
        twins[1](twins[0](x)).backward()
        for ours, theirs in zip(parts, twins, strict=True):
            gradients_are_means(ours, theirs)
    return True


def test_all_modules_that_a_compiled_function_calls_are_averaged():
    assert run_ranks(two_modules, 2, timeout=200) == [True, True]


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
