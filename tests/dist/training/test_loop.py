"""The user's own loop, two ranks, tiny models: each case beside plain PyTorch.

All cases of a file run in one set of ranks, since starting ranks costs more than the cases do; each is reported
as a test of its own. A case returns what is wrong, in sentences.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import Twin, average_gradients, local, part, whole
from dist.cases import Cases
from dist.loops import counters, data, eager, loss_of, moved, sharded
from models import FAMILIES, MLP, Broken, Uneven
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import zero_compiler as zero

pytestmark = [pytest.mark.dist, pytest.mark.slow]

cases = Cases(__name__, spawns=2)


# --- accumulation -----------------------------------------------------------------------------------------------


def accumulate(rank: int, make: Callable[..., nn.Module], quiet: int, stage: int) -> list[str]:
    """Three micro-batches, the first ``quiet`` of them under no_sync; two steps."""
    twin = Twin(
        MLP(), functools.partial(make, stage=stage), functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)
    )
    for step in range(3):
        twin.where = f"{make.__name__} stage {stage}, {quiet} quiet, step {step}"
        for micro in range(3):
            if micro < quiet:
                with zero.no_sync(twin.call):
                    twin.backward(loss_of(rank, 3 * step + micro), average=False)
            else:
                twin.backward(loss_of(rank, 3 * step + micro), average=False)
        average_gradients(twin.plain)
        twin.check_gradients()
        twin.step()
    twin.check_parameters()
    return twin.errors


@cases.add_thorough
def accumulation_with_a_reduction_each_time(rank: int) -> list[str]:
    # Each backward adds the mean of its own gradients, so the total is the mean of the sum.
    # Stages 1 and 2 are one plan.
    return [e for s in (0, 1, 3) for e in accumulate(rank, sharded, 0, s)] + accumulate(rank, eager, 0, 3)


@cases.add
def accumulation_under_no_sync(rank: int) -> list[str]:
    return (
        [e for s in (0, 2, 3) for e in accumulate(rank, sharded, 2, s)]
        + accumulate(rank, sharded, 1, 3)
        + accumulate(rank, eager, 2, 3)
        + accumulate(rank, eager, 2, 1)
    )


@cases.add
def no_sync_sends_no_gradient(rank: int) -> list[str]:
    """Nor weights, while they are kept: only stage 3 gathers them for every micro-batch."""
    errors = []
    for stage in range(4):
        # In memory that ranks share no weight is ever gathered, and nothing of it would show.
        model = sharded(MLP(), stage, transport="c10d")
        loss_of(rank, 0)(model).backward()

        def counted(step: int, m: nn.Module = model) -> dict[str, int]:
            before = counters(m)
            loss_of(rank, step)(m).backward()
            return {k: v - before[k] for k, v in counters(m).items()}

        with zero.no_sync(model):
            quiet = counted(1)
        loud = counted(2)
        if quiet["reduces"] or quiet["bytes_reduced"] or not loud["reduces"] or not loud["bytes_reduced"]:
            errors.append(f"stage {stage}: under no_sync {quiet}, after it {loud}")
        if (quiet["gathers"] > 0) != (stage == 3):
            errors.append(f"stage {stage}: {quiet['gathers']} gathers in a second micro-batch")
    return errors


@cases.add
def no_sync_sends_no_gradient_in_eager_code(rank: int) -> list[str]:
    errors = []
    for stage in range(4):
        model = eager(MLP(), stage, transport="c10d")
        loss_of(rank, 0)(model).backward()
        sent = {}
        for quiet in (True, False):
            with zero.no_sync(model) if quiet else contextlib.nullcontext():
                loss = loss_of(rank, 1)(model)
                with CommDebugMode() as found:
                    loss.backward()
            names = {str(op): n for op, n in found.get_comm_counts().items()}
            sent[quiet] = sum(n for op, n in names.items() if "reduce" in op)
        if sent[True] or not sent[False]:
            errors.append(f"stage {stage}: {sent[True]} reductions under no_sync, {sent[False]} after it")
    return errors


# --- generation -------------------------------------------------------------------------------------------------


def continued(twin: Twin, rank: int) -> torch.Tensor:
    """Tokens that the plain model writes after this rank's prompt; the sharded one is to write the same."""
    prompt = FAMILIES["gpt2"].data(rank, 90)["input_ids"]
    how = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 12, "do_sample": False}
    theirs = twin.plain.generate(prompt, **how)
    with zero.gathered(twin.call):
        ours = twin.call.generate(prompt, **how)
    if not torch.equal(ours, theirs):
        twin.say(f"wrote {ours.tolist()}, expected {theirs.tolist()}")
    return theirs


@cases.add
def generation_between_steps(rank: int) -> list[str]:
    return generation(rank, 3)


@cases.add_thorough
def generation_between_steps_from_kept_weights(rank: int) -> list[str]:
    return generation(rank, 2)


def generation(rank: int, *stages: int) -> list[str]:
    errors = []
    for stage in stages:
        family = FAMILIES["gpt2"]
        make = functools.partial(torch.optim.AdamW, lr=3e-2, eps=1e-3)
        twin = Twin(family.model(), functools.partial(sharded, stage=stage), make)
        written = []
        for step in range(3):
            twin.where = f"stage {stage}, step {step}"
            written.append(continued(twin, rank))
            twin.backward(lambda m, i=step: family.loss(m, family.data(rank, i)))
            twin.check_gradients()
            twin.step()
            twin.check_parameters()
        if torch.equal(written[0], written[-1]):
            twin.say("training changed nothing that is written: a stale weight would not show")
        errors += twin.errors
    return errors


# --- evaluation and kept weights --------------------------------------------------------------------------------


@cases.add
def kept_weights_are_gathered_once(rank: int) -> list[str]:
    """Stages 1 and 2: nothing is gathered again until the shards change; then it is, whoever changed them."""
    errors: list[str] = []
    for stage in (1, 2):
        # In memory that ranks share these weights are read where they lie, and nothing is ever gathered.
        make = functools.partial(sharded, stage=stage, transport="c10d")
        twin = Twin(MLP(), make, where=f"stage {stage}")
        model = twin.call

        def gathers(body: Callable[[], Any], m: nn.Module = model) -> int:
            return moved(m, "gathers", body)

        def evaluate(t: Twin = twin) -> None:
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    t.close("evaluation", loss_of(rank, 7)(t.call), loss_of(rank, 7)(t.plain_call))

        def expect(what: str, wanted: bool, body: Callable[[], Any], t: Twin = twin) -> None:
            count = gathers(body)
            if (count > 0) != wanted:
                t.say(f"{what}: {count} gathers, expected {'some' if wanted else 'none'}")

        twin.backward(loss_of(rank, 0), average=False)
        expect("second micro-batch", False, lambda t=twin: t.backward(loss_of(rank, 1), average=False))
        evaluate()  # compiles the frames of evaluation
        expect("evaluation", False, evaluate)
        average_gradients(twin.plain)
        twin.check_gradients()
        twin.step()
        expect("after a step", True, evaluate)
        expect("evaluation again", False, evaluate)
        for m in (twin.model, twin.plain):
            m.layers[0].weight.data.mul_(1.5)
        expect("after p.data.mul_", True, evaluate)
        with torch.no_grad():
            for m in (twin.model, twin.plain):
                m.layers[1].bias.add_(0.5)
        expect("after p.add_", True, evaluate)
        state = {k: v * 0.5 for k, v in twin.model.state_dict().items()}
        twin.model.load_state_dict(state)
        twin.plain.load_state_dict({k: v * 0.5 for k, v in twin.plain.state_dict().items()})
        expect("after load_state_dict", True, evaluate)
        twin.model.load_state_dict({k: v * 2 for k, v in state.items()}, assign=True)
        twin.plain.load_state_dict({k: v * 2 for k, v in twin.plain.state_dict().items()})
        expect("after load_state_dict(assign=True)", True, evaluate)
        # One rank's rows alone: the ranks must still agree on who gathers.
        if rank == 1:
            twin.model.layers[0].weight._local_tensor.add_(0.25)
        with torch.no_grad():
            twin.plain.layers[0].weight[8:].add_(0.25)
        expect("after a change on one rank", True, evaluate)
        errors += twin.errors
    return errors


@cases.add
def evaluation_between_steps(rank: int) -> list[str]:
    errors: list[str] = []
    loss = loss_of(rank, 0)
    for stage in (0, 2, 3):
        for make in (sharded, eager):
            torch._dynamo.reset()
            layers = nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 16)
            make_of = functools.partial(make, stage=stage)
            twin = Twin(nn.Sequential(*layers), make_of, where=f"{make.__name__} {stage}")
            for step in range(3):
                twin.train(lambda m, i: loss(m), 1)
                for m in (twin.call, twin.plain_call):
                    m.eval()
                for mode in (torch.no_grad, torch.inference_mode):
                    with mode():
                        losses = [loss(m) for m in (twin.call, twin.plain_call)]
                    twin.close(f"{mode.__name__} after step {step}", *losses)
                for m in (twin.call, twin.plain_call):
                    m.train()
            errors += twin.errors[:3]
    return errors


# --- shapes and frames ------------------------------------------------------------------------------------------


def of_many_sizes(rank: int, model: nn.Module, loss: Callable[..., torch.Tensor], compute: str) -> list[str]:
    """Ranks see different lengths, and recompile when they must: one dynamic graph serves them all."""
    twin = Twin(model, functools.partial(sharded, compute=compute))
    torch._dynamo.utils.counters.clear()
    counts = []
    for step, (rows, length) in enumerate(
        [(2, 8), (3, 8), (2, 11), (4, 9), (5, 13), (2, 6), (3, 17), (7, 10)]
    ):
        twin.where = f"step {step}"
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(1, 11, (rows + rank, length + 2 * rank), generator=generator)
        twin.backward(lambda m, ids=ids: loss(m, ids))
        twin.check_gradients()
        twin.step()
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    if not 0 < counts[0] < counts[3] == counts[-1]:
        twin.say(f"graphs compiled after each step: {counts}; sizes should have become dynamic by the fourth")
    return twin.errors


@cases.add_thorough
def dynamic_sizes(rank: int) -> list[str]:
    return of_many_sizes(
        rank, FAMILIES["gpt2"].model(), lambda m, ids: m(input_ids=ids, labels=ids).loss, "aten"
    )


def of_uneven_sizes(rank: int, compute: str) -> list[str]:
    """Of few operators: kernels take long to compile, and each is compiled for every kind of sizes."""
    return of_many_sizes(
        rank, Uneven(), lambda m, ids: F.cross_entropy(m(ids).flatten(0, 1), ids.flatten()), compute
    )


@cases.add
def dynamic_sizes_of_few_operators(rank: int) -> list[str]:
    return of_uneven_sizes(rank, "aten")


@cases.add_thorough
def dynamic_sizes_under_inductor(rank: int) -> list[str]:
    return of_uneven_sizes(rank, "inductor")


def told(rank: int, **what: bool) -> list[str]:
    """What torch.compile is told to capture: a whole model as one graph, of any sizes from the first call on."""

    def compiled(model: nn.Module) -> nn.Module:
        return torch.compile(zero.shard(model, compute="aten"), backend="zero", **what)

    torch._dynamo.utils.counters.clear()
    twin = Twin(FAMILIES["gpt2"].model(), compiled, where=str(what))
    for step in range(3):
        generator = torch.Generator().manual_seed(2 * step + rank)
        length = 8 + step + rank if "dynamic" in what else 8
        ids = torch.randint(1, 61, (2, length), generator=generator)
        twin.backward(lambda m, ids=ids: m(input_ids=ids, labels=ids).loss)
        twin.check_gradients()
        twin.step()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    if graphs != 1:
        twin.say(f"{graphs} graphs instead of one")
    return twin.errors


@cases.add_thorough
def one_graph(rank: int) -> list[str]:
    return told(rank, fullgraph=True)


@cases.add
def one_graph_of_any_sizes(rank: int) -> list[str]:
    return told(rank, fullgraph=True, dynamic=True)


@cases.add
def one_rank_recompiles_alone(rank: int) -> list[str]:
    errors = []
    for stage in (2, 3):
        twin = Twin(MLP(), functools.partial(sharded, stage=stage), where=f"stage {stage}")
        for step in range(4):
            rows = 4 if rank == 0 or step < 2 else 5 + step
            twin.backward(loss_of(rank, step, rows))
            twin.check_gradients()
            twin.step()
        errors += twin.errors
    return errors


@cases.add
def without_compile(rank: int) -> list[str]:
    errors = []
    for name in ("mlp", "odd", "lstm", "resnet", "mixed-dtypes"):
        family = FAMILIES[name]
        for stage in (0, 1, 3):
            twin = Twin(family.model(), functools.partial(eager, stage=stage), where=f"{name} {stage}")
            twin.train(lambda m, i, f=family: f.loss(m, f.data(rank, i)), 4)
            errors += twin.errors[:2]
    return errors


@cases.add
def one_rank_reads_parameters_alone(rank: int) -> list[str]:
    """Outside a forward ``module.weight`` is this rank's shard: reading it tells nobody and waits for nobody."""
    errors: list[str] = []
    for make, stage, transport in (
        (sharded, 0, "c10d"),
        (sharded, 2, "c10d"),
        (sharded, 3, "c10d"),
        (sharded, 3, "shared"),
        (eager, 3, "c10d"),
    ):
        twin = Twin(MLP(), functools.partial(make, stage=stage, transport=transport))
        twin.where = f"{make.__name__} {stage} {transport}"
        for step in range(2):
            twin.backward(loss_of(rank, step))
            twin.check_gradients()
            # The other rank goes on at once, into collectives that would meet whatever is sent here.
            if rank == step:
                before = {} if make is eager else counters(twin.model)  # only compiled frames have an engine
                with CommDebugMode() as sent:
                    for module in (*twin.model.layers, twin.model.norm):
                        for name, p in module.named_parameters():
                            read = getattr(module, name)
                            if read is not p or not isinstance(read.grad, DTensor):
                                twin.say(f"{name} is {type(read)} with a gradient {type(read.grad)}")
                            repr(read), read.shape, read.dtype, read.requires_grad
                            read.data.to_local().sum().item()
                            read.grad.to_local().sum().item()
                after = {} if make is eager else counters(twin.model)
                if sent.get_total_counts() or after != before:
                    twin.say(f"reading sent {dict(sent.get_comm_counts())}, {before} became {after}")
            twin.step()
        twin.check_parameters()
        errors += twin.errors[:3]
    return errors


# --- several models ---------------------------------------------------------------------------------------------


@cases.add
def actor_and_critic(rank: int) -> list[str]:
    """Two models, stepped in turn and then under one loss; one backward meets both."""
    errors = []
    for make in (sharded, eager):
        torch._dynamo.reset()
        actor = Twin(MLP(), functools.partial(make, stage=3), where=f"{make.__name__} actor")
        critic = Twin(Broken(), functools.partial(make, stage=2), where=f"{make.__name__} critic")
        for step in range(3):
            actor.backward(loss_of(rank, step))
            critic.backward(loss_of(rank, step + 10))
            x, y = data(rank, step + 20)
            F.mse_loss(critic.call(actor.call(x)), y).backward()
            F.mse_loss(critic.plain(actor.plain(x)), y).backward()
            # What each had before was averaged already, and is the same on all ranks: its mean is itself.
            for twin in (actor, critic):
                twin.where = f"{make.__name__} {'actor' if twin is actor else 'critic'} step {step}"
                average_gradients(twin.plain)
                twin.check_gradients()
                twin.step()
                twin.check_parameters()
        x, y = data(rank, 30)
        for calls in ((actor.call, critic.call), (actor.plain, critic.plain)):
            middle = calls[0](x)
            (F.mse_loss(calls[1](middle), y) + middle.square().mean()).backward()
        for twin in (actor, critic):
            twin.where += ", then joint"
            average_gradients(twin.plain)
            twin.check_gradients()
            twin.step()
            twin.check_parameters()
            errors += twin.errors[:4]
    return errors


@cases.add
def a_model_copied(rank: int) -> list[str]:
    """An average of the weights kept in a deep copy: its own parameters, its own programs."""
    model = zero.shard(MLP(), stage=2, compute="aten")
    other = copy.deepcopy(model)
    first, second = torch.compile(model, backend="zero"), torch.compile(other, backend="zero")
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.5)
    plain = MLP()
    plain.load_state_dict({k: whole(v) for k, v in other.state_dict().items()})
    x, _ = data(rank, 0)
    errors = []
    if not torch.allclose(second(x), plain(x), rtol=1e-5, atol=1e-6):
        errors.append("the copy does not compute with its own weights")
    if torch.allclose(first(x), second(x)):
        errors.append("the original changed with its copy")
    return errors


# --- the tests --------------------------------------------------------------------------------------------------


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", cases.names)
def test_loop(name: str) -> None:
    cases.check(name)


def test_the_comparison_can_fail() -> None:
    class Wrong(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x) * (1 + 1e-4)

    twin = Twin(MLP(), eager)
    inner = twin.call
    twin.call = Wrong(inner)
    twin.backward(loss_of(0, 0))
    twin.check_gradients()
    assert any("loss" in e for e in twin.errors)
    assert any("gradient" in e for e in twin.errors)
    grad = next(twin.model.parameters()).grad
    assert isinstance(grad, DTensor)
    assert local(grad).shape == part(next(twin.plain.parameters()).grad, grad).shape
