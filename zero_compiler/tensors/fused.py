"""Fused kernels of optimizers on shards: every rank updates its own rows, in one call for all parameters.

An update of one element needs no other element, so the rows of a rank are updated by the kernel itself. DTensor would
come to the same, after it has compared and wrapped every tensor of the call: on small parameters that takes longer
than the arithmetic. Of SGD's and Adagrad's kernels it knows no rule at all, and a plain parameter beside a sharded one
it refuses (torch 2.13).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..torch_cpp import rows_alike
from .foreach import MANAGED, count_as_written

KERNELS = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")


@functools.cache
def register_kernels() -> None:
    """Have torch call :func:`on_rows` where a fused kernel is given DTensors; once a process."""
    for kernel in (getattr(torch.ops.aten, name) for name in KERNELS):
        for overload in set(kernel.overloads()) & {"default", "tensor_lr"}:
            torch.library.register_torch_dispatch(getattr(kernel, overload), DTensor, on_rows)


def on_rows(
    cls: type, op: Any, types: Sequence[type], args: Any, kwargs: dict[str, object] | None = None
) -> object:
    """``op`` on this rank's rows: parameters, gradients, states and steps, in lists of equal length.

    DTensor's own rule goes on (``NotImplemented``) where no parameter has ``MANAGED``, as those of other libraries,
    and where the tensors of a parameter do not lie alike. That matters: the kernels ask for no shapes, and would take
    the first rows of a whole state for those of this rank.
    """
    kwargs = kwargs or {}
    ours = any(hasattr(p, MANAGED) for p in args[0]) and all(t is DTensor for t in types)
    if not ours or any(isinstance(v, DTensor) for v in kwargs.values()):
        return NotImplemented
    count_as_written(args[0])
    if kwargs.get("grad_scale") is not None:
        count_as_written(args[1])  # the kernel unscales gradients in place
    rows = rows_alike(args, DTensor)
    return NotImplemented if rows is None else op(*rows, **kwargs)
