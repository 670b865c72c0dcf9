"""Which plain parameters are averaged, on two ranks: those of modules, however and whenever they come into one.

The reference is plain PyTorch on the same inputs, whose gradients are averaged by hand.
"""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dist.spawn import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import zero_compiler as zero
from zero_compiler.errors import GradientError, RankMismatchError, ZeroError
from zero_compiler.params import ddp_fallback, plain_modules

pytestmark = pytest.mark.dist


def compiled(what):
    return torch.compile(what, backend="zero", options={"compute": "aten"})


def rows(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def square(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def same_gradients(ours: nn.Module, twin: nn.Module, where: str = "", averaged: bool = True) -> None:
    """Of ``ours`` those of ``twin``, whose mean over the ranks they are unless not ``averaged``."""
    for (name, p), q in zip(ours.named_parameters(), twin.parameters(), strict=True):
        want = torch.zeros_like(q) if q.grad is None else q.grad.clone()
        if averaged:
            dist.all_reduce(want)
            want /= dist.get_world_size()
        mine = torch.zeros_like(want) if p.grad is None else p.grad
        mine = mine.full_tensor() if isinstance(mine, torch.distributed.tensor.DTensor) else mine
        torch.testing.assert_close(mine, want, msg=lambda m, n=name: f"{where} {n}: {m}")


def compare_and_clear(ours: nn.Module, twin: nn.Module, where: str = "") -> None:
    same_gradients(ours, twin, where)
    ours.zero_grad()
    twin.zero_grad()


def steps(ours: nn.Module, call: Callable[..., torch.Tensor], twin: nn.Module, rank: int, where: str) -> None:
    for step in range(2):
        x = rows(rank, step)
        call(x).backward()
        twin(x).backward()
        compare_and_clear(ours, twin, f"{where}, step {step}:")


# --- what changes after compile ----------------------------------------------------------------------------------


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


class Unseen(nn.Module):
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
        (Unseen, lambda model: model.requires_grad_(True)),
        (Unseen, given_values),
        (Unseen, given_another),
        (OfAnotherClass, lambda model: None),
    ):
        for called_before in (False, True):
            torch._dynamo.reset()
            torch.manual_seed(0)
            ours = kind()
            if change is unfrozen:
                ours.eager.requires_grad_(False)
            elif kind is Unseen and change is not given_values and not called_before:
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


# --- what a compiled function calls ------------------------------------------------------------------------------


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
    with mock.patch.object(plain_modules.log, "warning", lambda *words: said.append(words[0] % words[1:])):
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


# --- what is compiled in several ways ----------------------------------------------------------------------------


class Holder:
    """No module, so that none is a variable of the function that calls it."""

    def __init__(self, *parts: nn.Module) -> None:
        self.parts = parts
        self.calls = [compiled(part) for part in parts]


def trained_apart_before(rank, world):
    """Modules that were trained each by itself, then as parts of one model, accumulating."""
    torch.manual_seed(0)
    holder = Holder(nn.Linear(4, 4), nn.Linear(4, 4))
    twins = copy.deepcopy(holder.parts)
    for call, ours, twin in zip(holder.calls, holder.parts, twins, strict=True):
        square(call(rows(rank))).backward()
        square(twin(rows(rank))).backward()
        compare_and_clear(ours, twin, "apart")
    head = nn.Linear(4, 1)
    whole, twin = nn.Sequential(*holder.parts, head), nn.Sequential(*twins, copy.deepcopy(head))
    call = compiled(whole)
    for step in range(2):
        with zero.no_sync(whole):
            for k in (1, 2):
                square(call(rows(rank, 3 * step + k))).backward()
        square(call(rows(rank, 3 * step))).backward()
        for k in range(3):
            square(twin(rows(rank, 3 * step + k))).backward()
        compare_and_clear(whole, twin, f"step {step}")
    return True


def test_modules_that_were_trained_apart_before():
    assert run_ranks(trained_apart_before, 2, timeout=200) == [True, True]


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


def a_part_first(rank, world):
    """One rank alone calls a part of the model before, with gradients, and runs no backward."""
    torch.manual_seed(0)
    holder = Holder(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)))
    twin = copy.deepcopy(holder.parts[0])

    def look():
        part = holder.parts[0][1]
        compiled(part)(rows(rank))

    if rank == 1:
        look()
    square(holder.calls[0](rows(rank))).backward()
    square(twin(rows(rank))).backward()
    same_gradients(holder.parts[0], twin)
    return True


def test_a_rank_that_called_a_part_before():
    assert run_ranks(a_part_first, 2, timeout=200) == [True, True]


# --- what one rank alone has done before -------------------------------------------------------------------------


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


def skipped(rank, world):
    """Blocks that are compiled each by itself, of which ranks skip different ones."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
    twin = copy.deepcopy(model)
    for i, block in enumerate(model):
        model[i] = compiled(block)

    def loss_of(blocks, skip, x):
        for i, block in enumerate(blocks):
            if i != skip:
                x = block(x)
        return square(x)

    for step in range(3):
        for blocks in (model, twin):
            loss_of(blocks, (step + rank) % 4, rows(rank, step)).backward()
        compare_and_clear(model, twin, f"step {step}")
    return True


def test_blocks_of_which_ranks_skip_different_ones():
    assert run_ranks(skipped, 2, timeout=200) == [True, True]


def one_each(rank, world):
    """Ranks that train different models of one class, which have equal values or others: of each the gradient is zero
    where it was not used."""
    for equal in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        holder = Holder(nn.Linear(4, 2), nn.Linear(4, 2))
        if equal:
            holder.parts[1].load_state_dict(holder.parts[0].state_dict())
        twins = copy.deepcopy(holder.parts)
        for step in range(3):
            for i in (0, 1) if step == 1 or equal else ((rank + step) % 2,):
                square(holder.calls[i](rows(rank, step))).backward()
                square(twins[i](rows(rank, step))).backward()
            for i, (ours, twin) in enumerate(zip(holder.parts, twins, strict=True)):
                compare_and_clear(ours, twin, f"equal: {equal}, step {step}, model {i}")
    return True


def test_ranks_that_train_different_models():
    assert run_ranks(one_each, 2, timeout=200) == [True, True]


def steps_differ(rank, world):
    """A rank whose backward brought no gradient of these has stepped once more when it comes to its next average."""
    torch.manual_seed(0)
    holder = Holder(nn.Linear(4, 2))
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


def out_of_memory(rank, world):
    """A rank fails among the collectives of an average: the other ends with its reason, and soon; nobody steps."""
    torch.manual_seed(0)
    holder = Holder(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(holder.parts[0].parameters(), lr=0.1)
    square(holder.calls[0](rows(rank))).backward()
    optimizer.step()

    def fails(grads, group):
        raise MemoryError("no room for a bucket")

    began = time.monotonic()
    with mock.patch.object(
        ddp_fallback, "_average_in_buckets", fails if rank else ddp_fallback._average_in_buckets
    ):
        with pytest.raises((MemoryError, ZeroError), match="no room for a bucket"):
            square(holder.calls[0](rows(rank))).backward()
    assert time.monotonic() - began < 20
    with pytest.raises(GradientError, match="those of this rank alone"):
        optimizer.step()
    return True


def test_an_average_that_fails_on_one_rank():
    assert run_ranks(out_of_memory, 2, timeout=100, group_timeout=60) == [True, True]


def not_told_apart(rank, world):
    """Of two models with equal values and names each rank trains another one first."""
    holder = Holder(*(nn.Linear(4, 2) for _ in range(2)))
    for part in holder.parts:
        nn.init.zeros_(part.weight)
        nn.init.zeros_(part.bias)
    with pytest.raises(RankMismatchError, match="nothing says which of them is which on another rank"):
        square(holder.calls[rank](rows(rank))).backward()
    return True


def test_copies_that_nothing_tells_apart():
    assert run_ranks(not_told_apart, 2, timeout=200) == [True, True]


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


def one_rank_does_more(rank, world):
    """A rank alone keeps a module around the model, trains a copy under zero.no_sync, and validates with gradients."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    twin, copied = copy.deepcopy(ours), copy.deepcopy(ours)
    call, other = compiled(ours), compiled(copied)
    around = nn.Sequential(ours, nn.Softmax(-1)) if rank == 0 else None
    if around is not None:
        with zero.no_sync(copied):
            square(other(rows(rank))).backward()
        copied.zero_grad()
        compiled(around)(rows(rank, 5)[:2])
    for step in range(2):
        if rank == 1:
            call(rows(rank, 7)[:1])
        (square(call(rows(rank, step))) + 2 * square(other(rows(rank, step)))).backward()
        square(twin(rows(rank, step))).backward()
        same_gradients(ours, twin, f"step {step}")
        for q in twin.parameters():
            q.grad *= 2
        same_gradients(copied, twin, f"step {step}, copy")
        for module in (ours, copied, twin):
            module.zero_grad()
    return True


def test_what_a_rank_does_besides():
    assert run_ranks(one_rank_does_more, 2, timeout=200) == [True, True]


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


def in_two_groups(rank, world):
    """A backward of which parts are averaged over different groups, that ranks came to know in different orders."""
    mesh = DeviceMesh.from_group(dist.new_group([0, 1]), "cpu")
    held = Holder()
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


# --- what nobody averages ----------------------------------------------------------------------------------------


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
    with mock.patch.object(plain_modules.log, "warning", lambda *words: said.append(words[0] % words[1:])):
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


# --- what leaves a model -----------------------------------------------------------------------------------------


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


def broken_off(rank, world):
    """A backward that failed, and then a model of which the other was a part."""

    def failing(grad):
        raise KeyError

    torch.manual_seed(0)
    holder = Holder(nn.Linear(4, 4), nn.Linear(4, 4))
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


# --- first values, and small numbers -----------------------------------------------------------------------------


def other_values(rank, world):
    for change in ("order", "place"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        if rank:
            with torch.no_grad():
                w = model.weight
                w.copy_(w.flip(0).clone() if change == "order" else w.t().clone())
        with pytest.raises(RankMismatchError, match="different values of parameter 'weight'"):
            square(compiled(model)(rows(rank))).backward()
    return True


def test_the_same_numbers_in_other_places_are_other_values():
    assert run_ranks(other_values, 2, timeout=200) == [True, True]


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
