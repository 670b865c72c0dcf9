"""What other libraries would do to a sharded model, on two ranks: one sentence on all of them, and nobody waits."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
import torch.distributed as dist
from compare import Twin
from dist.cases import Cases
from null.small import mlp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import zero_compiler as zero
from zero_compiler.errors import GradientError, ShardError

pytestmark = pytest.mark.dist
cases = Cases(__name__, group_timeout=20.0)


def sharded():
    return zero.shard(mlp(), device="cpu", compute="aten")


def wrong(call, words, kind=ShardError):
    """What is wrong with the error of a call: nothing where it has these words."""
    try:
        call()
    except kind as error:
        return [] if words in str(error) else [f"it says {error}"]
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    return [f"no error with {words!r}"]


@cases.add
def other_ways_to_train_in_parallel(rank):
    ddp = nn.parallel.DistributedDataParallel
    fsdp = partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
    out = []
    for by, name in ((ddp, "DistributedDataParallel"), (fsdp, "FullyShardedDataParallel")):
        for inner in (lambda m: m, lambda m: nn.Sequential(m, nn.Linear(3, 3))):
            out += wrong(lambda by=by, inner=inner: by(inner(sharded())), f"{name}")
    out += wrong(lambda: fully_shard(sharded()), "fully_shard around a sharded model")
    out += wrong(lambda: fully_shard(sharded()[0]), "fully_shard around a sharded model")
    ddp(mlp())
    return out


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.ours, self.theirs = mlp(), nn.Linear(3, 2)

    def forward(self, x):
        return self.theirs(torch.tanh(self.ours(x)))


@cases.add
def fully_shard_of_what_stands_beside_a_sharded_part(rank):
    """It leaves the part alone, and both train."""
    model, plain = Mixed(), Mixed()
    zero.shard(model.ours, device="cpu", compute="aten")
    fully_shard(model)
    out = []
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, plain)]
    for step in range(2):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(2 * step + rank))
        for m in (model, plain):
            m(x).square().mean().backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            dist.all_reduce(q.grad)
            q.grad /= 2
            if not torch.allclose(p.grad.full_tensor(), q.grad, atol=1e-6):
                out.append(f"gradient of {name}")
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (model, plain)]
        if not torch.allclose(norms[0].full_tensor(), norms[1]):
            out.append("norms")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return out + [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]


class Saves(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.called = nn.Linear(4, 3), []

    def forward(self, x):
        return self.inner(x)

    def save_pretrained(self, folder):
        self.called.append(folder)

    def get_input_embeddings(self):
        return self.inner

    def resize_token_embeddings(self, new_num_tokens=None):
        self.called.append(new_num_tokens)


@cases.add
def saving_by_one_rank_alone(rank):
    out = []
    for compiled in (False, True):
        model = zero.shard(Saves(), device="cpu", compute="aten")
        call = torch.compile(model, backend="zero") if compiled else model
        x = torch.randn(2, 4)
        call(x)
        words = "write `with zero.gathered(model):` around save_pretrained()"
        if rank == 0:
            out += wrong(lambda model=model: model.save_pretrained("there"), words)
        else:
            out += wrong(
                lambda call=call, x=x: call(x), "rank 0 of 2 could not go on behind save_pretrained(): "
            )
            # And the next one meets again.
        call(x)
        with zero.gathered(model):
            if rank == 0:
                model.save_pretrained("there")
        call(x).sum().backward()
    return out


@cases.add
def saving_by_all_ranks(rank):
    model = zero.shard(Saves(), device="cpu", compute="aten")
    out = wrong(
        lambda: model.save_pretrained("there"), "write `with zero.gathered(model):` around save_pretrained()"
    )
    model(torch.randn(2, 4)).sum().backward()
    return out


@cases.add
def token_embeddings_of_another_number(rank):
    """By all ranks, and by one alone, whose caller catches the refusal: both go on."""
    model, x = zero.shard(Saves(), device="cpu", compute="aten"), torch.randn(2, 4)
    model.resize_token_embeddings(3)
    words = "call resize_token_embeddings() before zero.shard"
    out = wrong(lambda: model.resize_token_embeddings(5), words)
    model(x)
    if rank == 1:
        out += wrong(lambda: model.resize_token_embeddings(5), words)
    model(x).sum().backward()
    return out + [f"called with {n}" for n in model.called if n != 3]


@cases.add
def a_penalty_outside_of_the_forward(rank):
    out = []
    words = 'p.full_tensor(grad_placements=[Partial("avg")])'
    for compiled in (False, True):
        model = sharded()
        call = torch.compile(model, backend="zero") if compiled else model
        loss = call(torch.randn(2, 4)).sum() + sum(p.pow(2).sum() for p in model.parameters())
        out += wrong(loss.backward, words, GradientError)
        model.zero_grad()
        call(torch.randn(2, 4)).sum().backward()
    return out


class Penalised(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x):
        penalty = sum(p.square().sum() for n, p in self.named_parameters() if "weight" in n)
        return self.a(x) + penalty + 0.0 * sum(p.sum() for p in self.b.parameters())


@cases.add
def a_penalty_inside_of_the_forward(rank):
    out = []
    for compiled in (False, True):
        twin = Twin(Penalised(), partial(_called, compiled), partial(torch.optim.SGD, lr=0.01))
        for step in range(2):
            x = torch.linspace(-1, 1, 10).view(2, 5) + rank + step
            twin.backward(lambda m, x=x: m(x).square().mean())
            twin.check_gradients()
            twin.step()
        out += twin.errors
    return out


def _called(compiled, model):
    model = zero.shard(model, device="cpu", compute="aten")
    return torch.compile(model, backend="zero") if compiled else model


@cases.add
def random_numbers_of_rows(rank):
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    model = sharded()
    logger = logging.getLogger("zero_compiler")
    logger.addHandler(handler)
    try:
        with zero.init():
            nn.init.normal_(model[0].weight)
        before = list(said)
        for _ in range(2):
            nn.init.kaiming_uniform_(model[0].weight)
            model[0].reset_parameters()
    finally:
        logger.removeHandler(handler)
    told = len(said) == 1 and "do it inside `with zero.init():`" in said[0]
    return [] if told and not before else [f"said: {said}"]


@pytest.mark.parametrize("name", cases.names)
def test_it(name):
    cases.check(name)
