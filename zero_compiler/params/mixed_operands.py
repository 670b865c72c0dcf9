"""A whole plain tensor meets a sharded parameter outside of a forward: what a library computes with weights there.

An adapter that was added after ``zero.shard`` and merges, a copy of the weights that follows them, a comparison with
values that were loaded. DTensor refuses such an operator in words that name neither the parameter nor what to write.
The sentence is given where DTensor has refused, and only for parameters of sharded models and what was computed from
them: what torch can do, and what other libraries make of DTensors, is as it is without this project.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from ..errors import ShardError
from ..ir import ops
from ..sharded import parameter_errors
from ..sharded.sharded_model import ShardedModel
from ..tensors.foreach import MANAGED
from .refusals import METHODS

# Operators of several tensors with which weights are changed, compared and multiplied. Those that make one loss of
# several are watched by `penalties.py`, which asks here as well.
_WATCHED = (
    "copy_ lerp.Scalar lerp.Tensor lerp_.Scalar lerp_.Tensor addcmul addcmul_ addcdiv addcdiv_ pow.Tensor_Tensor "
    "maximum minimum allclose eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor equal dist mm mv bmm addmm "
    "addmm_ addmv baddbmm dot cat masked_fill_.Scalar convolution"
).split()
_asking: list[object] = []  # the operator that DTensor is being asked for


@functools.cache
def watch_operands() -> None:
    """Have torch call :func:`sharded_rule` where such an operator is given a DTensor; once a process."""
    for name in _WATCHED:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        torch.library.register_torch_dispatch(op, DTensor, sharded_rule)


def sharded_rule(
    cls: type,
    op: Any,
    types: Sequence[type],
    args: tuple[object, ...],
    kwargs: dict[str, object] | None = None,
) -> object:
    """DTensor's rule; where that refuses to compute with a parameter of ours and a plain tensor, a sentence of ours.

    Raises:
        ShardError: it does.
    """
    if _asking or torch.compiler.is_compiling() or not any(_is_plain(t) for t in _tensors(args)):
        return NotImplemented
    _asking.append(op)
    try:
        return op(*args, **(kwargs or {}))
    except RuntimeError as error:
        if parameter_errors.mixes(error):
            _refuse_ours(op, args, error)
        raise
    finally:
        _asking.pop()


def _tensors(args: Any) -> Iterator[torch.Tensor]:
    for arg in args:
        for item in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(item, torch.Tensor):
                yield item


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether DTensor takes this for no number."""
    return not isinstance(tensor, (DTensor, FakeTensor)) and tensor.numel() != 1


def _refuse_ours(op: object, args: object, error: RuntimeError) -> None:
    for tensor in _tensors(args):
        found = _source(tensor) if isinstance(tensor, DTensor) else None
        if found is not None and not found[0].scope.calls:  # inside a forward the module says it
            _refuse(found[1], op, next(list(t.shape) for t in _tensors(args) if _is_plain(t)), error)


def _refuse(what: str, op: Any, shape: list[int], error: RuntimeError) -> NoReturn:
    call = _called() or op.name()
    # Nothing is written by then, and no rank waits for this one: where the caller goes on, all do.
    raise ShardError(
        f"{call} computes with {what} and a plain tensor of shape {shape} outside of a forward, where a sharded "
        "parameter is rows of this rank: write `with zero.gathered(model, write=True):` around it, which all ranks "
        "enter, or read the parameter's full_tensor()"
    ) from error


def _called() -> str | None:
    """The outermost method of a library that is being called and is known to compute with whole weights."""
    frame, found = inspect.currentframe(), None
    while frame is not None:
        name = frame.f_code.co_name
        if name in METHODS and "self" in frame.f_code.co_varnames:
            found = name + "()"
        frame = frame.f_back
    return found


def _source(tensor: DTensor) -> tuple[ShardedModel, str] | None:
    """The sharded model from whose parameter a tensor was made, and which that is, in words; None where it is not ours.

    By the graph of autograd, where it has one, and otherwise by the memory of the parameter. A copy has neither: it is
    known by shape, dtype and placements, in which several parameters may be alike.
    """
    leaf = tensor if tensor.grad_fn is None else managed_leaf(tensor.grad_fn)
    if leaf is None:
        return None
    like = None
    for model in ops.owners():
        for name in model.places:
            param = model.find(name)
            if param is None or param.device_mesh != tensor.device_mesh:
                continue
            if param is leaf or _same_memory(param, leaf):
                return model, f"the sharded parameter {name!r}"
            if like is None and param._spec == leaf._spec:
                like = model, f"what was made from the sharded parameter {name!r}, or from one like it,"
    return None if leaf.requires_grad else like


def _same_memory(a: DTensor, b: DTensor) -> bool:
    here, there = a._local_tensor, b._local_tensor
    return bool(
        here.untyped_storage()._cdata == there.untyped_storage()._cdata
        and here.storage_offset() == there.storage_offset()
    )


def managed_leaf(node: Any) -> DTensor | None:
    """A parameter of a sharded model from which autograd's ``node`` computes; None where there is none."""
    seen: set[object] = set()
    left = [node]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if hasattr(variable, MANAGED):
            return variable
        left += [follower for follower, _ in node.next_functions]
    return None
