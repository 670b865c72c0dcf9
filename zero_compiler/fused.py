"""Fused kernels of optimizers on shards: every rank updates its own rows, in one call for all parameters.

An update of one element needs no other element, so the rows of a rank are updated by the kernel itself. DTensor would
come to the same, after it has compared and wrapped every tensor of the call: on small parameters that takes longer
than the arithmetic. Of SGD's and Adagrad's kernels it knows no rule at all (torch 2.13).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor

MANAGED = "_zero_managed"  # of a parameter of a sharded model that an optimizer steps
KERNELS = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")


@functools.cache
def take_shards() -> None:
    """Have torch call :func:`on_rows` where a fused kernel is given DTensors; once a process."""
    for kernel in (getattr(torch.ops.aten, name) for name in KERNELS):
        for overload in set(kernel.overloads()) & {"default", "tensor_lr"}:
            torch.library.register_torch_dispatch(getattr(kernel, overload), DTensor, on_rows)


def on_rows(cls: type, op: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
    """``op`` on this rank's rows: parameters, gradients, states and steps, in lists of equal length.

    DTensor's own rule goes on (``NotImplemented``) where the first parameter has no ``MANAGED``, as those of other
    libraries, and where the tensors of a parameter do not lie alike.
    """
    kwargs = kwargs or {}
    params = args[0]
    if not params or not hasattr(params[0], MANAGED) or any(isinstance(v, DTensor) for v in kwargs.values()):
        return NotImplemented
    local, first = [], None
    for tensors in args:
        if not any(isinstance(t, DTensor) for t in tensors):
            local.append(tensors)  # steps
            continue
        if not all(type(t) is DTensor for t in tensors):
            return NotImplemented
        rows = [t._local_tensor for t in tensors]
        specs = [t._spec for t in tensors]
        # Lists compare by identity first, and that is what these objects nearly always share.
        lie = ([s.mesh for s in specs], [s.placements for s in specs], [r.shape for r in rows])
        if first is None:
            first = lie
        if lie != first:
            return NotImplemented
        local.append(rows)
    return op(*local, **kwargs)
