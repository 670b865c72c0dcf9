"""Tensors of a model that are tied by their memory, and not by being one parameter: ``nn.Parameter(a.weight.t())``.

An optimizer's step writes to both in plain PyTorch. Sharded, each would have memory of its own, and they would go
apart. Views of one storage that do not overlap (flat weights of an LSTM, files that are mapped) are untied anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import ShardError


class _MemoryRange(NamedTuple):
    """The bytes that a tensor fills, with what it is called."""

    device: str
    begin: int
    end: int
    what: str
    name: str
    trained: bool


def check_memory(model: nn.Module) -> None:
    """No trained parameter has memory in common with another parameter or a buffer.

    Raises:
        ShardError: naming the two.
    """
    # The one of the ranges before that reaches furthest: of all, and of those that are trained.
    furthest: _MemoryRange | None = None
    trained: _MemoryRange | None = None
    for this in sorted(_ranges(model)):
        before = furthest if this.trained else trained
        if before is not None and before.device == this.device and this.begin < before.end:
            raise ShardError(
                f"{before.what} {before.name} and {this.what} {this.name} lie in the same memory, and would be trained "
                "apart once they are sharded; assign one parameter to both places (b.weight = a.weight), or give one "
                "of them memory of its own with .clone()"
            )
        if furthest is None or (furthest.device, furthest.end) < (this.device, this.end):
            furthest = this
        if this.trained and (trained is None or (trained.device, trained.end) < (this.device, this.end)):
            trained = this


def _ranges(model: nn.Module) -> Iterator[_MemoryRange]:
    """Of each parameter and buffer whose bytes are known, once where it stands in several places."""
    for name, param in model.named_parameters():
        if _fills_a_range(param):
            yield _range_of(param, "parameter", name, param.requires_grad)
    for name, buffer in model.named_buffers():
        if _fills_a_range(buffer):
            yield _range_of(buffer, "buffer", name, False)


def _range_of(tensor: torch.Tensor, what: str, name: str, trained: bool) -> _MemoryRange:
    begin = tensor.data_ptr()
    return _MemoryRange(str(tensor.device), begin, begin + tensor.nbytes, what, name, trained)


def _fills_a_range(tensor: torch.Tensor) -> bool:
    """Whether all bytes from its first to its last are of the tensor; not of one without memory, as a DTensor is."""
    return (
        not isinstance(tensor, FakeTensor)
        and not is_traceable_wrapper_subclass(tensor)
        and not nn.parameter.is_lazy(tensor)
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and tensor.numel() > 0
        and tensor.data_ptr() != 0
        and torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
    )
