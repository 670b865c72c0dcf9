"""``torch.amp.GradScaler`` on gradients that do not all lie alike.

It hands all gradients of a dtype to one operator, which tells whether any of them is not finite. DTensor then has
ranks agree as the first gradient lies: where that one is whole on every rank, as a scalar's is, they do not, and a
rank whose rows alone have overflowed skips its step alone. A plain gradient beside others it refuses (torch 2.13).
Where none of the gradients is that of a sharded model, both stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..ir import ops
from .foreach import count_as_written


@functools.cache
def register_unscaling() -> None:
    """Have torch call :func:`by_placement` where the operator is given DTensors; once a process."""
    op = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    torch.library.register_torch_dispatch(op, DTensor, by_placement)


def by_placement(
    cls: type, op: Any, types: Sequence[type], args: Any, kwargs: dict[str, object] | None = None
) -> object:
    """``op`` on the gradients of each placement by themselves; DTensor's rule where there is one placement, or no
    gradient of a sharded model."""
    alike: dict[object, list[torch.Tensor]] = {}
    for grad in args[0]:
        key = (grad._spec.mesh, grad._spec.placements) if isinstance(grad, DTensor) else None
        alike.setdefault(key, []).append(grad)
    if len(alike) == 1 or not _any_ours(args[0]):
        count_as_written(args[0])
        return NotImplemented
    for grads in alike.values():  # what one has found stays found
        op(grads, *args[1:], **(kwargs or {}))
    return None


def _any_ours(grads: Sequence[torch.Tensor]) -> bool:
    """Whether one of them is the gradient of a parameter of a sharded model."""
    given = {id(grad) for grad in grads}
    params = (sharded_model.find(name) for sharded_model in ops.owners() for name in sharded_model.places)
    return any(param is not None and id(param.grad) in given for param in params)
