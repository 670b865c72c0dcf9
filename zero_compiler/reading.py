"""A weight that compiled code reads: one call of a captured graph."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from . import grads
from .ir import ops
from .policy import ParamInfo, Policy


# Dynamo follows Python one bytecode at a time, for every parameter of the model: what is in here it only runs.
@torch._dynamo.allow_in_graph
def weight(param: Any, owner: str, name: str) -> torch.Tensor:
    """The full weight of ``param``, a DTensor, which is ``name`` of the sharded model ``owner``; differentiable.

    In a graph this is a *marker* as ``zero.unshard`` is, for the parameter itself: `capture.py` gives that the local
    rows instead. Elsewhere it has its meaning, so that a graph which another backend runs is right too.
    """
    policy = ops.owner_of(owner)
    info = policy.params[name]
    if not _stands(param, info, policy):
        if not isinstance(param._local_tensor, FakeTensor):
            grads.moved(name, info, param, policy.rests_on(name))
        # While Dynamo looks nothing is refused: `capture.py` does, where our errors stay what they are.
        return torch.empty(info.layout.shape, dtype=info.gather_dtype, device=policy.group.device)
    return ops.unshard(param.to_local(), info.layout.shape, info.gather_dtype, owner, name)


def managed(param: Any, name: str, policy: Policy) -> ParamInfo:
    """Layout of the sharded parameter that stands where ``name`` does.

    Raises:
        ShardError: it is not what was sharded any more.
    """
    info = policy.params[name]
    if not _stands(param, info, policy):
        grads.moved(name, info, param, policy.rests_on(name))
    if grads.was_dropped(param):
        grads.dropped(name)
    return info


def _stands(param: Any, info: ParamInfo, policy: Policy) -> bool:
    found = param.dtype, param.device.type, tuple(param.shape)
    return found == (info.layout.dtype, policy.rests_on(info.name).type, info.shape)
