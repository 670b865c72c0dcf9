"""``torch.autograd.detect_anomaly`` on gradients of sharded parameters: each rank looks at its own rows.

It asks of every gradient whether any of it is not a number, by an operator for which DTensor has no rule (torch 2.13).
Where a gradient is not of a sharded model's mesh, that stays so.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .foreach import on_our_mesh


@functools.cache
def register_anomaly_checks() -> None:
    """Have torch call :func:`of_own_rows` where the operator is given a DTensor; once a process."""
    torch.library.register_torch_dispatch(torch.ops.aten._is_any_true.default, DTensor, of_own_rows)


def of_own_rows(
    cls: type, op: Any, types: Sequence[type], args: Any, kwargs: dict[str, object] | None = None
) -> object:
    """Whether any value that this rank has is true, as a plain tensor: no rank meets another one for it, since the
    others may not be there."""
    asked = args[0]
    return op(asked._local_tensor) if on_our_mesh(asked) else NotImplemented
