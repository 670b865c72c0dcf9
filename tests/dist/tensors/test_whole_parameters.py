"""Adapters beside frozen weights that their layers lay out anew: losses beside FSDP2's, which leaves such weights out."""

from __future__ import annotations

import importlib.util
import pickle

import pytest
import torch
import torch.distributed as dist
from dist.spawn import run_ranks
from quantized import Packed, adapted
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zero_compiler as zero
from zero_compiler.errors import RankMismatchError


def _losses(model: nn.Module, run: nn.Module, width: int = 16) -> list[float]:
    """Of training and of evaluations between, which lay out the weights otherwise."""
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(3):
        x = torch.randn(8, width)
        run.train()
        loss = run(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.eval()
        with torch.no_grad():
            losses += [loss.item(), run(x).square().mean().item()]
    return losses


def _sharded(made, way: str) -> tuple[nn.Module, nn.Module]:
    if way == "init":
        with zero.init(device="cpu"):
            model = made()
    else:
        model = zero.shard(made(), device="cpu", stage=0 if way == "stage 0" else 3)
    if way in ("aten", "inductor"):
        return model, torch.compile(model, backend="zero", options={"compute": way})
    return model, model


def _fully(made, world: int) -> nn.Module:
    model = made()
    own = {p for p in model.parameters() if not p.is_floating_point()}
    return fully_shard(model, mesh=init_device_mesh("cpu", (world,)), ignored_params=own)


def packed(rank: int, world: int, ways: list[str]) -> list[str]:
    wrong = []
    model = _fully(adapted, world)
    want = _losses(model, model)
    for way in ways:
        model, run = _sharded(adapted, way)
        got = _losses(model, run)
        if not torch.allclose(torch.tensor(got), torch.tensor(want), rtol=1e-5):
            wrong.append(f"{way}: {got}, not {want}")
        kept = [p for p in model.parameters() if type(p) is Packed]
        if len(kept) != 2 or any(p.scale is None for p in kept):
            wrong.append(f"{way}: {len(kept)} weights are what they were")
        again = pickle.loads(pickle.dumps(model.state_dict()))
        if again["0.base.weight"].shape != (16, 16):
            wrong.append(f"{way}: {again['0.base.weight'].shape} in the state_dict")
    return wrong


def test_adapters_beside_weights_that_are_laid_out_anew():
    for wrong in run_ranks(packed, 2, ["shard"]):
        assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_adapters_beside_them_in_other_ways():
    for wrong in run_ranks(packed, 2, ["init", "stage 0", "aten", "inductor"]):
        assert not wrong, "\n".join(wrong)


def differing(rank: int, world: int) -> str:
    model = adapted()
    model[0].base.weight.data[0, 0] += rank
    try:
        zero.shard(model, device="cpu")
    except RankMismatchError as error:
        return str(error)
    return "nothing"


def test_ranks_with_different_values_of_them():
    for said in run_ranks(differing, 2):
        assert "'parameter 0.base.weight: [16, 16] torch.uint8, whole, bytes sum up to" in said


def bitsandbytes(rank: int, world: int, way: str) -> list[str]:
    import bitsandbytes as bnb
    from peft import LoraConfig, get_peft_model

    def made():
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(64, 64, False), nn.Tanh(), nn.Linear(64, 64, False))
        layers = [
            bnb.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4")
            if isinstance(layer, nn.Linear)
            else layer
            for layer in plain
        ]
        model = nn.Sequential(*layers)
        model.load_state_dict(plain.state_dict())
        model = model.to("cpu")  # here the weights become 4 bits
        return get_peft_model(model, LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False))

    model = _fully(made, world)
    want = _losses(model, model, 64)
    model, run = _sharded(made, way)
    got = _losses(model, run, 64)
    close = torch.allclose(torch.tensor(got), torch.tensor(want), rtol=1e-4)
    return [] if close else [f"{way}: {got}, not {want}"]


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(m) is None for m in ("bitsandbytes", "peft")),
    reason="bitsandbytes and peft are not installed",
)
@pytest.mark.parametrize("way", ["shard", "aten"])
def test_layers_of_bitsandbytes(way):
    for wrong in run_ranks(bitsandbytes, 2, way):
        assert not wrong, "\n".join(wrong)
