"""The link between autograd and a compiled frame: parameters in, local rows out, gradients back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from zero_compiler.ir.facts import ParamRef
from zero_compiler.report.frame import Frame
from zero_compiler.sharded import grads, parameter_errors
from zero_compiler.sharded.sharded_model import ShardedModel
from zero_compiler.tensors.foreach import MANAGED


class LocalRows(torch.autograd.Function):
    """Plain aliases of the local rows of sharded parameters; backward turns their gradients into DTensors.

    One node for all parameters of a frame. The aliases share storage with the parameters, and autograd sees
    the parameters themselves: hooks, ``autograd.grad`` and ``backward(inputs=)`` mean what they always do.
    """

    @staticmethod
    def forward(
        ctx: Any, refs: Sequence[ParamRef], models: Mapping[str, ShardedModel], frame: Frame, *params: DTensor
    ) -> tuple[torch.Tensor, ...]:
        """
        Args:
            refs: owner and name of each of ``params``.
            models: by owner.
        """
        ctx.params, ctx.refs, ctx.models, ctx.frame = params, refs, models, frame
        ctx.due = frame.opened()
        # One owner's names may be another's too: then an update waits for longer than it needs to.
        ctx.calls = [grads.opened(owner, (ref.name for ref in refs)) for owner in models.values()]
        for param in params:  # a copy of a parameter, or one that was assigned, has no such mark
            param.__dict__[MANAGED] = True
        ctx.versions = [p._version for p in params]
        ctx.set_materialize_grads(False)
        rows = tuple(p._local_tensor.detach() for p in params)
        ctx.mark_non_differentiable(*(r for r, p in zip(rows, params, strict=True) if not p.requires_grad))
        return rows

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor | None) -> tuple[object, ...]:
        if torch.is_grad_enabled():  # create_graph=True: autograd is to know every gradient
            return _through_autograd(ctx, *given)
        ctx.calls = ctx.due = None
        _unmodified(ctx, given)
        # Of each tensor among the inputs, in order, what accumulates its gradient.
        nodes = [node for node, _ in ctx.next_functions]
        runs = grads.will_run(nodes, given)
        return (None, None, None, *grads.handed_on(ctx.params, given, runs))


def _through_autograd(ctx: Any, *given: torch.Tensor | None) -> tuple[object, ...]:
    ctx.calls = ctx.due = None
    _unmodified(ctx, given)
    grown = (None if g is None else _GradientRows.apply(g, p) for p, g in zip(ctx.params, given, strict=True))
    return (None, None, None, *grown)


class _GradientRows(torch.autograd.Function):
    """A gradient of local rows as the DTensor that it is a part of. It is not differentiated again."""

    @staticmethod
    def forward(ctx: object, grad: torch.Tensor, param: DTensor) -> DTensor:
        return grads.as_dtensor(param, grad.detach())

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> NoReturn:
        raise parameter_errors.differentiated_twice()


def _unmodified(ctx: Any, given: Sequence[torch.Tensor | None]) -> None:
    # Of every parameter at every backward: so it calls no function where nothing is wrong.
    places = {owner: model.places for owner, model in ctx.models.items()}
    for ref, param, version, grad in zip(ctx.refs, ctx.params, ctx.versions, given, strict=True):
        if grad is None:
            # A frozen one may be written to as long as backward does not compute with it.
            if param._version != version and not param.requires_grad and ctx.frame.gathers_in_backward(ref):
                parameter_errors.check_unmodified(param, ref.name, version)
            continue
        if param._version != version:
            parameter_errors.check_unmodified(param, ref.name, version)
        # Backward gathers what stands in the module.
        for module, attribute in places[ref.owner][ref.name]:
            if module._parameters.get(attribute) is param:
                break
        else:
            parameter_errors.exchanged(ref.name)
