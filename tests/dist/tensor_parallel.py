"""A transformer cut over data ranks and tensor-parallel ranks, and its training beside plain PyTorch."""

from __future__ import annotations

import functools
from typing import Any

import torch
from compare import Twin
from parallel import Transformer, by_columns, by_sequence, loss, tokens
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zero_compiler as zero

PLANS = {"by columns": by_columns, "by sequence": by_sequence}
ADAMW = functools.partial(torch.optim.AdamW, lr=3e-3, eps=1e-3, weight_decay=0.1)
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@functools.cache
def mesh_of(shape: tuple[int, int] = (2, 2)) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))


def build(layers: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return Transformer(layers)


def both(
    model: nn.Module, plan: str = "by columns", compiled: bool = True, mesh: Any = None, **fields: Any
) -> nn.Module:
    mesh = mesh or mesh_of()
    model = PLANS[plan](model, (mesh if mesh.ndim == 2 else mesh_of())["tp"])
    model = zero.shard(model, mesh=mesh, **{"compute": "aten", **fields})
    return torch.compile(model, backend="zero") if compiled else model


def trained(
    rank: int,
    where: str,
    steps: int = 3,
    data: Any = tokens,
    optimizer: Any = ADAMW,
    layers: int = 1,
    **fields: Any,
) -> list[str]:
    torch._dynamo.reset()
    twin = Twin(build(layers), functools.partial(both, **fields), optimizer, where=where)
    for step in range(steps):
        # The two ranks of a tensor-parallel pair have the same data.
        twin.backward(lambda m, i=step: loss(m, data(rank // 2, i)))
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (twin.model, twin.plain)]
        twin.close("norm that clipping returns", norms[0].full_tensor(), norms[1])
        twin.check_gradients()
        twin.step()
    twin.check_parameters()
    return twin.errors[:5]
