"""Which replicated parameters are averaged, on two ranks: those of modules, however and whenever they come into one.

The reference is plain PyTorch on the same inputs, whose gradients are averaged by hand.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dist.averages import (
    compare_and_clear,
    compiled,
    gradients_are_means,
    rows,
    same_gradients,
    square,
    steps,
)
from dist.spawn import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zero_compiler as zero
from zero_compiler.errors import GradientError
from zero_compiler.replicated import averaged_modules

pytestmark = pytest.mark.dist


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
    with mock.patch.object(averaged_modules.log, "warning", lambda *words: said.append(words[0] % words[1:])):
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


class PartlyEager(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.captured = nn.Linear(4, 4)
        self.eager = nn.Parameter(torch.randn(4))
        self.added: nn.Module | None = None

    def forward(self, x):
        return square(self.scaled(torch.tanh(self.captured(x))))

    @torch._dynamo.disable
    def scaled(self, y):
        y = y * self.eager
        return y if self.added is None else self.added(y)


class Recurrent(nn.Module):
    """Dynamo takes no RNN: it captures nothing of this one."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4)

    def forward(self, x):
        return square(self.lstm(x)[0])


class Special(nn.Parameter):
    pass


class OfAnotherClass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 4)
        self.scale = Special(torch.full((4,), 0.5))

    def __deepcopy__(self, memo):
        made = OfAnotherClass()
        made.load_state_dict(self.state_dict())
        return made

    def forward(self, x):
        return square(self.inp(x) * self.scale)


def later(rank, world):
    def unfrozen(model):
        model.eager.requires_grad_(True)

    def given_a_module(model):
        torch.manual_seed(1)
        model.added = nn.Linear(4, 4)

    def given_values(model):
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)

    def given_another(model):
        torch.manual_seed(2)
        model.lstm = nn.LSTM(4, 4)

    for kind, change in (
        (PartlyEager, unfrozen),
        (PartlyEager, given_a_module),
        (PartlyEager, given_values),
        (Recurrent, lambda model: model.requires_grad_(True)),
        (Recurrent, given_values),
        (Recurrent, given_another),
        (OfAnotherClass, lambda model: None),
    ):
        for called_before in (False, True):
            torch._dynamo.reset()
            torch.manual_seed(0)
            ours = kind()
            if change is unfrozen:
                ours.eager.requires_grad_(False)
            elif kind is Recurrent and change is not given_values and not called_before:
                ours.requires_grad_(False)
            twin = copy.deepcopy(ours)
            call = compiled(ours)
            if called_before:
                steps(ours, call, twin, rank, "before")
            change(ours)
            change(twin)
            steps(ours, call, twin, rank, f"{kind.__name__}, {change.__name__}")
    return True


def test_what_is_trained_or_registered_later():
    assert run_ranks(later, 2, timeout=250) == [True, True]


def of_another_class_beside(rank, world):
    torch.manual_seed(0)
    ours = OfAnotherClass()
    twin = copy.deepcopy(ours)
    zero.shard(ours.inp, stage=3)
    steps(ours, compiled(ours), twin, rank, "beside")
    return True


def test_a_parameter_of_another_class_beside_a_sharded_part():
    assert run_ranks(of_another_class_beside, 2, timeout=200) == [True, True]


def own_of_a_function(rank, world):
    """A parameter of no module is the caller's, beside a sharded module and alone, whatever its values."""
    for alone in (False, True):
        torch.manual_seed(0)
        core = nn.Linear(4, 2)
        twin = copy.deepcopy(core)
        if not alone:
            zero.shard(core, stage=3)
        mine, theirs = (nn.Parameter(torch.full((4,), float(rank))) for _ in range(2))

        @torch.compile(backend="zero", options={"compute": "aten"})
        def loss_of(x, given, core=core, alone=alone):
            return square(x * given if alone else core(x + given))

        x = rows(rank)
        loss_of(x, mine).backward()
        square(x * theirs if alone else twin(x + theirs)).backward()
        torch.testing.assert_close(mine.grad, theirs.grad)
        same_gradients(core, twin)
    return True


def test_a_functions_own_parameters():
    assert run_ranks(own_of_a_function, 2, timeout=200) == [True, True]


def beside_one_rank(rank, world):
    """Each rank trains alone what is sharded over a mesh of its own, and what a function calls beside it."""
    torch.manual_seed(0)
    core, head = nn.Linear(4, 2), nn.Linear(2, 1)
    twins = copy.deepcopy((core, head))
    mesh = DeviceMesh("cpu", torch.tensor([[0], [1]]), mesh_dim_names=("apart", "shard"))["shard"]
    zero.shard(core, stage=3, mesh=mesh)

    @torch.compile(backend="zero", options={"compute": "aten"})
    def loss_of(x):
        return square(head(core(x)))

    for _ in range(1 + rank):  # as often as it likes
        loss_of(rows(rank)).backward()
        square(twins[1](twins[0](rows(rank)))).backward()
    for ours, twin in zip((core, head), twins, strict=True):
        same_gradients(ours, twin, averaged=False)
    return True


def test_the_ranks_of_what_a_function_reads():
    assert run_ranks(beside_one_rank, 2, timeout=200) == [True, True]


def evaluated(rank, world):
    """A rank evaluates alone what is averaged, in other functions, in another order, with another head."""

    class Store:
        pass

    for kind in ("order", "head", "with gradients"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        held = Store()
        held.a = nn.Linear(4, 4)
        held.b = copy.deepcopy(held.a)  # equal values: nothing but their gradients tells one from the other
        held.head = nn.Linear(4, 2)
        twins = copy.deepcopy((held.a, held.b))
        trained = compiled(lambda x, held=held: square(held.b(torch.tanh(held.a(x)))))
        order = compiled(lambda x, held=held: square(held.a(torch.tanh(held.b(x)))))
        head = compiled(lambda x, held=held: square(held.head(held.a(x))))
        if rank == 0:
            with torch.set_grad_enabled(kind == "with gradients"):
                (head if kind == "head" else order)(rows(rank))
        for step in range(2):
            trained(rows(rank, step)).backward()
            square(twins[1](torch.tanh(twins[0](rows(rank, step))))).backward()
            for ours, twin in zip((held.a, held.b), twins, strict=True):
                compare_and_clear(ours, twin, f"{kind}, step {step}")
    return True


def test_what_a_rank_evaluates_alone_changes_nothing():
    assert run_ranks(evaluated, 2, timeout=200) == [True, True]


class Trainer:
    """No module: Dynamo is given one of its methods, and finds the modules in it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.call = compiled(self.loss)

    def loss(self, x, flipped=False):
        return square(self.a(self.b(x)) if flipped else self.b(self.a(x)))


def in_a_trainer(rank, world):
    """Sizes, directions and compilations come at other steps on other ranks."""
    for kind in ("sizes", "directions", "directions first", "reset"):
        torch._dynamo.reset()
        ours, twin = Trainer(), Trainer()
        for step in range(4):
            x = rows(rank, step)
            flipped = False
            if kind == "sizes":
                x = x[: 2 if step < 1 + rank else 3]
            elif kind == "reset" and rank == step == 1:
                torch._dynamo.reset()
            elif kind == "directions first" or (kind == "directions" and step):
                flipped = (rank + step) % 2 == 0
            ours.call(x, flipped).backward()
            twin.loss(x, flipped).backward()
            for mine, theirs in ((ours.a, twin.a), (ours.b, twin.b)):
                compare_and_clear(mine, theirs, f"{kind}, step {step}")
    return True


def test_in_a_trainer_that_is_no_module():
    assert run_ranks(in_a_trainer, 2, timeout=200) == [True, True]


class Net(nn.Module):
    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, x):
        return square(self.head(torch.tanh(self.backbone(x))))


def eager_around(rank, world):
    """A module that runs eagerly and calls what is compiled: its own parameters too, also of a second one."""
    torch.manual_seed(0)
    plain = nn.Linear(4, 4)
    backbone = compiled(copy.deepcopy(plain))
    backbone(rows(rank))  # somebody asks for the number of features
    for width in (2, 3):
        head = nn.Linear(4, width)
        net, twin = Net(backbone, head), Net(plain, copy.deepcopy(head))
        steps(net, net, twin, rank, f"head of {width}")
    return True


def test_a_module_around_what_is_compiled():
    assert run_ranks(eager_around, 2, timeout=200) == [True, True]


class Inserted(nn.Module):
    """Dynamo captures nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.layers = nn.LSTM(4, 4), nn.Sequential(nn.Identity())

    @torch._dynamo.disable
    def forward(self, x):
        return square(self.layers(self.lstm(x)[0]))


def unheard_of(rank, world):
    """A parameter that came into a compiled module behind the back of torch's hooks, one beside a sharded module, and
    one whose optimizer has nothing else."""
    model = Inserted()
    call = compiled(model)
    model.lstm.requires_grad_(False)
    model.layers.insert(0, nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.layers.parameters(), lr=0.1)
    call(rows(rank)).backward()
    with pytest.raises(
        GradientError, match="parameter 'layers.0.weight' is that of this rank alone: it came into a"
    ):
        optimizer.step()

    said = []
    with mock.patch.object(averaged_modules.log, "warning", lambda *words: said.append(words[0] % words[1:])):
        net = Net(zero.shard(nn.Linear(4, 4)), nn.Linear(4, 2))
        for params in (net.head.parameters(), net.parameters()):
            optimizer = torch.optim.SGD(params, lr=0.1)
            net(rows(rank)).backward()
            optimizer.step()
            assert len(said) == (optimizer.param_groups[0]["params"][0] is net.backbone.weight)
    assert (
        "SGD steps 2 parameters, the first of shape [2, 4], with the gradient of this rank alone" in said[0]
    )
    return True


def test_parameters_that_nobody_averages_are_found_by_a_step():
    assert run_ranks(unheard_of, 2, timeout=200) == [True, True]


def moved_out(rank, world):
    """A part that leaves its model is averaged where it is compiled by itself, or called by a function."""
    for kind in ("itself", "function", "weight"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        gru = nn.GRU(4, 4) if kind == "itself" else nn.Linear(4, 4)
        model = nn.Sequential(gru)
        call = compiled(model)
        alone = compiled(gru)

        def loss_of(call, x):
            out = call(x)
            return square(out[0] if isinstance(out, tuple) else out)

        loss_of(call, rows(rank)).backward()
        model.zero_grad()
        twin = copy.deepcopy(gru)
        if kind == "weight":  # of which a penalty remains
            left, twin_left = gru.weight, nn.Parameter(gru.weight.detach().clone())
            gru.weight = nn.Parameter(torch.ones(4, 4))
            twin.weight = nn.Parameter(torch.ones(4, 4))
            for step in range(2):
                (loss_of(call, rows(rank, step)) + (gru.weight - left).square().sum()).backward()
                (square(twin(rows(rank, step))) + (twin.weight - twin_left).square().sum()).backward()
                compare_and_clear(gru, twin, f"{kind}, step {step}")
            continue
        model[0] = nn.Identity()
        again = alone if kind == "itself" else compiled(lambda x, part=gru: part(x))
        for step in range(2):
            loss_of(again, rows(rank, step)).backward()
            loss_of(twin, rows(rank, step)).backward()
            compare_and_clear(gru, twin, f"{kind}, step {step}")
    return True


def test_what_leaves_its_model():
    assert run_ranks(moved_out, 2, timeout=200) == [True, True]


def adapter_removed(rank, world):
    """Between a forward and its backward, on all ranks and on one."""
    for ranks in ((0, 1), (1,)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        adapter = nn.Linear(4, 2)
        twin = copy.deepcopy(nn.Sequential(*model, adapter))
        zero.shard(model, stage=3)
        model.append(adapter)
        loss = square(compiled(model)(rows(rank)))
        if rank in ranks:
            del model[2]
        loss.backward()
        square(twin(rows(rank))).backward()
        same_gradients(adapter, twin[2], f"removed on {ranks}")
    return True


def test_an_adapter_that_is_removed_before_the_backward():
    assert run_ranks(adapter_removed, 2, timeout=200, group_timeout=20) == [True, True]
