"""Plain models as stage 0 on two ranks, beside DistributedDataParallel: the gradients are the same."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import weakref

import pytest
import torch
import torch.distributed as dist
from dist.spawn import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zero_compiler as zero
from zero_compiler.errors import GradientError, RankMismatchError

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


def batches(rank, n):
    return [torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(10 * i + rank)) for i in range(n)]


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
        for p, q in zip(ours.parameters(), twin.parameters(), strict=True):
            dist.all_reduce(q.grad)
            torch.testing.assert_close(p.grad, q.grad / world)
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
        for p, q in zip(ours.parameters(), twin.parameters(), strict=True):
            dist.all_reduce(q.grad)
            torch.testing.assert_close(p.grad, q.grad / world)

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
        match=r"'parameter weight: \[3, 2\] torch.float32' on rank 0 of 2, '.*: \[2, 3\] torch.float32' on rank 1 of 2",
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
