"""A sharded parameter is given other memory, dtype or device, and stays the object that it is.

``torch.utils.swap_tensors`` does so for parameters that nobody else refers to. Here it does not matter who does:
variables, optimizers and weak references go on with the parameter. Graphs of autograd that were made before know the
tensor that it was, and say so when they run.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..sharded import parameter_errors

# Attribute of a tensor that construction has partitioned, and of its aliases: what it keeps of the memory (see
# `unsharded_mode.py`).
KEY = "_zero_cut"


def give(param: Any, made: Any, name: str) -> None:
    """Let ``param`` be what ``made`` is, but for attributes, hooks and ``requires_grad``; it has no gradient then.

    Args:
        made: a DTensor of the shape of ``param`` that requires no gradient; its local tensor is taken, not copied.
        name: qualified name of the parameter, for what is said of an earlier graph.
    """
    with torch._C.DisableTorchFunction():  # inside zero.init this is no use of either tensor
        version = param._version
        fresh: Any = nn.Parameter(
            DTensor.__new__(DTensor, made._local_tensor, made._spec, requires_grad=False), param.requires_grad
        )
        _refuse_backwards(param, name)
        torch._C._swap_tensor_impl(param, fresh)
        param._local_tensor, param._spec = made._local_tensor, made._spec
        param.__dict__.pop(KEY, None)
        if KEY in made.__dict__:
            param.__dict__[KEY] = made.__dict__[KEY]
        # The object has its hooks still, and autograd, which keeps them with the memory, is told of them anew.
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            setattr(param, hooks, getattr(param, hooks))
            setattr(fresh, hooks, None)
        # Higher than any count that a graph of before may have noted.
        torch._C._autograd._unsafe_set_version_counter((param,), (version + 1,))
        param.__dict__[parameter_errors.EXCHANGED] = version + 1
        parameter_errors.remember_storage(param)


def check_closed(param: object, name: str) -> None:
    """Raise where a construction still holds the whole value of the parameter ``name`` for somebody who may write to
    it: the shard, which is to be read, has none of that yet."""
    entry = param.__dict__.get(KEY)
    if entry is not None and entry.full is not None:
        with torch._C.DisableTorchFunction():
            if entry.in_use():
                parameter_errors.held_open(name)


def _refuse_backwards(param: torch.Tensor, name: str) -> None:
    """A graph that was made with the present memory would add to the gradient of nobody."""

    def refuse(given: object) -> NoReturn:
        parameter_errors.exchanged(name)

    if param.requires_grad:
        torch.autograd.graph.get_gradient_edge(param).node.register_prehook(refuse)
