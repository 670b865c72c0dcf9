"""Random numbers that are drawn into a sharded parameter (``torch.nn.init``, ``reset_parameters()``): said once.

Each rank draws for its own rows, from its own generator. Where the seeds are equal, as they are after one
``torch.manual_seed`` on all ranks, so are the rows. DTensor moves the generators apart on accelerators alone.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import _random as dtensor_random

from .foreach import MANAGED

log = logging.getLogger("zero_compiler")

_DRAWING = "uniform_ normal_ random_ bernoulli_ exponential_ cauchy_ log_normal_ geometric_".split()
_said: set[str] = set()


@functools.cache
def watch_draws() -> None:
    """Have torch call :func:`drawn` where such an operator is given a DTensor; once a process."""
    for name in _DRAWING:
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            if overload != "out":
                torch.library.register_torch_dispatch(getattr(packet, overload), DTensor, drawn)


def drawn(
    cls: type, op: Any, types: Sequence[type], args: Any, kwargs: dict[str, object] | None = None
) -> object:
    """Say it of a sharded parameter with rows on several ranks; then DTensor's rule."""
    param = args[0]
    if not _said and hasattr(param, MANAGED) and _rows_apart(param) and not _moved_apart(param):
        _said.add(op.__name__)
        log.warning(
            "random numbers are drawn into a sharded parameter of shape %s (torch.nn.init, reset_parameters()): each "
            "rank draws for its own rows, and where the ranks have one seed their rows are equal; do it inside "
            "`with zero.init():`, where the numbers are those of the full tensor",
            list(param.shape),
        )
    return NotImplemented


def _rows_apart(param: DTensor) -> bool:
    mesh = param.device_mesh
    return any(isinstance(p, Shard) and mesh.size(i) > 1 for i, p in enumerate(param.placements))


def _moved_apart(param: DTensor) -> bool:
    supported = getattr(dtensor_random, "is_rng_supported_mesh", None)
    return supported is not None and bool(supported(param.device_mesh))
