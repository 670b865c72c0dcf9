"""A number of Python that is taken from shards (``float(p.grad.norm())``, ``.item()``): said once.

What DTensor reduces over the rows of a shard stays this rank's part of it until someone asks for the whole, and
``.item()`` does not ask: each rank gets the norm, the sum or the largest value of its own rows. Nothing is sent here in
its place, since a rank may print such a number alone.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .foreach import on_our_mesh

log = logging.getLogger("zero_compiler")

_said: set[str] = set()


@functools.cache
def watch_numbers() -> None:
    """Have torch call :func:`taken` where a number is taken from a DTensor; once a process."""
    op = torch.ops.aten._local_scalar_dense.default
    torch.library.register_torch_dispatch(op, DTensor, taken)


def taken(
    cls: type, op: Any, types: Sequence[type], args: Any, kwargs: dict[str, object] | None = None
) -> object:
    """Say it of what is reduced over the rows of several ranks of a sharded model; then DTensor's rule."""
    spec = args[0]._spec
    apart = any(p.is_partial() and spec.mesh.size(i) > 1 for i, p in enumerate(spec.placements))
    if apart and not _said and on_our_mesh(args[0]):
        _said.add(op.__name__)
        log.warning(
            "a number is taken (float(), .item()) from what was reduced over the rows of a sharded parameter or "
            "gradient: on each rank it is that of its own rows. On all ranks write .full_tensor().item(), as in "
            "p.grad.norm().full_tensor().item(); clip_grad_norm_ needs no number"
        )
    return NotImplemented
