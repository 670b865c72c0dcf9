"""The user's own loop and its optimizers, two ranks, tiny models: each case beside plain PyTorch.

All cases of a file run in one set of ranks, since starting ranks costs more than the cases do; each is reported
as a test of its own. A case returns what is wrong, in sentences.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from compare import Twin, average_gradients, local, part, whole
from dist.cases import Cases
from dist.loops import data, eager, loss_of, sharded
from models import MLP
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import ShardError

pytestmark = [pytest.mark.dist, pytest.mark.slow]

cases = Cases(__name__)


@cases.add
def optimizers_and_schedules(rank: int) -> list[str]:
    errors: list[str] = []
    kinds: dict[str, Any] = {
        "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        "sgd foreach": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
        "adam": functools.partial(torch.optim.Adam, lr=1e-2, eps=1e-3),
        "adam foreach": functools.partial(torch.optim.Adam, lr=1e-2, eps=1e-3, foreach=True),
        "adam fused": functools.partial(torch.optim.Adam, lr=1e-2, eps=1e-3, fused=True),
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


@cases.add
def adafactor(rank: int) -> list[str]:
    twin = Twin(MLP(), sharded, functools.partial(torch.optim.Adafactor, lr=1e-2, eps=(1e-3, 1e-3)))
    try:
        twin.train(lambda m, i: loss_of(rank, i)(m), 10)
    except RuntimeError as error:
        # torch's own, of the DTensors of any library (seen in 2.15): a norm over rows cannot be squared in place.
        if "in-place operations that require placement changes" not in str(error):
            raise
        return [] if torch.__version__ >= "2.15" else [str(error)]
    return twin.errors


@cases.add
def adafactor_of_transformers(rank: int) -> list[str]:
    """Its states begin as plain tensors, and parts of them are means over the rows of all ranks."""
    from transformers.optimization import Adafactor

    errors = []
    for fields in ({"lr": 1e-2, "relative_step": False}, {"scale_parameter": True}):
        make = functools.partial(Adafactor, **{"eps": (1e-3, 1e-3), "scale_parameter": False, **fields})
        twin = Twin(MLP(), sharded, make, where=str(fields))
        twin.train(lambda m, i: loss_of(rank, i)(m), 4)
        errors += twin.errors
    return errors


@cases.add
def adam_with_its_own_eps(rank: int) -> list[str]:
    return [e for stage in (0, 3) for e in default_adam(rank, stage)]


def default_adam(rank: int, stage: int) -> list[str]:
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
    twin = Twin(MLP(), functools.partial(sharded, stage=stage), functools.partial(torch.optim.Adam, lr=lr))
    bound = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in twin.plain.named_parameters()}
    apart = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in twin.plain.named_parameters()}
    for step in range(1, steps + 1):
        twin.where = f"stage {stage}, step {step}"
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


@cases.add
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


@cases.add
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


@cases.add
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


# --- what is not finite ---------------------------------------------------------------------------------------


class Sided(nn.Module):
    """Two results, of which one alone reaches ``side``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.side = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.last(torch.tanh(self.first(x))), self.side(x)


def same_not_finite(twin: Twin, what: str, ours: Any, theirs: torch.Tensor) -> int:
    """How many NaN there are on this rank: where plain PyTorch has them, with its values between them."""
    mine, plain = local(ours), part(theirs, ours)
    if not torch.allclose(mine, plain, rtol=1e-5, atol=1e-6, equal_nan=True):
        twin.say(
            f"{what}: NaN at {mine.isnan().nonzero().tolist()}, expected {plain.isnan().nonzero().tolist()}"
        )
    return int(mine.isnan().sum())


@cases.add
def nan_of_one_rank(rank: int) -> list[str]:
    """It reaches the rows that it reaches in plain PyTorch, of every rank, and no others."""
    errors: list[str] = []
    for make, stage, quiet in (
        (sharded, 0, False),
        (sharded, 2, False),
        (sharded, 3, False),
        (sharded, 3, True),
        (eager, 3, False),
        (eager, 0, False),
    ):
        twin = Twin(Sided(), functools.partial(make, stage=stage))
        twin.where = f"{make.__name__} {stage}{' from no_sync' if quiet else ''}"

        def loss(m: nn.Module, spoilt: bool) -> torch.Tensor:
            weights = torch.ones(16)
            if spoilt:  # by each rank one row of the other
                weights[13 if rank == 0 else 2] = math.nan
            out, side = m(data(rank, 0)[0])
            return (out * weights).sum() + side.square().sum()

        with zero.no_sync(twin.call) if quiet else contextlib.nullcontext():
            for m in (twin.call, twin.plain):
                loss(m, spoilt=True).backward()
        if quiet:
            for m in (twin.call, twin.plain):
                loss(m, spoilt=False).backward()
        average_gradients(twin.plain)
        found = {n: same_not_finite(twin, f"gradient of {n}", p.grad, q.grad) for n, p, q in twin.pairs()}
        # A part of the rows where these are cut; stage 0 holds the whole.
        rows = 1 if stage else 2
        want = {"last.weight": 16 * rows, "last.bias": rows, "side.weight": 0, "side.bias": 0}
        if {n: found[n] for n in want} != want or not found["first.weight"]:
            twin.say(f"NaN per gradient {found}, expected {want}")
        for opt in (twin.opt, twin.plain_opt):
            opt.step()
        for n, p, q in twin.pairs():
            same_not_finite(twin, f"parameter {n}", p, q)
        for strict in (True, False):
            norms: list[Any] = []
            for m in (twin.model, twin.plain):
                try:
                    norms.append(
                        whole(nn.utils.clip_grad_norm_(m.parameters(), 1.0, error_if_nonfinite=strict))
                    )
                except RuntimeError as error:
                    norms.append("non-finite" if "non-finite" in str(error) else str(error))
            if strict:
                right = norms == ["non-finite"] * 2
            else:
                right = all(bool(n.isnan()) for n in norms)
            if not right:
                twin.say(f"clip_grad_norm_(error_if_nonfinite={strict}) gave {norms}")
        for n, p, q in twin.pairs():
            same_not_finite(twin, f"clipped gradient of {n}", p.grad, q.grad)
        errors += twin.errors[:4]
    return errors


# --- the tests --------------------------------------------------------------------------------------------------


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", cases.names)
def test_loop(name: str) -> None:
    cases.check(name)
