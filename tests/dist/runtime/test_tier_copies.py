"""Shards and gradients on the host of an accelerator, on several ranks; CPUs stand in the accelerators' places."""

import pytest
import torch
from compare import local
from dist.spawn import run_ranks
from standin import accelerator
from tiered import assert_same, compiled, made, train
from torch import nn

import zero_compiler as zero
from zero_compiler.cost.timeline import HOST, LINK, READ, WRITE
from zero_compiler.params.modules import sharded_models_of

O = torch.optim
CHAINS = [("host", None, None), ("host", "nvme", None), ("nvme", None, None), ("nvme", "nvme", "nvme")]


def _ranks(rank, world, transport, folder):
    lanes = []
    for tiers in CHAINS:
        want = made(folder, transport=transport)
        losses = train(want, compiled(want), O.AdamW(want.parameters()), rank)
        with accelerator():
            model = made(folder, True, tiers, transport=transport)
            run = compiled(model)
            plain = tiers[2] is None
            optimizer = O.AdamW(model.parameters()) if plain else zero.optimizer(O.AdamW, model)
            assert train(model, run, optimizer, rank) == losses
            assert_same(model, want)
            with zero.gathered(model), zero.gathered(want):
                assert torch.equal(model.inner.weight, want.inner.weight)
            model(torch.ones(2, 64)).sum().backward()  # eager
            assert local(model.inner.weight.grad).device.type == "cpu"
            assert zero.inspect(model).memory.parameters == 4  # the scalar
            (frame,) = sharded_models_of(model)[0].frames
            backward = frame.timelines["backward"]
            lanes.append({lane for lane in (READ, WRITE, HOST, LINK) if backward.busy_us(lane)})
    return lanes


@pytest.mark.dist
@pytest.mark.parametrize("transport", ["c10d", "shared"])
def test_on_two_ranks(transport, tmp_path):
    for lanes in run_ranks(_ranks, 2, transport, str(tmp_path)):
        assert lanes == [{HOST, LINK}, {WRITE, HOST, LINK}, {READ, HOST, LINK}, {READ, WRITE, HOST, LINK}]


def _placed(rank, world, transport, folder):
    """Under budgets tensors of one model rest on the device, on the host and in files, on every rank alike."""
    want = made(folder, transport=transport)
    losses = train(want, compiled(want), O.AdamW(want.parameters()), rank)
    with accelerator():
        model = made(
            folder,
            tiers=(None,) * 3,
            transport=transport,
            device_rest_bytes=60_000,
            host_rest_bytes=250_000,
        )
        assert train(model, compiled(model), zero.optimizer(O.AdamW, model), rank) == losses
        assert_same(model, want)
    tiers = sharded_models_of(model)[0].tiers.placed.tiers
    assert set(tiers.values()) == {"none", "host", "nvme"}
    return tiers


@pytest.mark.dist
@pytest.mark.parametrize("transport", ["c10d", "shared"])
def test_placed_under_budgets(transport, tmp_path):
    one, other = run_ranks(_placed, 2, transport, str(tmp_path))
    assert one == other


def _replicas(rank, world):
    torch.manual_seed(0)
    mesh = torch.distributed.device_mesh.init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("replicate", "shard")
    )
    found = []
    for tier in ("none", "host"):
        torch.manual_seed(0)
        with accelerator():
            model = zero.shard(
                nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)), mesh=mesh, offload_params=tier
            )
            run = compiled(model)
            optimizer = O.AdamW(model.parameters())
            losses = []
            for i in range(3):
                torch.manual_seed(10 * i + rank)
                loss = run(torch.randn(8, 16)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            found.append((losses, [local(p).clone() for p in model.parameters()]))
    (a, b), (c, d) = found
    assert a == c
    assert all(map(torch.equal, b, d))


@pytest.mark.dist
@pytest.mark.slow
def test_between_replicas():
    run_ranks(_replicas, 4)
