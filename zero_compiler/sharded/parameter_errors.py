"""What is wrong with a parameter, or with what is done to it: errors of the forward and backward, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from ..errors import GradientError, ShardError
from ..torch_cpp import some_have_another_storage


def keeps_no_graph(name: str) -> GradientError:
    """The error of ``create_graph=True`` under ``zero.no_sync``."""
    return GradientError(
        f"backward(create_graph=True) under zero.no_sync: the gradient of parameter {name!r} is not reduced yet, and "
        "nothing that waits for its reduction can be differentiated; run this backward outside zero.no_sync"
    )


UNCOMPILED = (
    "call the model that was given to torch.compile, and not what that returned (of a model with model.compile(): call "
    'it within torch.compiler.set_stance("force_eager"))'
)


def differentiated_twice() -> GradientError:
    """The error of a second derivative through a compiled frame."""
    return GradientError(
        "this backward differentiates the backward of a compiled model (a penalty on gradients, a Hessian), which "
        f"torch.compile does not do: for this part of the loss {UNCOMPILED}; its gradients are averaged as any"
    )


def one_gradient_at_a_time(who: str) -> GradientError:
    """The error of a backward of several gradients at once."""
    return GradientError(
        f"the backward of {who} was given several gradients at once (is_grads_batched=True, vectorize=True, or "
        "torch.vmap over torch.autograd.grad), and takes one at a time: leave that out, or use torch.func.jacrev and "
        "torch.func.vmap with respect to inputs of the uncompiled model"
    )


def mixes(error: BaseException) -> bool:
    """Whether torch refused to compute with a shard and a plain tensor."""
    return isinstance(error, RuntimeError) and "got mixed torch.Tensor and DTensor" in str(error)


def computes_with_shards() -> ShardError:
    """The error of a forward that reads parameters past the attributes of their modules."""
    return ShardError(
        "this forward computes with shards: inside it state_dict() and _parameters hold them, and attributes such as "
        "module.weight and parameters() are whole; read those, or add such terms to the loss outside of the forward, "
        'computed from p.full_tensor(grad_placements=[Partial("avg")]) of each parameter p, whose gradient is the mean '
        "over ranks"
    )


READ_ANEW = "read it from its module (self.weight) in each forward, or keep the module in place of its weight"


def kept(name: str) -> str:
    """What to say of a compiled forward that is given a weight which an earlier one has kept."""
    return (
        f"a compiled forward computes with weight {name!r} as an earlier forward has read and kept it (or with a view "
        f"of it): that is a copy, which does not follow the parameter and gives it no gradient; {READ_ANEW}"
    )


def still_held(name: str) -> str:
    """What to say of a weight whose memory outlives its forward and a change of the parameter."""
    return (
        f"memory of weight {name!r} that an earlier forward has read is still held, and the parameter has changed "
        f"since. If the model has kept it (or a view of it) to compute with, that is stale: {READ_ANEW}. If it was "
        "returned, or belongs to a graph without a backward, it only takes memory"
    )


def replaced(name: str) -> NoReturn:
    """Raise: a plain tensor stands where a sharded parameter was."""
    raise ShardError(
        f"parameter {name!r} was replaced by a plain tensor after zero.shard; write new "
        "values inside zero.gathered(model, write=True), or shard a model that holds them. To "
        "torch.func.functional_call give value.view_as(value) in the place of an nn.Parameter"
    )


# 0 of a DTensor, which has no storage of its own.
_address = torch._C._data_address  # type: ignore[attr-defined]

_OWN = (
    "_zero_own_storage"  # of a parameter: its id, which no copy of it has, and the storage that goes with it
)


def remember_storage(param: torch.Tensor) -> None:
    """From here on :func:`was_dropped` finds a DTensor that is put in the place of ``param`` by ``.data``."""
    param.__dict__[_OWN] = id(param), param.untyped_storage()._cdata


def was_dropped(param: DTensor) -> bool:
    """Whether ``param.data = value`` has been written, which leaves a DTensor at its old values without a word."""
    if not isinstance(param, DTensor):
        return False
    if _address(param) != 0:
        return True
    if torch.compiler.is_compiling():
        return False
    # A DTensor's own storage has no bytes, and .data takes over that of the other.
    whose, storage = param.__dict__.get(_OWN, (0, 0))
    # Inside zero.init() the question would be answered of the full tensor.
    with torch._C.DisableTorchFunction():
        return bool(whose == id(param) and storage != param.untyped_storage()._cdata)


def any_was_dropped(params: Sequence[torch.Tensor]) -> bool:
    """Whether :func:`was_dropped` is true of one of them. Not for Dynamo, which follows no call of C++."""
    return some_have_another_storage(params, _OWN, DTensor)


def dropped(name: str) -> NoReturn:
    """Raise: :func:`was_dropped` of the parameter ``name``."""
    raise ShardError(
        f"parameter {name!r} was given another tensor by .data = (torch.nn.utils.vector_to_parameters does so), and a "
        "DTensor keeps its old values then: write param.data.copy_(value) under torch.no_grad(), with the rows of this "
        "rank, or do it in zero.gathered(model, write=True); make the model anew"
    )


def held_open(name: str) -> NoReturn:
    """Raise: a model is used while a construction holds a whole weight of it."""
    raise ShardError(
        f"parameter {name!r} is used while zero.init() holds its whole value, for a tensor that shares it (a view, "
        "weight.data, weight.detach()): let go of that tensor before the model is called, or call it behind zero.init()"
    )


def written(name: str) -> str:
    """What is wrong with a forward that writes to a weight."""
    return (
        f"this forward writes to parameter {name!r} in place, and inside a forward a sharded parameter is a gathered "
        "copy: write outside of it, to model.parameters() or in zero.gathered(model, write=True)"
    )


def frozen_inside(name: str) -> str:
    """What is wrong with a forward that changes whether a weight is trained."""
    return (
        f"this forward sets requires_grad of parameter {name!r}, and inside a forward a sharded parameter is a "
        "gathered copy: set it outside of the forward, or compute with the weight's detach()"
    )


def hooked(name: str) -> str:
    """What is wrong with a forward that registers a hook on a weight and is compiled in parts."""
    return (
        f"this forward registers a hook on parameter {name!r}, and a graph break splits it into parts that read the "
        "weight each for itself, so the hook would not be given all of its gradient: register the hook on the "
        "parameter, outside of the forward, or remove the graph break (TORCH_LOGS=graph_breaks says where)"
    )


EXCHANGED = "_zero_exchanged"  # of a parameter: the count of its writes when it was given other memory


def check_unmodified(param: torch.Tensor, name: str, version: int, compiled: bool = False) -> None:
    """Raise where a weight is not what the forward of this backward used: its count of writes is not ``version``.

    Args:
        compiled: the forward read the weight itself, and computed with none that was read before it.
    """
    if param._version == version:
        return
    if version < param.__dict__.get(EXCHANGED, 0):
        exchanged(name)
    kept = " (or a forward computed with a weight that an earlier one read and kept: read it anew in each)"
    raise ShardError(
        f"parameter {name!r} was modified in place between forward and backward; step the optimizer after backward"
        + ("" if compiled else kept)
    )


def exchanged(name: str) -> NoReturn:
    """Raise: a weight is another parameter than the forward of this backward used, or has other memory."""
    raise ShardError(
        f"parameter {name!r} was replaced between forward and backward (load_state_dict(assign=True), .to(), or an "
        "assignment to the module); do that after backward"
    )


def missing(name: str, opened: bool) -> NoReturn:
    """Raise: a call needs a sharded parameter that does not stand in its module."""
    if opened:
        raise ShardError(
            f"parameter {name!r} is whole inside zero.gathered: run the backward of a forward that came before it "
            "outside of it"
        )
    raise ShardError(
        f"parameter {name!r} was deleted or replaced by a plain tensor after zero.shard; write new values inside "
        "zero.gathered(model, write=True), or shard a model that holds them"
    )


def untied(name: str) -> NoReturn:
    """Raise: different sharded parameters stand where one stood in several places. Code that is compiled knows one."""
    raise ShardError(
        f"parameter {name!r} was tied to several attributes at zero.shard, and different parameters stand there now, "
        "as after load_state_dict(assign=True): assign one of them to the others, or untie them before zero.shard"
    )


def moved(name: str, info: Any, param: torch.Tensor, device: torch.device) -> NoReturn:
    """Raise: ``.to()``, ``.half()`` or the like changed a sharded parameter, or another one was put in its place."""
    if tuple(param.shape) != info.shape:
        raise ShardError(
            f"parameter {name!r} was sharded with shape {list(info.shape)}, and a sharded parameter of shape "
            f"{list(param.shape)} stands in its place now; a shape can only change before zero.shard"
        )
    if param.is_meta:
        raise ShardError(
            f"parameter {name!r} was sharded as {info.layout.dtype} on {device}, and is {param.dtype} on meta now: it "
            "has no values; call .to() before zero.shard, and give a model that was built on meta its values with "
            "zero.load_safetensors, or with to_empty() and its initialisers inside zero.init()"
        )
    raise ShardError(
        f"parameter {name!r} was sharded as {info.layout.dtype} on {device}, and is {param.dtype} on {param.device} "
        "now: call .to() before zero.shard, or give zero.shard a device or param_dtype"
    )
