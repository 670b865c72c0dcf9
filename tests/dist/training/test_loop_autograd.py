"""The user's own loop and autograd, two ranks, tiny models: each case beside plain PyTorch.

All cases of a file run in one set of ranks, since starting ranks costs more than the cases do; each is reported
as a test of its own. A case returns what is wrong, in sentences.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from compare import Twin, average_gradients
from dist.cases import Cases
from dist.loops import aot, data, eager, loss_of, programs, sharded
from models import FAMILIES, MLP
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_compiler as zero
from zero_compiler.params.modules import sharded_models_of

pytestmark = [pytest.mark.dist, pytest.mark.slow]

cases = Cases(__name__)


# --- randomness and recomputation -------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, dropout: float, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 16)
        self.blocks = nn.ModuleList([MLP(16, 2, dropout) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
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


@cases.add
def dropout(rank: int) -> list[str]:
    errors = []
    for stage in (0, 2, 3):
        # Under the same capture, the same seed draws the same numbers; recomputation must not draw anew.
        twin = Twin(
            MLP(dropout=0.3), functools.partial(sharded, stage=stage), reference=aot, where=f"stage {stage}"
        )
        errors += randomly(rank, twin)
        for m in (twin.model, twin.plain):
            m.eval()
        with torch.no_grad():
            twin.close("evaluation", *(loss_of(rank, 9)(m) for m in (twin.call, twin.plain)))
        for m in (twin.model, twin.plain):
            m.train()
        errors += randomly(rank, twin, steps=2)
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


@cases.add
def checkpointed_regions(rank: int) -> list[str]:
    return checkpointed(rank, ((1, True), (3, False)))


@cases.add_thorough
def checkpointed_regions_the_other_way(rank: int) -> list[str]:
    return checkpointed(rank, ((1, False), (3, True)))


def checkpointed(rank: int, ways: tuple[tuple[int, bool], ...]) -> list[str]:
    errors = []
    for stage, reentrant in ways:
        where = f"stage {stage}{', reentrant' if reentrant else ''}"
        compiled, plain = functools.partial(sharded, stage=stage), functools.partial(eager, stage=stage)
        errors += randomly(rank, Twin(Checkpointed(0.0, reentrant), compiled, where=where))
        dropped = Checkpointed(0.2, reentrant)
        errors += randomly(rank, Twin(dropped, compiled, reference=aot, where=f"{where}, dropout"))
        errors += randomly(rank, Twin(Checkpointed(0.2, reentrant), plain, where=f"{where}, eager"))
    return errors


# --- autocast ---------------------------------------------------------------------------------------------------


@cases.add
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
        for frame in sharded_models_of(twin.call)[0].frames:
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


@cases.add
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


@cases.add
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


@cases.add
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


@cases.add
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


@cases.add
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


@cases.add
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


@cases.add
def frozen_weights_are_not_reduced(rank: int) -> list[str]:
    model = FAMILIES["lora"].model()
    names = {n for n, p in model.named_parameters() if p.requires_grad}
    call = sharded(model)
    FAMILIES["lora"].loss(call, FAMILIES["lora"].data(rank, 0)).backward()
    reduced = {n for p in programs(call, "backward") for r in p.reduces for n in r.names}
    if reduced != names:
        return [f"reduced {sorted(reduced - names)} too many, {sorted(names - reduced)} too few"]
    return []


@cases.add
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


# --- the tests --------------------------------------------------------------------------------------------------


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", cases.names)
def test_loop(name: str) -> None:
    cases.check(name)
