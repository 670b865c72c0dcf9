"""Optimizers, averages of weights, ways of training and libraries that need no integration: each a row of
``docs/with-your-tools.md``, on two CPU ranks beside DDP with the same loop."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dist.cases import Cases
from dist.library_runs import differences, number, shared_folder, weights
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim import swa_utils

import zero_compiler as zero

pytestmark = [pytest.mark.dist, pytest.mark.slow]

cases = Cases(__name__, spawns=2)
CLOSE = 2e-5  # of sums in another order, through AdamW
AdamW = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-4)
Prepare = Callable[[nn.Module], nn.Module]


def by_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def by_zero(model: nn.Module) -> nn.Module:
    return torch.compile(zero.shard(model, stage=3, compute="aten"), backend="zero")  # type: ignore[return-value]


def by_zero_in_place(model: nn.Module) -> nn.Module:
    """As by_zero, with ``model.compile``: the module stays of its class."""
    zero.shard(model, stage=3, compute="aten").compile(backend="zero")
    return model


def net(seed: int = 0, norm: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    between = [nn.BatchNorm1d(17)] if norm else []
    return nn.Sequential(nn.Linear(8, 17), *between, nn.GELU(), nn.Linear(17, 3))


def batches(steps: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [
        (torch.randn(4, 8, generator=generator), torch.randn(4, 3, generator=generator)) for _ in range(steps)
    ]


def train(
    model: nn.Module,
    opts: list[torch.optim.Optimizer],
    after: Callable[[], None] = lambda: None,
    steps: int = 6,
) -> list[float]:
    losses = []
    for x, y in batches(steps):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
        losses.append(loss.item())
        after()
    return losses


def inner(model: nn.Module) -> nn.Module:
    model = getattr(model, "module", model)
    return getattr(model, "_orig_mod", model)


def flat(model: nn.Module) -> torch.Tensor:
    """All weights, in order: what is around a model gives them other names."""
    return torch.cat([w.flatten() for w in weights(model).values()])


def same(run: Callable[[Prepare], dict[str, Any]], tolerance: float = CLOSE, *others: Prepare) -> list[str]:
    """What ``run`` returns with DDP and with zero."""
    plain = run(by_ddp)
    return [e for by in (by_zero, *others) for e in differences(by.__name__, run(by), plain, tolerance)]


@cases.add
def averages_of_swa_utils(rank: int) -> list[str]:
    """EMA, and SWA with its scheduler and its statistics of batch normalisation."""

    def ema(prepare: Prepare) -> dict[str, Any]:
        model = prepare(net())
        mean = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
        losses = train(model, [AdamW(model.parameters())], lambda: mean.update_parameters(model))
        with torch.no_grad():
            shown = mean(batches(1)[0][0])
        return {"losses": losses, "mean": flat(mean), "shown": shown}

    def swa(prepare: Prepare) -> dict[str, Any]:
        model = prepare(net(norm=True))
        opt = AdamW(model.parameters())
        mean, rates = swa_utils.AveragedModel(model), swa_utils.SWALR(opt, swa_lr=5e-3, anneal_epochs=2)

        def average() -> None:
            mean.update_parameters(model)
            rates.step()

        losses = train(model, [opt], average)
        swa_utils.update_bn([x for x, _ in batches()], mean)
        mean.eval()
        with torch.no_grad():
            shown = mean(batches(1)[0][0])
        return {"losses": losses, "mean": flat(mean), "shown": shown}

    return same(ema, CLOSE, by_zero_in_place) + same(swa, CLOSE, by_zero_in_place)


@cases.add
def an_average_by_hand(rank: int) -> list[str]:
    """A deep copy whose parameters follow; and evaluation with its values in the model, which then goes on."""

    def run(prepare: Prepare) -> dict[str, Any]:
        model = prepare(net())
        mean = copy.deepcopy(inner(model)).requires_grad_(False)
        opt = AdamW(model.parameters())

        @torch.no_grad()
        def follow() -> None:
            for m, p in zip(mean.parameters(), inner(model).parameters()):
                m.lerp_(p, 0.1)

        losses = train(model, [opt], follow)
        held = {k: v.clone() for k, v in inner(model).state_dict().items()}
        inner(model).load_state_dict(mean.state_dict())
        with torch.no_grad():
            shown = model(batches(1)[0][0])
        inner(model).load_state_dict(held)
        return {"losses": losses + train(model, [opt], follow), "shown": shown, "mean": flat(mean)}

    return same(run)


@cases.add
def penalties_on_gradients(rank: int) -> list[str]:
    """WGAN-GP: a critic's gradient with respect to mixed samples. Second derivatives need the model uncompiled."""

    def run(prepare: Prepare) -> dict[str, Any]:
        generator, critic = prepare(net(1)), prepare(nn.Sequential(net(2), nn.Tanh(), nn.Linear(3, 1)))
        opts = [AdamW(critic.parameters()), AdamW(generator.parameters())]
        losses = []
        for x, real in batches():
            fake = generator(x).detach()
            mixed = torch.lerp(F.pad(real, (0, 5)), F.pad(fake, (0, 5)), 0.3).requires_grad_()
            with torch.compiler.set_stance("force_eager"):
                (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
                loss = critic(F.pad(fake, (0, 5))).mean() - critic(F.pad(real, (0, 5))).mean()
                loss = loss + 10 * (slope.norm(dim=1) - 1).square().mean()
                loss.backward()
            opts[0].step()
            opts[0].zero_grad()
            made = -critic(F.pad(generator(x), (0, 5))).mean()
            made.backward()
            opts[1].step()
            for opt in opts:
                opt.zero_grad()
            losses += [loss.item(), made.item()]
        return {"losses": losses, "critic": flat(critic)}

    return same(run)


@cases.add
def schedule_free(rank: int) -> list[str]:
    import schedulefree

    def run(prepare: Prepare) -> dict[str, Any]:
        model = prepare(net())
        opt = schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-2, eps=1e-4, warmup_steps=2)
        said = {}
        for part in range(2):
            opt.train()
            said[f"losses {part}"] = train(model, [opt])
            opt.eval()
            with torch.no_grad():
                said[f"shown {part}"] = model(batches(1)[0][0]).tolist()
        return said | {"weights": flat(model)}

    return same(run)


@cases.add
def muon(rank: int) -> list[str]:
    """Matrices by Muon, the rest by AdamW."""
    if not hasattr(torch.optim, "Muon"):
        return []

    def run(prepare: Prepare) -> dict[str, Any]:
        model = prepare(net())
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        opts = [torch.optim.Muon(matrices, lr=1e-2), AdamW(others)]
        return {"losses": train(model, opts), "weights": flat(model)}

    return same(run, 2e-2)  # it computes in bfloat16


@cases.add
def optimizers_of_torchao(rank: int) -> list[str]:
    """States of eight bits, by blocks: the blocks of a shard are not those of the whole."""
    if importlib.util.find_spec("torchao") is None:
        return []  # the test is skipped
    optim = importlib.import_module("torchao.optim")

    def run(prepare: Prepare) -> dict[str, Any]:
        torch.manual_seed(0)
        model = prepare(nn.Sequential(nn.Linear(8, 1024), nn.GELU(), nn.Linear(1024, 3)))
        # With the cache one rank may get the code of another, which has other rows of a parameter of the same shape.
        with torch._functorch.config.patch(enable_autograd_cache=False):
            return {"losses": train(model, [optim.AdamW8bit(model.parameters(), lr=1e-3, block_size=256)])}

    return same(run, 2e-3)


@cases.add
def checkpoints_of_torch(rank: int) -> list[str]:
    """torch.distributed.checkpoint, while training goes on, into another stage."""
    import torch.distributed.checkpoint as dcp

    with shared_folder() as folder:
        model = by_zero(net())
        opt = AdamW(model.parameters())
        train(model, [opt])
        state = dict(zip(("model", "optim"), get_state_dict(model, opt)))
        saved = dcp.async_save(
            state, checkpoint_id=folder / "saved", process_group=dist.new_group(backend="gloo")
        )
        going_on = train(model, [opt])
        saved.result()
        again = zero.shard(net(1), stage=1, compute="aten")
        again = torch.compile(again, backend="zero")
        opt = AdamW(again.parameters())
        state = dict(zip(("model", "optim"), get_state_dict(again, opt)))
        dcp.load(state, checkpoint_id=folder / "saved")
        set_state_dict(again, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        return differences("resumed", train(again, [opt]), going_on, CLOSE)


def language_model(seed: int, head: bool = True) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=31, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=30,
        pad_token_id=30, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config) if head else GPT2Model(config)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = language_model(2, head=False)
        self.value = nn.Linear(16, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.value(self.body(ids).last_hidden_state).squeeze(-1)


@cases.add
def an_actor_and_a_critic(rank: int) -> list[str]:
    """PPO in short: the actor writes, a frozen copy judges, the critic values, both learn; the ranks' texts end at
    lengths of their own."""

    def run(prepare: Prepare) -> dict[str, Any]:
        reference = (
            prepare(language_model(1).requires_grad_(False)) if prepare is not by_ddp else language_model(1)
        )
        actor, critic = prepare(language_model(1)), prepare(Critic())
        opts = [AdamW(actor.parameters()), AdamW(critic.parameters())]
        said: dict[str, Any] = {"losses": []}
        for step in range(3):
            prompt = torch.tensor([[1 + rank, 2, 3 + step], [4, 5 + rank, 6]])
            actor.eval()
            whole = contextlib.nullcontext() if prepare is by_ddp else zero.gathered(actor)
            with whole:
                ids = inner(actor).generate(
                    prompt, max_new_tokens=4 + rank, min_new_tokens=4 + rank, do_sample=False
                )
            said[f"texts {step}"] = ids.tolist()
            actor.train()
            target = ids[:, 1:].unsqueeze(-1)
            with torch.no_grad():
                before = reference(ids).logits[:, :-1].log_softmax(-1).gather(-1, target).squeeze(-1)
                reward = (ids[:, 1:] % 7).float() / 7
            for _ in range(2):
                after = actor(ids).logits[:, :-1].log_softmax(-1).gather(-1, target).squeeze(-1)
                value = critic(ids)[:, :-1]
                ratio, gain = (after - before).exp(), reward - value.detach()
                sharded_model = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                loss = sharded_model + F.mse_loss(value, reward)
                loss.backward()
                for model in (actor, critic):
                    said["losses"].append(number(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
                for opt in opts:
                    opt.step()
                    opt.zero_grad()
                said["losses"].append(loss.item())
        return said

    return same(run, 1e-4)


@cases.add
def a_diffusion_model(rank: int) -> list[str]:
    """The loop of diffusers' documentation for a UNet, with its EMA."""
    import diffusers
    from diffusers.training_utils import EMAModel

    def run(prepare: Prepare) -> dict[str, Any]:
        torch.manual_seed(0)
        unet = diffusers.UNet2DModel(
            sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16),
            norm_num_groups=4, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4,
        )  # fmt: skip
        noises = diffusers.DDPMScheduler(num_train_timesteps=50)
        model = prepare(unet)
        opt = AdamW(model.parameters())
        rates = diffusers.optimization.get_cosine_schedule_with_warmup(opt, 1, 4)
        ema = EMAModel(model.parameters(), decay=0.9)
        generator = torch.Generator().manual_seed(rank)
        losses = []
        for _ in range(4):
            clean = torch.randn(2, 1, 8, 8, generator=generator)
            noise = torch.randn(clean.shape, generator=generator)
            steps = torch.randint(0, 50, (2,), generator=generator)
            noisy = noises.add_noise(clean, noise, steps)
            loss = F.mse_loss(model(noisy, steps, return_dict=False)[0], noise)
            loss.backward()
            losses.append(number(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            opt.step()
            rates.step()
            opt.zero_grad()
            ema.step(model.parameters())
            losses.append(loss.item())
        trained = flat(model)
        ema.store(model.parameters())
        ema.copy_to(model.parameters())
        averaged = flat(model)
        ema.restore(model.parameters())
        with torch.no_grad():
            shown = model(noisy, steps, return_dict=False)[0]
        return {"losses": losses, "trained": trained, "averaged": averaged, "shown": shown}

    return same(run, 1e-4)


@cases.add
def the_profiler_of_torch(rank: int) -> list[str]:
    """A step runs under it as without it, and shows its operators."""
    from torch.profiler import ProfilerActivity, profile, schedule

    def run(prepare: Prepare) -> dict[str, Any]:
        model = prepare(net())
        with profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=1, warmup=1, active=2),
            record_shapes=True,
        ) as found:
            losses = train(model, [AdamW(model.parameters())], found.step)
        shown = any("addmm" in e.key or "linear" in e.key for e in found.key_averages())
        return {"losses": losses, "shown": float(shown)}

    return same(run)


NEEDS = {
    "schedule_free": "schedulefree",
    "optimizers_of_torchao": "torchao",
    "a_diffusion_model": "diffusers",
}


@pytest.mark.parametrize("name", cases.names)
def test_beside_ddp(name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    cases.check(name)
