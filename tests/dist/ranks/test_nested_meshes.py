"""A part over fewer ranks than the model that it is in: an expert of this rank alone, or of some ranks."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from dist.spawn import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zero_compiler as zero
from zero_compiler.errors import ShardError
from zero_compiler.ranks.group import speaking

pytestmark = pytest.mark.dist


def train(rank, world, size, transport):
    """A part over ``size`` ranks within one over all. Its ranks see the same batches as all others, so that its weights
    are those of one process, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    if size:
        mesh = init_device_mesh("cpu", (world // size, size), mesh_dim_names=("x", "expert"))
        zero.shard(model[1], mesh=mesh["expert"], device="cpu", transport=transport)
    zero.shard(model, device="cpu", transport=transport)
    step = torch.compile(model, backend="zero", options={"compute": "aten"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = []
    for i in range(3):
        torch.manual_seed(i)
        loss = step(torch.randn(8, 64)).square().mean()
        loss.backward()
        if rank == 1:
            time.sleep(0.2)  # others are in their next call before this rank has updated its weights
        with torch.no_grad():
            optimizer.step()
            optimizer.zero_grad()
            out.append(step(torch.ones(2, 64))[0, 0].item())
    return out, [
        torch.as_tensor(getattr(p, "full_tensor", lambda p=p: p)().detach()) for p in model.parameters()
    ]


def nested(rank, world, size, transport):
    got, want = (train(rank, world, s, transport) for s in (size, None))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    return got[0]


@pytest.mark.parametrize("transport", ["shared", "c10d"])
@pytest.mark.parametrize(("world", "size"), [(2, 1), (4, 2)])
def test_ranks_of_the_whole_wait_for_each_other(world, size, transport):
    """They met those of the part alone: with one rank none, and weights were read before a peer had updated them."""
    first, *others = run_ranks(nested, world, size, transport, timeout=240.0)
    assert all(other == first for other in others)


def part(made, *ranks):
    mesh = SimpleNamespace(mesh=torch.tensor(ranks))
    group = SimpleNamespace(mesh=mesh, everyone=SimpleNamespace(world=len(ranks)))
    return SimpleNamespace(group=group, identity=SimpleNamespace(made=made, title=lambda: f"model {made}"))


def test_the_part_with_all_ranks_speaks_for_the_others():
    inner, other, whole = part(0, 2, 3), part(1, 2), part(2, 0, 1, 2, 3)
    assert speaking([other, whole, inner]) == [whole, inner, other]
    with pytest.raises(
        ShardError, match=r"model 0 is sharded over ranks \[0, 1\] and model 1, which .* ranks \[1, 2\]"
    ):
        speaking([part(1, 1, 2), part(0, 0, 1)])
