"""The user's own loop, two ranks, tiny models: each case beside plain PyTorch.

All cases of a group run in one set of ranks, since starting ranks costs more than the cases do; each is reported
as a test of its own. A case returns what is wrong, in sentences.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from compare import Twin, average_gradients, local, part, whole
from dist.spawn import answers, run_ranks
from models import FAMILIES, MLP, Broken
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import zero_compiler as zero
from zero_compiler.errors import ShardError
from zero_compiler.modules import policies_of

pytestmark = [pytest.mark.dist, pytest.mark.slow]

CASES: dict[str, Callable[[int], list[str]]] = {}


def case(fn: Callable[[int], list[str]]) -> Callable[[int], list[str]]:
    CASES[fn.__name__] = fn
    return fn


def run_cases(rank: int, world: int, names: list[str]) -> dict[str, list[str]]:
    return answers(CASES, rank, names)


@functools.cache
def results() -> list[dict[str, list[str]]]:
    return run_ranks(run_cases, 2, list(CASES), timeout=550.0, group_timeout=100.0)


def sharded(model: nn.Module, stage: int = 3, **fields: Any) -> nn.Module:
    return torch.compile(zero.shard(model, stage=stage, **{"compute": "aten", **fields}), backend="zero")


def eager(model: nn.Module, stage: int = 3, **fields: Any) -> nn.Module:
    return zero.shard(model, stage=stage, **fields)


def aot(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager")


def data(rank: int, step: int, rows: int = 4, width: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, width, generator=generator), torch.randn(rows, width, generator=generator)


def loss_of(rank: int, step: int, rows: int = 4) -> Callable[[nn.Module], torch.Tensor]:
    x, y = data(rank, step, rows)
    return lambda m: F.mse_loss(m(x), y)


def counters(model: nn.Module) -> dict[str, int]:
    return dict(policies_of(model)[0].runtime.engine.counters())


def moved(model: nn.Module, what: str, body: Callable[[], Any]) -> int:
    """How often the engine did ``what`` during ``body``."""
    before = counters(model)[what]
    body()
    return counters(model)[what] - before


def programs(model: nn.Module, phase: str) -> list[Any]:
    return [
        p
        for policy in policies_of(model)
        for frame in policy.frames
        for p in frame.programs.values()
        if p.phase == phase
    ]


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


@case
def accumulation_with_a_reduction_each_time(rank: int) -> list[str]:
    # Each backward adds the mean of its own gradients, so the total is the mean of the sum.
    return [e for s in range(4) for e in accumulate(rank, sharded, 0, s)] + accumulate(rank, eager, 0, 3)


@case
def accumulation_under_no_sync(rank: int) -> list[str]:
    return (
        [e for s in range(4) for e in accumulate(rank, sharded, 2, s)]
        + accumulate(rank, sharded, 1, 3)
        + accumulate(rank, eager, 2, 3)
        + accumulate(rank, eager, 2, 1)
    )


@case
def no_sync_reduces_nothing(rank: int) -> list[str]:
    errors = []
    for stage in (1, 3):
        model = sharded(MLP(), stage)
        loss_of(rank, 0)(model).backward()
        with zero.no_sync(model):
            quiet = moved(model, "reduces", lambda m=model: loss_of(rank, 1)(m).backward())
        loud = moved(model, "reduces", lambda m=model: loss_of(rank, 2)(m).backward())
        if quiet != 0 or loud == 0:
            errors.append(f"stage {stage}: {quiet} reductions under no_sync, {loud} after it")
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


@case
def generation_between_steps(rank: int) -> list[str]:
    errors = []
    for stage in (2, 3):
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


# --- optimizers -------------------------------------------------------------------------------------------------


@case
def optimizers_and_schedules(rank: int) -> list[str]:
    errors: list[str] = []
    kinds: dict[str, Any] = {
        "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        "adam": functools.partial(torch.optim.Adam, lr=1e-2, eps=1e-3),
        "adamw foreach": functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, foreach=True),
        "sgd fused": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
        "adamw fused": functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, fused=True),
    }
    for name, make in kinds.items():
        twin = Twin(MLP(), sharded, make, where=name)
        schedules = [
            torch.optim.lr_scheduler.OneCycleLR(o, max_lr=2e-2, total_steps=20)
            for o in (twin.opt, twin.plain_opt)
        ]
        for step in range(20):
            twin.backward(loss_of(rank, step))
            norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.05) for m in (twin.model, twin.plain)]
            twin.close("norm that clipping returns", whole(norms[0]), norms[1])
            twin.check_gradients()
            twin.step()
            for schedule in schedules:
                schedule.step()
        twin.check_parameters()
        errors += twin.errors[:3]
    return errors


@case
def adafactor(rank: int) -> list[str]:
    twin = Twin(MLP(), sharded, functools.partial(torch.optim.Adafactor, lr=1e-2, eps=(1e-3, 1e-3)))
    twin.train(lambda m, i: loss_of(rank, i)(m), 10)
    return twin.errors


@case
def adam_with_its_own_eps(rank: int) -> list[str]:
    """Default Adam divides noise by noise where a gradient is near zero; the bound follows from its formula.

    An element moves by lr * u, u = m / (s + eps), where m = sum a_i g_i and s = sqrt(sum b_i g_i^2) are averages
    with weights that sum to 1 (that is what the bias corrections are for). Let every gradient so far differ by at
    most d. Then |m - m'| <= d, and |s - s'| <= d, since a weighted root mean square is a norm. With

        m/(s+eps) - m'/(s'+eps) = (m - m')/(s'+eps) + u (s' - s)/(s'+eps)

    the step differs by at most lr * d * (1 + |u|) / (s' + eps), and never by more than lr * (|u| + |u'|). By Cauchy
    and Schwarz |u|^2 <= sum a_i^2 / b_i, which is U^2 below. Parameters differ by no more than the sum over the
    steps, and one rounding of the parameter a step, twice. Nothing here is fitted: d is measured, for each element.
    """
    lr, beta1, beta2, eps, steps = 1e-3, 0.9, 0.999, 1e-8, 20
    twin = Twin(MLP(), sharded, functools.partial(torch.optim.Adam, lr=lr))
    bound = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in twin.plain.named_parameters()}
    apart = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in twin.plain.named_parameters()}
    for step in range(1, steps + 1):
        twin.where = f"step {step}"
        twin.backward(loss_of(rank, step))
        if step == 1:
            twin.check_gradients()
        ours = {n: whole(p.grad).double() for n, p in twin.model.named_parameters()}
        for n, p in twin.plain.named_parameters():
            apart[n] = torch.maximum(apart[n], (ours[n] - p.grad.double()).abs())
        twin.step()
        a = [(1 - beta1) * beta1**k / (1 - beta1**step) for k in range(step)]
        b = [(1 - beta2) * beta2**k / (1 - beta2**step) for k in range(step)]
        most = math.sqrt(sum(x * x / y for x, y in zip(a, b, strict=True)))
        for n, p in twin.plain.named_parameters():
            s = (twin.plain_opt.state[p]["exp_avg_sq"].double() / (1 - beta2**step)).sqrt()
            u = torch.full_like(s, most)
            # fp32 arithmetic of the update itself: a few roundings of u.
            slack = 8 * torch.finfo(torch.float32).eps * most
            bound[n] += lr * (torch.minimum((1 + u) * apart[n] / (s + eps), 2 * u) + slack)
            bound[n] += 2 * torch.finfo(torch.float32).eps * p.detach().double().abs()
    for n, p in twin.model.named_parameters():
        q = dict(twin.plain.named_parameters())[n]
        worst = ((whole(p).double() - q.detach().double()).abs() - bound[n]).max()
        if not worst <= 0:
            twin.say(f"parameter {n} is off by {float(worst):.2e} more than the bound")
        if float(bound[n].median()) > lr:
            twin.say(f"the bound on {n} says nothing: {float(bound[n].median()):.1e}")
    return twin.errors


@case
def optimizers_that_need_whole_parameters(rank: int) -> list[str]:
    errors = []
    for cls in (torch.optim.LBFGS, torch.optim.Rprop):
        make = functools.partial(cls, lr=0.1)
        twin = Twin(MLP(), functools.partial(eager, stage=0), make, where=f"{cls.__name__}, stage 0")

        def again(model: nn.Module, opt: torch.optim.Optimizer) -> torch.Tensor:
            opt.zero_grad()
            loss = loss_of(rank, 0)(model)
            loss.backward()
            if model is twin.plain_call:
                average_gradients(model)
            mean = loss.detach().clone()  # ranks stop together
            dist.all_reduce(mean)
            return mean

        for _ in range(2):
            for model, opt in ((twin.call, twin.opt), (twin.plain_call, twin.plain_opt)):
                opt.step(functools.partial(again, model, opt))
        twin.check_parameters()
        errors += twin.errors[:4]
        model = eager(MLP())
        loss_of(rank, 0)(model).backward()
        try:
            make(model.parameters()).step(lambda: torch.zeros(()))
            errors.append(f"{cls.__name__} stepped shards")
        except ShardError as error:
            if f"{cls.__name__} needs parameters that are whole" not in str(error):
                errors.append(str(error))
    return errors


def scaled_backward(
    twin: Twin, scalers: list[torch.amp.GradScaler], x: torch.Tensor, y: torch.Tensor
) -> None:
    for model, scaler in zip((twin.call, twin.plain_call), scalers, strict=True):
        scaler.scale(F.mse_loss(model(x), y)).backward()
    average_gradients(twin.plain)


def scaled_step(twin: Twin, scalers: list[torch.amp.GradScaler], unscale: bool) -> None:
    """Step both, with gradients unscaled by the user or by the scaler, and compare."""
    for opt, scaler in zip((twin.opt, twin.plain_opt), scalers, strict=True):
        if unscale:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    if scalers[0].get_scale() != scalers[1].get_scale():
        twin.say(f"scale is {scalers[0].get_scale()}, expected {scalers[1].get_scale()}")
    twin.check_parameters()


@case
def gradient_scaler(rank: int) -> list[str]:
    """Scaled losses; a step in which one rank alone overflows is skipped by every rank."""
    twin = Twin(MLP(), sharded, functools.partial(torch.optim.SGD, lr=0.1))
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
    for step in range(6):
        twin.where = f"step {step}"
        x, y = data(rank, step)
        if step == 3 and rank == 1:
            x = x * float("inf")
        scaled_backward(twin, scalers, x, y)
        scaled_step(twin, scalers, unscale=True)
    return twin.errors


class Scaled(nn.Module):
    """A scalar comes first, and of ``one`` the second rank has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.one, self.last = nn.Linear(16, 1), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x + self.one(x)) * self.scale


@case
def gradient_scaler_where_one_rank_overflows(rank: int) -> list[str]:
    """In its rows alone: every rank skips the step, whatever lies first and whoever unscales."""
    errors = []
    kinds = {
        "sgd": functools.partial(torch.optim.SGD, lr=0.1),
        "sgd fused": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
        "adamw fused": functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, fused=True),
    }
    for name, make in kinds.items():
        twin = Twin(Scaled(), sharded, make)
        scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
        for step in range(6):
            twin.where = f"{name}, step {step}"
            x, y = data(rank, step)
            scaled_backward(twin, scalers, x, y)
            if step in (1, 2):
                twin.plain.last.weight.grad[-1] = math.inf  # a row of the last rank
                local(twin.model.last.weight.grad)[-1] = math.inf if rank == 1 else 0.0
            scaled_step(twin, scalers, unscale=step % 2 == 1)
        errors += twin.errors[:3]
    return errors


# --- evaluation and kept weights --------------------------------------------------------------------------------


@case
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


@case
def evaluation_between_steps(rank: int) -> list[str]:
    errors: list[str] = []
    for stage in (0, 2, 3):
        for make in (sharded, eager):
            torch._dynamo.reset()
            twin = Twin(
                FAMILIES["resnet"].model(),
                functools.partial(make, stage=stage),
                where=f"{make.__name__} {stage}",
            )
            batch = FAMILIES["resnet"].data(rank, 0)
            for step in range(3):
                twin.train(lambda m, i, b=batch: FAMILIES["resnet"].loss(m, b), 1)
                for m in (twin.call, twin.plain_call):
                    m.eval()
                for mode in (torch.no_grad, torch.inference_mode):
                    with mode():
                        losses = [FAMILIES["resnet"].loss(m, batch) for m in (twin.call, twin.plain_call)]
                    twin.close(f"{mode.__name__} after step {step}", *losses)
                for m in (twin.call, twin.plain_call):
                    m.train()
            errors += twin.errors[:3]
    return errors


# --- randomness and recomputation -------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([MLP(16, 2, dropout) for _ in range(2)])
        self.head = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def randomly(rank: int, twin: Twin, steps: int = 5) -> list[str]:
    where = twin.where
    for step in range(steps):
        twin.where = f"{where} step {step}"
        torch.manual_seed(10 * step + rank)  # ranks drop different elements
        twin.backward(loss_of(rank, step))
        twin.check_gradients()
        twin.step()
    twin.check_parameters()
    torch.manual_seed(0)  # the next model is built alike on every rank
    return twin.errors[:4]


@case
def dropout(rank: int) -> list[str]:
    errors = []
    for stage in (0, 2, 3):
        # Under the same capture, the same seed draws the same numbers; recomputation must not draw anew.
        twin = Twin(
            MLP(dropout=0.3), functools.partial(sharded, stage=stage), reference=aot, where=f"stage {stage}"
        )
        errors += randomly(rank, twin)
    errors += randomly(rank, Twin(MLP(dropout=0.3), eager, where="eager"))
    model = sharded(MLP(dropout=0.3))
    x, _ = data(0, 0)  # the same on every rank
    torch.manual_seed(rank)
    one = model(x).detach()
    both = [torch.empty_like(one) for _ in range(2)]
    torch.distributed.all_gather(both, one)
    if torch.equal(*both):
        errors.append("ranks with different seeds dropped the same elements")
    return errors


@case
def checkpointed_regions(rank: int) -> list[str]:
    errors = []
    for stage in (1, 3):
        twin = Twin(Checkpointed(0.0), functools.partial(sharded, stage=stage), where=f"stage {stage}")
        errors += randomly(rank, twin)
        twin = Twin(
            Checkpointed(0.2),
            functools.partial(sharded, stage=stage),
            reference=aot,
            where=f"dropout {stage}",
        )
        errors += randomly(rank, twin)
        errors += randomly(
            rank, Twin(Checkpointed(0.2), functools.partial(eager, stage=stage), where=f"eager {stage}")
        )
    return errors


# --- shapes and frames ------------------------------------------------------------------------------------------


def of_many_sizes(rank: int, compute: str) -> list[str]:
    """Ranks see different lengths, and recompile when they must: one dynamic graph serves them all."""
    twin = Twin(FAMILIES["gpt2"].model(), functools.partial(sharded, compute=compute))
    torch._dynamo.utils.counters.clear()
    counts = []
    for step, (rows, length) in enumerate(
        [(2, 8), (3, 8), (2, 11), (4, 9), (5, 13), (2, 6), (3, 17), (7, 10)]
    ):
        twin.where = f"step {step}"
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(1, 61, (rows + rank, length + 2 * rank), generator=generator)
        twin.backward(lambda m, ids=ids: m(input_ids=ids, labels=ids).loss)
        twin.check_gradients()
        twin.step()
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    if not 0 < counts[0] < counts[3] == counts[-1]:
        twin.say(f"graphs compiled after each step: {counts}; sizes should have become dynamic by the fourth")
    return twin.errors


@case
def dynamic_sizes(rank: int) -> list[str]:
    return of_many_sizes(rank, "aten")


@case
def dynamic_sizes_under_inductor(rank: int) -> list[str]:
    return of_many_sizes(rank, "inductor")


@case
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


@case
def without_compile(rank: int) -> list[str]:
    errors = []
    for name in ("mlp", "odd", "lstm", "resnet", "mixed-dtypes"):
        family = FAMILIES[name]
        for stage in (0, 1, 3):
            twin = Twin(family.model(), functools.partial(eager, stage=stage), where=f"{name} {stage}")
            twin.train(lambda m, i, f=family: f.loss(m, f.data(rank, i)), 4)
            errors += twin.errors[:2]
    return errors


# --- autocast ---------------------------------------------------------------------------------------------------


@case
def autocast(rank: int) -> list[str]:
    errors = []
    for stage in (2, 3):
        # Under one capture the same roundings to bf16 are made, and the sum of two ranks has one order: equal bits.
        # A tolerance would have to be that of bf16, within which fp32 lies too.
        twin = Twin(MLP(), functools.partial(sharded, stage=stage), reference=aot, where=f"stage {stage}")

        def loss(m: nn.Module, step: int) -> torch.Tensor:
            x, y = data(rank, step)
            with torch.autocast("cpu", torch.bfloat16):
                out = m(x)
            return F.mse_loss(out.float(), y)

        for step in range(5):
            twin.backward(lambda m, s=step: loss(m, s), exact=True)
            twin.check_gradients(exact=True)
            twin.step()
        twin.check_parameters(exact=True)
        without = loss_of(rank, 0)(twin.call)
        if torch.equal(without, loss(twin.call, 0)):
            twin.say("the loss is that without autocast")
        errors += twin.errors[:3]
        full = {tuple(p.shape) for p in twin.plain.parameters() if p.dim() == 2}
        for frame in policies_of(twin.call)[0].frames:
            for program in frame.programs.values():
                if program.phase != "forward":
                    continue
                gathers = {i for i, g in enumerate(program.gathers)}
                if not gathers:
                    errors.append(f"stage {stage}: forward gathers nothing")
        saved = saved_shapes(twin.call, rank)
        if not any(dtype == torch.bfloat16 for _, dtype in saved):
            errors.append(f"stage {stage}: nothing was saved in bf16: {saved}")
        for shape, dtype in saved:
            if shape in full:
                errors.append(
                    f"stage {stage}: a saved tensor has the shape of a full weight: {shape} {dtype}"
                )
    return errors


def saved_shapes(model: nn.Module, rank: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """What autograd holds between forward and backward, by shape. Rows are 5: no activation looks like a weight."""
    out: list[tuple[tuple[int, ...], torch.dtype]] = []
    x, y = data(rank, 0, rows=5)

    def pack(t: torch.Tensor) -> torch.Tensor:
        out.append((tuple(t.shape), t.dtype))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        with torch.autocast("cpu", torch.bfloat16):
            result = model(x)
    F.mse_loss(result.float(), y).backward()
    return out


# --- autograd's other doors -------------------------------------------------------------------------------------


@case
def autograd_grad(rank: int) -> list[str]:
    errors = []
    for make in (sharded, eager):
        for stage in (0, 3):
            twin = Twin(MLP(), functools.partial(make, stage=stage), where=f"{make.__name__} {stage}")
            ours = torch.autograd.grad(loss_of(rank, 0)(twin.call), list(twin.model.parameters()))
            theirs = torch.autograd.grad(loss_of(rank, 0)(twin.plain), list(twin.plain.parameters()))
            for (name, p, q), g, h in zip(list(twin.pairs()), ours, theirs, strict=True):
                if p.grad is not None:
                    twin.say(f"autograd.grad left a gradient in {name}")
                q.grad = h
                p.grad = g
            average_gradients(twin.plain)
            twin.check_gradients()
            errors += twin.errors[:3]
    return errors


@case
def backward_with_inputs(rank: int) -> list[str]:
    errors = []
    for make in (sharded, eager):
        twin = Twin(MLP(), make, where=make.__name__)
        loss_of(rank, 0)(twin.call).backward(inputs=[twin.model.layers[0].weight, twin.model.norm.bias])
        loss_of(rank, 0)(twin.plain).backward(inputs=[twin.plain.layers[0].weight, twin.plain.norm.bias])
        average_gradients(twin.plain)
        twin.check_gradients()
        errors += twin.errors[:4]
    return errors


@case
def waiting_gradients_and_the_other_doors(rank: int) -> list[str]:
    """What waits from zero.no_sync goes to .grad in the next backward that goes there, and nowhere else."""
    errors = []
    for make in (sharded, eager):
        for door in ("grad", "inputs under no_sync", "inputs after it", "grad under no_sync"):
            twin = Twin(MLP(), make, where=f"{make.__name__} {door}")
            few = {"inputs": [twin.model.layers[0].weight]}, {"inputs": [twin.plain.layers[0].weight]}
            first = few if door == "inputs under no_sync" else ({}, {})
            with zero.no_sync(twin.call):
                loss_of(rank, 0)(twin.call).backward(**first[0])
                loss_of(rank, 0)(twin.plain).backward(**first[1])
                if door == "grad under no_sync":
                    x = torch.ones(2, 16, requires_grad=True)
                    (found,) = torch.autograd.grad(twin.call(x).sum(), [x])
                    (want,) = torch.autograd.grad(twin.plain(x).sum(), [x])
                    if not torch.allclose(found, want, rtol=1e-5, atol=1e-6):
                        errors.append(f"{twin.where}: the gradient of the input differs")
            if door == "grad":
                ours = torch.autograd.grad(loss_of(rank, 1)(twin.call), list(twin.model.parameters()))
                theirs = torch.autograd.grad(loss_of(rank, 1)(twin.plain), list(twin.plain.parameters()))
                for g, h in zip(ours, theirs, strict=True):
                    dist.all_reduce(h)
                    if not torch.allclose(g.full_tensor(), h / dist.get_world_size(), rtol=1e-5, atol=1e-6):
                        errors.append(f"{twin.where}: what waits is in torch.autograd.grad")
            if door == "inputs after it":
                loss_of(rank, 1)(twin.call).backward(**few[0])
                loss_of(rank, 1)(twin.plain).backward(**few[1])
            loss_of(rank, 2)(twin.call).backward()
            loss_of(rank, 2)(twin.plain).backward()
            average_gradients(twin.plain)
            twin.check_gradients()
            errors += twin.errors[:3]
    return errors


@case
def hooks(rank: int) -> list[str]:
    """Hooks see the reduced gradient as a DTensor, may change it, and run once a backward."""
    errors = []
    for make in (sharded, eager):
        twin = Twin(MLP(), make, where=make.__name__)
        seen: dict[str, list[Any]] = {"ours": [], "theirs": []}
        for who, m in (("ours", twin.model), ("theirs", twin.plain)):

            def after(p: Any, into: list[Any] = seen[who]) -> None:
                into.append(None if p.grad is None else tuple(p.grad.shape))

            m.layers[0].weight.register_hook(lambda g: g * 2)
            m.layers[1].weight.register_post_accumulate_grad_hook(after)
        for step in range(2):
            twin.backward(loss_of(rank, step))
            twin.check_gradients()
            twin.step()
        twin.check_parameters()
        if seen["ours"] != seen["theirs"]:
            twin.say(f"post-accumulate hook saw {seen['ours']}, expected {seen['theirs']}")
        errors += twin.errors[:4]
    return errors


@case
def optimizer_in_backward(rank: int) -> list[str]:
    twin = Twin(MLP(), sharded)
    for p in twin.model.parameters():
        opt = torch.optim.SGD([p], lr=0.1)

        def step(p: Any, opt: Any = opt) -> None:
            opt.step()
            opt.zero_grad()

        p.register_post_accumulate_grad_hook(step)
    for i in range(3):
        twin.backward(loss_of(rank, i))
        twin.plain_opt.step()
        twin.plain_opt.zero_grad()
    twin.check_parameters()
    return twin.errors


@case
def freezing_in_mid_training(rank: int) -> list[str]:
    errors = []
    for make in (sharded, eager):
        for stage in (1, 3):
            twin = Twin(MLP(), functools.partial(make, stage=stage), where=f"{make.__name__} {stage}")
            for step in range(6):
                for m in (twin.model, twin.plain):
                    m.layers[0].requires_grad_(step not in (2, 3))
                twin.backward(loss_of(rank, step))
                twin.check_gradients()
                twin.step()
            twin.check_parameters()
            errors += twin.errors[:3]
    return errors


@case
def frozen_weights_are_not_reduced(rank: int) -> list[str]:
    model = FAMILIES["lora"].model()
    names = {n for n, p in model.named_parameters() if p.requires_grad}
    call = sharded(model)
    FAMILIES["lora"].loss(call, FAMILIES["lora"].data(rank, 0)).backward()
    reduced = {n for p in programs(call, "backward") for r in p.reduces for n in r.names}
    if reduced != names:
        return [f"reduced {sorted(reduced - names)} too many, {sorted(names - reduced)} too few"]
    return []


@case
def retain_graph(rank: int) -> list[str]:
    twin = Twin(MLP(), eager)
    for m in (twin.call, twin.plain):
        loss = loss_of(rank, 0)(m)
        loss.backward(retain_graph=True)
        loss.backward()
    average_gradients(twin.plain)
    twin.check_gradients()
    twin.where = "compiled"
    other = Twin(MLP(), sharded, where="compiled")
    for m in (other.call, other.plain):
        loss = loss_of(rank, 0)(m)
        loss.backward(retain_graph=True)
        loss.backward()
    average_gradients(other.plain)
    other.check_gradients()
    return twin.errors + other.errors


# --- several models ---------------------------------------------------------------------------------------------


@case
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
        errors += actor.errors + critic.errors
        # The plain gradients of the first backwards have been averaged already; the joint ones are averaged now.
        for twin in (actor, critic):
            twin.opt.zero_grad()
            twin.plain_opt.zero_grad()
        x, y = data(rank, 30)
        for calls in ((actor.call, critic.call), (actor.plain, critic.plain)):
            middle = calls[0](x)
            (F.mse_loss(calls[1](middle), y) + middle.square().mean()).backward()
        for twin in (actor, critic):
            twin.where += " joint"
            average_gradients(twin.plain)
            twin.check_gradients()
            twin.step()
            twin.check_parameters()
            errors += twin.errors[:4]
    return errors


@case
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
@pytest.mark.parametrize("name", list(CASES))
def test_loop(name: str) -> None:
    for rank, found in enumerate(results()):
        assert not found[name], f"rank {rank}:\n" + "\n".join(found[name])


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
