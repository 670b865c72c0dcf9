"""``parameters()`` and ``named_parameters()`` of a module: full weights inside a forward, as its attributes are.

A forward that adds ``0.0 * sum(p.sum() for p in self.parameters())``, or asks ``next(self.parameters()).dtype``, means
what it computes with. Outside of a forward, and inside ``zero.gathered``, these methods are those of ``nn.Module``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..sharded.sharded_model import ShardedModel


def dynamo_asks() -> bool:
    """Whether Dynamo itself runs what runs now, while it compiles a frame: to learn which tensors stay where they are,
    or whether an attribute is there.

    Each rank compiles when its own inputs are new to it, so nothing may be gathered for that.
    """
    return torch._guards.CompileContext.try_get() is not None


def inside(sharded_model: ShardedModel) -> bool:
    """Whether eager code that runs is of a forward of the model.

    Checkpointed regions run their forward again inside a backward, by way of any function, and with gradients enabled;
    hooks on parameters and gradients run there too, without.
    """
    if dynamo_asks():
        return False
    return bool(sharded_model.scope.calls) or (
        torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()
    )


def named_members(
    self: Any,
    get_members_fn: Callable[[nn.Module], object],
    prefix: str = "",
    recurse: bool = True,
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, object]]:
    """What ``nn.Module`` makes these methods of, with each sharded parameter as the attribute that it stands at.

    Parameters that are tied are known by the shard, before any is gathered, and none is gathered before
    it is asked for.
    """
    members = type(self)._zero_base._named_members(self, get_members_fn, prefix, recurse, remove_duplicate)
    state = self._zero
    if state is None or state.sharded_model.opened or not _inside(state.sharded_model):
        yield from members
        return
    for name, member in members:
        if isinstance(member, DTensor):
            path, _, attribute = name[len(prefix) + 1 if prefix else 0 :].rpartition(".")
            owner = self.get_submodule(path)
            own = owner.__dict__.get("_zero")
            if own is not None and attribute in own.names:
                member = getattr(owner, attribute)
        yield name, member


def _inside(sharded_model: ShardedModel) -> bool:
    return bool(sharded_model.scope.calls) if torch.compiler.is_dynamo_compiling() else inside(sharded_model)
