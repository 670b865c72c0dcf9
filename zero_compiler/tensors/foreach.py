"""``torch._foreach_*_`` on shards counts as a write to each of them.

autograd counts writes to a tensor: by that a backward finds that a weight is not what its forward used, and checksums
find that bytes in a file were meant to change. Of operators over lists DTensor passes on the tensors under its own, and
nobody counts (torch 2.13).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..ir import ops
from ..storage.stores import region_of
from ..torch_cpp import count_written

MANAGED = "_zero_managed"  # of a parameter of a sharded model: what is process-wide leaves all others alone


def on_our_mesh(tensor: DTensor) -> bool:
    """Whether ``tensor`` lies on the mesh of a sharded model or of its tensor-parallel ranks: that is all that a result
    of operators on shards tells of whose it is."""
    groups = [sharded_model.group for sharded_model in ops.owners()]
    meshes = [group.mesh for group in (*groups, *(group.tensor for group in groups)) if group is not None]
    return tensor.device_mesh in meshes


@functools.cache
def count_writes(then: Callable[..., object]) -> None:
    """Have torch count where such an operator is given DTensors, as autograd would have done; once a process.

    Args:
        then: the rule that goes on.
    """

    def counted(
        cls: type, op: object, types: Sequence[type], args: Any, kwargs: dict[str, object] | None = None
    ) -> object:
        count_as_written(args[0])
        return then(cls, op, types, args, kwargs)

    for name in torch._C._dispatch_get_all_op_names():
        base, _, overload = name.partition(".")
        if base.startswith("aten::_foreach_") and base.endswith("_"):
            op = getattr(getattr(torch.ops.aten, base.removeprefix("aten::")), overload or "default")
            torch.library.register_torch_dispatch(op, DTensor, counted)


def count_as_written(tensors: Sequence[torch.Tensor]) -> None:
    """A kernel writes to ``tensors``; autograd counts for those that are no DTensors, and in inference mode nobody.

    Counted are those whose count this project reads: parameters of sharded models, and what lies in their files. What
    other libraries make of DTensors is written to as it is without this project.
    """
    others = count_written(tensors, MANAGED, DTensor)
    if others:
        torch.autograd.graph.increment_version([t for t in others if _in_file(t) and not t.is_inference()])


def _in_file(tensor: DTensor) -> bool:
    local = tensor._local_tensor
    return type(local) is torch.Tensor and region_of(local) is not None
