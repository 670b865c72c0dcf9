"""A model over a transport that is named, and its training on ranks of one host."""

from __future__ import annotations

import torch
from models import Uneven
from torch import nn

import zero_compiler as zero


def make(kind, stage=3, seed=0, **fields):
    torch.manual_seed(seed)
    model = zero.shard(Uneven(), stage=stage, transport=kind, **fields)
    return model, torch.compile(model, backend="zero", options={"compute": "aten"})


def batch(rank, step):
    ids = torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(7 * step + rank))
    return ids


def loss_of(compiled, ids):
    return nn.functional.cross_entropy(compiled(ids).float().flatten(0, 1), ids.flatten())


def rows(model):
    return [p._local_tensor.detach().clone() for p in model.parameters()]


def train(kind, rank, steps=3, around=lambda where: None, **fields):
    """Losses, and this rank's rows at the end."""
    model, compiled = make(kind, **fields)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        with torch.no_grad():
            losses.append(loss_of(compiled, batch(rank, 50 + step)).item())
        around("evaluated")
        with zero.no_sync(model):
            loss_of(compiled, batch(rank, 20 + step)).backward()
        loss = loss_of(compiled, batch(rank, step))
        loss.backward()
        around("before the step")
        opt.step()
        around("after the step")
        opt.zero_grad()
        losses.append(loss.item())
    return losses, rows(model)


def same(a, b):
    assert a[0] == b[0]
    assert all(map(torch.equal, a[1], b[1])), [float((x - y).abs().max()) for x, y in zip(a[1], b[1])]
