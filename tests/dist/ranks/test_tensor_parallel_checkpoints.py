"""Checkpoints of tensor-parallel models: between meshes, and from plain weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from compare import local, part
from dist.spawn import run_ranks
from dist.tensor_parallel import ADAMW, both, build, mesh_of
from parallel import Transformer, loss, tokens
from safetensors.torch import load_file as load_whole
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import zero_compiler as zero
from zero_compiler.params import save as save_module

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def plain_steps(steps: int) -> nn.Module:
    """Plain PyTorch on the batches of both data ranks."""
    model = build()
    opt = ADAMW(model.parameters())
    for step in range(steps):
        (sum(loss(model, tokens(k, step)) for k in range(2)) / 2).backward()
        opt.step()
        opt.zero_grad()
    return model


def on(shape: tuple[int, int] | None, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    if shape:
        model = both(model, compiled=False, mesh=mesh_of(shape))
    else:
        model = zero.shard(model, stage=3)
    return model, ADAMW(model.parameters())


def one_step(model: nn.Module, opt: torch.optim.Optimizer, step: int, data: list[int]) -> None:
    (sum(loss(model, tokens(k, step)) for k in data) / len(data)).backward()
    opt.step()
    opt.zero_grad()


def unlike(model: nn.Module, plain: nn.Module) -> list[str]:
    pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
    return [n for (n, p), q in pairs if not torch.allclose(local(p), part(q, p), rtol=1e-4, atol=1e-6)]


def save(rank: int, world: int, folder: str) -> list[str]:
    model, opt = on((2, 2), build())
    one_step(model, opt, 0, [rank // 2])
    weights, states = get_state_dict(model, opt)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=folder)
    return unlike(model, plain_steps(1))


def load(rank: int, world: int, folder: str, shape: tuple[int, int] | None) -> list[str]:
    torch.manual_seed(1)
    model, opt = on(shape, Transformer(1))
    weights, states = get_state_dict(model, opt)
    dcp.load({"model": weights, "optim": states}, checkpoint_id=folder)
    set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=states)
    errors = [f"loaded {n}" for n in unlike(model, plain_steps(1))]
    ranks = shape[0] if shape else world
    one_step(model, opt, 1, [0, 1] if ranks == 1 else [rank // (world // ranks)])
    return errors + [f"stepped {n}" for n in unlike(model, plain_steps(2))]


def load_file(rank: int, world: int, file: str) -> list[str]:
    torch.manual_seed(1)
    want = build().state_dict()
    errors = []
    for how in ("a file", "a plain state_dict"):
        model = both(Transformer(1), compiled=False)
        if how == "a file":
            zero.load_safetensors(model, file)
        else:
            model.load_state_dict(want)
        state = model.state_dict()
        errors += [f"{n} of {how}" for n, p in state.items() if not torch.equal(local(p), part(want[n], p))]
    return errors


def save_file_of(rank: int, world: int, folder: str) -> list[str]:
    """Weights that are cut in both dimensions, by rows and by columns, a few rows at a time."""
    save_module._PART_BYTES = 1000
    model = both(build(), compiled=False)
    zero.save_safetensors(model, folder)
    found, want = load_whole(f"{folder}/model.safetensors"), build().state_dict()
    return [n for n in {**found, **want} if n not in found or not torch.equal(found[n], want[n])]


@pytest.mark.timeout(300)
def test_whole_weights_are_saved_of_parts(tmp_path: Path) -> None:
    assert run_ranks(save_file_of, 4, str(tmp_path), timeout=120.0) == [[]] * 4


@pytest.mark.timeout(300)
def test_checkpoints_move_between_meshes(tmp_path: Path) -> None:
    """With the optimizer: to the same mesh, to tensor parallelism alone, and to ZeRO alone."""
    assert run_ranks(save, 4, str(tmp_path), timeout=120.0) == [[]] * 4
    for world, shape in ((4, (2, 2)), (2, (1, 2)), (2, None)):
        assert run_ranks(load, world, str(tmp_path), shape, timeout=120.0) == [[]] * world


@pytest.mark.timeout(300)
def test_each_rank_takes_its_own_part_of_plain_weights(tmp_path: Path) -> None:
    save_file(build().state_dict(), str(tmp_path / "model.safetensors"))
    assert run_ranks(load_file, 4, str(tmp_path / "model.safetensors"), timeout=120.0) == [[]] * 4
