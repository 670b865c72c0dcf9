"""SimpleFSDP (Zhang et al. 2024, arXiv 2411.00284) in few lines: every parameter is a DTensor on Shard(0), and reading
it gives the full weight through ``redistribute``; ``to_local`` with an averaging partial as the gradient's placement
makes the reduce-scatter. torch.compile sees both collectives in one graph.

Written after the paper and torchtitan's public implementation, for comparison; 1-D meshes only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor


def simple_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Shard ``model`` in place; compile the result as a whole."""

    def full_weight(name: str) -> property:
        def get(self: Any) -> torch.Tensor:
            full = self._parameters[name].redistribute(
                placements=[Replicate()], forward_dtype=param_dtype, backward_dtype=reduce_dtype
            )
            return full.to_local(grad_placements=[Partial("avg")])

        return property(get)

    for module in list(model.modules()):
        names = [n for n, p in module._parameters.items() if p is not None]
        if not names:
            continue
        for name in names:
            sharded = distribute_tensor(getattr(module, name).detach(), mesh, [Shard(0)])
            module._parameters[name] = nn.Parameter(sharded)
        cls = type(module)
        module.__class__ = type(f"SimpleFSDP{cls.__name__}", (cls,), {n: full_weight(n) for n in names})
    return model
