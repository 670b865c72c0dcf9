"""Frozen parameters that stay whole, as the plain parameters that they are: those with a class of their own.

A layer with quantized weights keeps in such a parameter's attributes how its bytes are to be read, lays them out anew
in a forward (``weight.data = ...``) and notes that beside them. Rows of them mean nothing, and a gathered copy has
neither the attributes nor what an earlier forward has put there. FSDP2 leaves them out by ``ignored_params``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_SHARDED = (nn.Parameter, DTensor, FakeTensor)


def stays_whole(param: torch.Tensor) -> bool:
    """Whether a parameter is frozen and of a class of its own, such as ``Params4bit`` of bitsandbytes."""
    return not param.requires_grad and type(param) not in _SHARDED and not nn.parameter.is_lazy(param)


def describe_whole(model: nn.Module) -> Iterator[str]:
    """What ranks must agree on of these parameters of ``model``, a line each: nobody sends their values around."""
    for name, param in model.named_parameters():
        if stays_whole(param):
            yield f"parameter {name}: {list(param.shape)} {param.dtype}, whole, bytes sum up to {_sum(param)}"


def _sum(param: torch.Tensor) -> int | None:
    if param.is_meta or is_traceable_wrapper_subclass(param):
        return None
    plain = param.detach().as_subclass(torch.Tensor)
    return int(plain.reshape(-1).view(torch.uint8).sum(dtype=torch.int64)) if plain.numel() else 0
