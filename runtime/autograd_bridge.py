"""The link between autograd and a compiled frame: parameters in, local rows out, gradients back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from zero_compiler.errors import ShardError
from zero_compiler.ir.facts import ParamRef
from zero_compiler.ranks.failure_broadcast import cannot_begin
from zero_compiler.report.frame import Frame
from zero_compiler.sharded import grads, parameter_errors
from zero_compiler.sharded.sharded_model import ShardedModel
from zero_compiler.tensors.foreach import MANAGED
from zero_compiler.torch_cpp import Versions, backward_runs_all, local_rows


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
        ctx.params, ctx.refs, ctx.models = params, refs, models
        ctx.due = frame.opened()
        # One owner's names may be another's too: then an update waits for longer than it needs to.
        ctx.calls = [grads.opened(owner, (ref.name for ref in refs)) for owner in models.values()]
        for param in params:  # a copy of a parameter, or one that was assigned, has no such mark
            param.__dict__[MANAGED] = True
        ctx.set_materialize_grads(False)
        # Autograd, which keeps for backward what that gathers from, notices what is written to the parameters.
        rows, frozen = local_rows(params)
        ctx.mark_non_differentiable(*frozen)
        return rows

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor | None) -> tuple[object, ...]:
        if torch.is_grad_enabled():  # create_graph=True: autograd is to know every gradient
            return _through_autograd(ctx, *given)
        ctx.calls = ctx.due = None
        runs = None
        if not backward_runs_all():
            # Of each tensor among the inputs, in order, what accumulates its gradient.
            runs = grads.will_run([node for node, _ in ctx.next_functions], given)
        return (None, None, None, *grads.handed_on(ctx.params, given, runs))


def _through_autograd(ctx: Any, *given: torch.Tensor | None) -> tuple[object, ...]:
    ctx.calls = ctx.due = None
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


class ForwardWeights:
    """Parameters as the forward of one call of a compiled frame finds them, with which its backward computes too. It
    gathers what is not kept once more, so they are to be the same then."""

    def __init__(
        self, refs: Sequence[ParamRef], models: Mapping[str, ShardedModel], params: Sequence[DTensor]
    ) -> None:
        """
        Args:
            refs: owner and name of each of ``params``, those that backward computes with or gives gradients.
            models: by owner.
        """
        self._models, self._refs, self._params = models, refs, tuple(params)
        self._versions = Versions(self._params)

    def check(self, gradients: object) -> None:
        """Refuse a backward whose weights are others. Autograd asks this before each, also where none of the parameters
        is to get a gradient.

        Raises:
            ShardError: naming the first that was written to or replaced. The other ranks are told.
        """
        places = {owner: model.places for owner, model in self._models.items()}
        # Backward gathers what stands in the module.
        at = self._versions.first_changed(self._params, [places[ref.owner][ref.name] for ref in self._refs])
        if at >= 0:
            self._refuse(self._refs[at], self._params[at], self._versions.of(at))

    def _refuse(self, ref: ParamRef, param: DTensor, version: int) -> NoReturn:
        model = self._models[ref.owner]
        try:
            parameter_errors.check_unmodified(param, ref.name, version, compiled=True)
            model.param(ref.name)  # raises where there is none
            parameter_errors.exchanged(ref.name)
        except ShardError as error:
            cannot_begin(model.group, error)
            raise
