"""Full weights as eager code within a forward sees them: parameters for the user, results of a function for autograd.

In plain PyTorch a weight is a leaf of the graph, and an ``nn.Parameter``: modules ask whether it is one, put it into
other modules, know it again by identity. A full weight is made from the shard by a function whose backward reduces the
gradient. So it is no leaf, but of that class, and the same object for as long as the call of a module lasts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

# Of a full weight: tells it from a parameter at rest.
FULL = "_zero_full"


def full_parameter(full: torch.Tensor) -> torch.Tensor:
    """``full`` as an ``nn.Parameter`` over the same memory, to be returned by a :func:`registrable` function."""
    if isinstance(full, DTensor):
        made: Any = full.detach()
        made._is_param = True  # by which torch knows parameters of its subclasses of tensors
    else:
        made = torch.Tensor._make_subclass(nn.Parameter, full)
    setattr(made, FULL, True)
    return made


def registrable(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Let modules register what ``function`` returns as a parameter.

    ``nn.Module.register_parameter`` refuses a tensor with a true ``grad_fn``, whose gradient it could not hand on. The
    gradient of a full weight arrives whatever module holds it.
    """
    node: Any = getattr(function, "_backward_cls", None)
    if node is not None:
        node.__bool__ = lambda self: False
    return function


@registrable
class AsParameter(torch.autograd.Function):
    """A full weight that is a plain result already, as a parameter."""

    @staticmethod
    def forward(ctx: object, full: torch.Tensor) -> torch.Tensor:
        return full_parameter(full)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad


# Full weights that eager code has read in calls of modules which are running, by id of the parameter: that, its
# version, whether it was trained, and the weight. The outermost call's come first.
#
# While a call lasts, reading a parameter again gives the same object: so two tied attributes are one, and a set or a
# memo knows a weight again. Which weights are remembered depends on what ran, and not on when objects die: ranks that
# run the same code gather the same weights.
Read = dict[int, tuple[Any, int, bool, Any]]


def known(read: Read, param: DTensor) -> Any:
    """The full weight of ``param`` where a running call has read it, and it is what it was then; else None."""
    found = read.get(id(param))
    if found is None:
        return None
    _, version, trained, full = found
    same = version == param._version and trained == param.requires_grad
    return full if same and full.is_inference() == torch.is_inference_mode_enabled() else None


def remember(read: Read, param: DTensor, full: object) -> None:
    if torch._C._functorch.maybe_current_level() is None:  # else it may not outlive the transform
        read[id(param)] = param, param._version, param.requires_grad, full


def forget(read: Read, kept: int) -> None:
    """The end of a call: drop all but the first ``kept`` weights, which calls around it have read."""
    while len(read) > kept:
        read.popitem()
