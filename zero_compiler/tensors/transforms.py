"""What torch.func's transforms mean for a weight that a model reads inside one of them.

A transform (``grad``, ``vmap``, ``jvp`` and what is made of them) wraps the tensors that it follows, in a level of its
own. A sharded parameter that stands in its module is none of these: to every transform it is a constant. So it is
gathered below all of them, where plain autograd sees it, as it sees a plain parameter that a function closes over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.distributed.tensor import DTensor

from ..errors import ShardError

_functorch: Any = torch._C._functorch


def active() -> bool:
    """Whether a transform runs."""
    return _functorch.peek_interpreter_stack() is not None


@contextlib.contextmanager
def below() -> Iterator[None]:
    """Leave all transforms for a while; gradients are recorded where they were before the outermost one began."""
    with contextlib.ExitStack() as levels:
        while active():
            levels.enter_context(retrieve_current_functorch_interpreter().lower())
        yield


def follows(value: object) -> bool:
    """Whether ``value`` is a shard that a transform was given to follow, as one of its arguments."""
    if not wrapped(value):
        return False
    while wrapped(value):
        value = _functorch.get_unwrapped(value)
    return isinstance(value, DTensor)


def wrapped(value: object) -> bool:
    """Whether ``value`` is a tensor that a transform follows."""
    return isinstance(value, torch.Tensor) and _functorch.is_functorch_wrapped_tensor(value)


def batched(value: object) -> bool:
    """Whether ``value`` stands for several tensors at once, as the gradients of a backward under ``torch.vmap`` do."""
    return wrapped(value) or (isinstance(value, torch.Tensor) and _functorch.is_legacy_batchedtensor(value))


def of_shards(name: str) -> ShardError:
    """The error of a transform that follows shards: its results would have their form, and be of all ranks' data."""
    return ShardError(
        f"a transform of torch.func or torch.vmap was given parameter {name!r} as an argument, and it is a shard: give "
        "functional_call whole tensors, {n: p.full_tensor().detach() for n, p in model.named_parameters()}, or do all "
        "of it inside zero.gathered(model); gradients are then whole, and of this rank's data alone"
    )
