"""Terms that are added to a loss outside of the forward and computed from shards: a sum over ``model.parameters()``.

DTensor lets such a term be added to a plain loss, and then gives the plain part a gradient that is a DTensor, at which
the backward of the model fails in words that name neither. It cannot just be made plain: of a product of the two each
rank would take its own part of the gradient for the mean over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch.distributed.tensor import DTensor

from ..errors import GradientError
from ..ranks.failure_broadcast import cannot_begin
from ..ranks.group import Group


def watch_outputs(outputs: Iterable[object], group: Group) -> None:
    """See to it that the backward of a forward says so where the gradient of one of its plain ``outputs`` is a DTensor.

    Args:
        group: of the ranks that run this backward together.
    """
    seen = None
    for out in outputs:
        if isinstance(out, torch.Tensor) and not isinstance(out, DTensor):
            node = out.grad_fn
            if node is not None and node is not seen:
                seen = node
                node.register_prehook(partial(_check, group))


def _check(group: Group, gradients: tuple[object, ...]) -> None:
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            error = GradientError(
                "a term of this loss is computed from sharded parameters outside of the model's forward (a sum over "
                "model.parameters(), say), and the gradient of the model's output is a DTensor by that: add the term "
                'as penalty.full_tensor(grad_placements=[Partial("avg")]), with Partial of torch.distributed.tensor '
                "(once for each dimension of the mesh), whose gradient is the mean over ranks"
            )
            cannot_begin(group, error)  # peers whose loss has no such term begin their backward
            raise error
