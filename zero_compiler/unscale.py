"""``torch.amp.GradScaler`` on gradients that do not all lie alike.

It hands all gradients of a dtype to one operator, which tells whether any of them is not finite. DTensor then has
ranks agree as the first gradient lies: where that one is whole on every rank, as a scalar's is, they do not, and a
rank whose rows alone have overflowed skips its step alone. A plain gradient beside others it refuses (torch 2.13).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .foreach import note_writes


@functools.cache
def take_gradients() -> None:
    """Have torch call :func:`by_placement` where the operator is given DTensors; once a process."""
    op = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    torch.library.register_torch_dispatch(op, DTensor, by_placement)


def by_placement(cls: type, op: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
    """``op`` on the gradients of each placement by themselves; DTensor's rule where there is one placement."""
    alike: dict[Any, list[torch.Tensor]] = {}
    for grad in args[0]:
        key = (grad._spec.mesh, grad._spec.placements) if isinstance(grad, DTensor) else None
        alike.setdefault(key, []).append(grad)
    if len(alike) == 1:
        note_writes(args[0])
        return NotImplemented
    for grads in alike.values():  # what one has found stays found
        op(grads, *args[1:], **(kwargs or {}))
    return None
