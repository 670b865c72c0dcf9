"""A weight that compiled code reads: one call of a captured graph."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ..ir import ops
from ..sharded import parameter_errors
from ..sharded.managed_parameters import ParamInfo
from ..sharded.sharded_model import ShardedModel
from ..tensors import transforms
from .held import dynamo_asks

# Of a tensor without values, while Dynamo looks: the full weight that code which reads it is given.
_SEEN = "_zero_seen"


# Dynamo follows Python one bytecode at a time, for every parameter of the model: what is in here it only runs.
@torch._dynamo.allow_in_graph
def weight(param: DTensor, owner: str, name: str) -> torch.Tensor:
    """The full weight of ``param``, a DTensor, which is ``name`` of the sharded model ``owner``; differentiable.

    In a graph this is a *marker* as ``zero.unshard`` is, for the parameter itself: `capture.py` gives that the local
    rows instead. Elsewhere it has its meaning, so that a graph which another backend runs is right too.
    """
    sharded_model = ops.owner_of(owner)
    info = sharded_model.params[name]
    # What else runs a forward without values (torch.export) records operators, and is given those that it means. So is
    # AOTAutograd, which runs the graph for another backend on functional tensors first.
    if get_proxy_mode() is None:
        if isinstance(param._local_tensor, FakeTensor):
            with transforms.below():
                return _as_dynamo_sees_it(param, info, sharded_model)
        if dynamo_asks() and not isinstance(param._local_tensor, FunctionalTensor):
            at_rest: torch.Tensor = param
            return at_rest
    if not _stands(param, info, sharded_model):
        parameter_errors.moved(name, info, param, sharded_model.tiers.rests_on(name))
    with transforms.below(), torch.enable_grad():  # what is read under no_grad may be used elsewhere
        return ops.unshard(param.to_local(), info.layout.shape, info.gather_dtype, owner, name)


def _as_dynamo_sees_it(param: DTensor, info: ParamInfo, sharded_model: ShardedModel) -> torch.Tensor:
    """The full weight without values: a parameter and a leaf, as in plain PyTorch, and the same object at every read.

    AOTAutograd traces the graph with other tensors, and follows the gradient. Nothing is refused here: `capture.py`
    does that, where our errors stay what they are.
    """
    seen: torch.Tensor | None = param.__dict__.get(_SEEN)
    if seen is None:
        stands = _stands(param, info, sharded_model)
        device = sharded_model.tiers.computes_on(info.name, param) if stands else sharded_model.group.device
        seen = torch.empty(info.layout.shape, dtype=info.gather_dtype, device=device)
        seen = seen.requires_grad_(param.requires_grad and info.gather_dtype.is_floating_point)
        seen._is_param = True
        setattr(param, _SEEN, seen)
    return seen


# A second call for tensor-parallel weights alone.
@torch._dynamo.allow_in_graph
def placed(whole: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """``whole``, the DTensor over the tensor-parallel ranks whose part here is ``full``, a weight that was read.

    For Dynamo it is a parameter too. `capture.py` takes this out of the graph.
    """
    if not isinstance(full, FakeTensor):
        return whole
    seen = full.__dict__.get(_SEEN)
    if seen is None:
        seen = whole.detach().requires_grad_(whole.requires_grad)
        seen._is_param = True
        setattr(full, _SEEN, seen)
    return seen


def managed(param: DTensor, name: str, sharded_model: ShardedModel) -> ParamInfo:
    """Layout of the sharded parameter that stands where ``name`` does.

    Raises:
        ShardError: it is not what was sharded any more.
    """
    info = sharded_model.params[name]
    if not _stands(param, info, sharded_model):
        parameter_errors.moved(name, info, param, sharded_model.tiers.rests_on(name))
    if parameter_errors.was_dropped(param):
        parameter_errors.dropped(name)
    return info


def _stands(param: DTensor, info: ParamInfo, sharded_model: ShardedModel) -> bool:
    found = param.dtype, param.device.type, tuple(param.shape)
    return found == (info.layout.dtype, sharded_model.tiers.rests_on(info.name).type, info.shape)
