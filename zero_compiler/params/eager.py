"""Blocking gathers and reductions: the meaning of a marker outside a compiled region.

Right for any code (graph breaks, skipped frames, no compile at all), and slower than a Program: nothing
overlaps, and a gathered weight that autograd saves lives until backward.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..errors import ZeroError
from ..ranges import ranged
from ..ranks.failing import BACKWARD
from ..ranks.failure_broadcast import tell
from ..sharded import blocking_transfers, grads, parameter_errors
from ..sharded.sharded_model import ShardedModel
from ..sharded.write_detector import only_written_again
from ..tensors import transforms
from ..tensors.foreach import MANAGED
from ..tensors.full_weight import AsParameter, full_parameter, registrable
from ..torch_cpp import share_version_counters


@registrable
class Unshard(torch.autograd.Function):
    """Full weight of a sharded parameter, as a parameter, with the reduction of its gradient as backward."""

    @staticmethod
    def forward(ctx: Any, param: DTensor, sharded_model: ShardedModel, name: str) -> torch.Tensor:
        ctx.sharded_model, ctx.name, ctx.param = sharded_model, name, param
        ctx.version = None if param.is_inference() else param._version
        param.__dict__[MANAGED] = True  # a copy of a parameter, or one that was assigned, has no such mark
        ctx.call = grads.opened(sharded_model, (name,))
        dtype = sharded_model.params[name].gather_dtype
        full = full_parameter(sharded_model.gather_now(name, param._local_tensor, dtype))
        if full.untyped_storage()._cdata == param._local_tensor.untyped_storage()._cdata:
            # Autograd, which keeps the weight for backward, notices what is written to the parameter.
            share_version_counters([full], [param])
        return full

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[object, ...]:
        sharded_model, name = ctx.sharded_model, ctx.name
        info = sharded_model.params[name]
        param = ctx.param
        again = torch.is_grad_enabled() and grad.requires_grad  # create_graph=True
        try:
            if ctx.version is not None and not only_written_again(param, ctx.version):
                parameter_errors.check_unmodified(param, name, ctx.version)
            if sharded_model.defers:
                grads.check_unhooked(param, name)
                if again and grads.goes_to_grad(param):
                    raise parameter_errors.keeps_no_graph(name)
        except ZeroError as error:
            # Peers go on to reduce the gradient, and under zero.no_sync they go on without any meeting.
            tell(lambda: sharded_model.group, error, BACKWARD)
            raise
        if transforms.batched(grad):
            raise parameter_errors.one_gradient_at_a_time(f"parameter {name!r}, which is sharded,")
        last_call, ctx.call = grads.is_last_call(sharded_model, name), None
        if sharded_model.defers:
            grads.keep(param, grad, info.reduce_dtype, info.layout)
            return None, None, None
        grad = grads.to_reduce(sharded_model, name, param, grad.to(info.reduce_dtype), info.reduce_dtype)
        if again:
            rows = Average.apply(grad, param, sharded_model, name)
        else:
            rows = grads.as_dtensor(param, _averaged(sharded_model, name, grad, param))
        taken = sharded_model.sinks and grads.deliver(
            sharded_model, name, param, rows._local_tensor.detach(), last_call
        )
        return None if taken else rows, None, None


def read(param: DTensor, sharded_model: ShardedModel, name: str) -> Any:
    """The full weight of ``param``, which is ``name``, as a parameter; also under ``torch.no_grad``, since what is read
    there may be used where gradients are enabled."""
    if torch.is_grad_enabled() or not param.requires_grad or torch.is_inference_mode_enabled():
        return _read(param, sharded_model, name)
    torch._C._set_grad_enabled(True)  # as torch.enable_grad, which costs as much as the rest
    try:
        return _read(param, sharded_model, name)
    finally:
        torch._C._set_grad_enabled(False)


def _read(param: DTensor, sharded_model: ShardedModel, name: str) -> Any:
    full, part = Unshard.apply(param, sharded_model, name), sharded_model.params[name].part
    return full if part is None else AsParameter.apply(part.of(full))


class GatherWhole(torch.autograd.Function):
    """The whole of a DTensor that is sharded as ``param`` is, and is not the parameter itself: what a second derivative
    gives to a gradient."""

    @staticmethod
    def forward(
        ctx: Any, rows: DTensor, param: DTensor, sharded_model: ShardedModel, name: str
    ) -> torch.Tensor:
        ctx.of = param, sharded_model, name
        if rows.placements != param.placements:
            rows = rows.redistribute(param.device_mesh, param.placements)
        return _whole(sharded_model, name, rows._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[object, ...]:
        return Average.apply(grad.to(ctx.of[1].params[ctx.of[2]].reduce_dtype), *ctx.of), None, None, None


class Average(torch.autograd.Function):
    """This rank's rows of the mean over ranks, as a DTensor that is sharded as ``param`` is.

    Each rank's graph leads to its own ``full``, and what it gives to a weight there is averaged by the backward of
    :class:`Unshard`. So the gradient of the mean goes to every rank whole, and is not divided by their number again.
    """

    @staticmethod
    def forward(
        ctx: Any, full: torch.Tensor, param: DTensor, sharded_model: ShardedModel, name: str
    ) -> DTensor:
        ctx.of, ctx.dtype = (param, sharded_model, name), full.dtype
        return grads.as_dtensor(param, _averaged(sharded_model, name, full, param))

    @staticmethod
    def backward(ctx: Any, grad: object) -> Any:
        return GatherWhole.apply(grad, *ctx.of).to(ctx.dtype), None, None, None


def _whole(sharded_model: ShardedModel, name: str, local: torch.Tensor) -> torch.Tensor:
    """All rows of what is sharded as a parameter is, and is not its weight: as they are."""
    info = sharded_model.params[name]
    what = f"eager gather of {name}"
    with ranged(what):
        return sharded_model.protocol.transfer(
            partial(sharded_model.meet, what),
            lambda: blocking_transfers.gather(sharded_model.group, info.layout, local, info.gather_dtype),
        )


def _averaged(sharded_model: ShardedModel, name: str, full: torch.Tensor, param: DTensor) -> torch.Tensor:
    info = sharded_model.params[name]
    what = f"eager reduction of the gradient of {name}"
    with ranged(what):
        return sharded_model.protocol.transfer(
            partial(sharded_model.meet, what),
            lambda: blocking_transfers.reduce(sharded_model.group, info.layout, full, info.reduce_dtype).to(
                param._local_tensor.device
            ),
        )
