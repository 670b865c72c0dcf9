"""The link between autograd and a compiled frame: parameters in, local rows out, gradients back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
        ctx.params, ctx.refs, ctx.models = params, refs, models
        ctx.due = frame.opened()
        # One owner's names may be another's too: then an update waits for longer than it needs to.
        ctx.calls = [grads.opened(owner, (ref.name for ref in refs)) for owner in models.values()]
        for param in params:  # a copy of a parameter, or one that was assigned, has no such mark
            param.__dict__[MANAGED] = True
        ctx.set_materialize_grads(False)
        rows = tuple(p._local_tensor.detach() for p in params)
        ctx.mark_non_differentiable(*(r for r, p in zip(rows, params, strict=True) if not p.requires_grad))
        return rows

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor | None) -> tuple[object, ...]:
        if torch.is_grad_enabled():  # create_graph=True: autograd is to know every gradient
            return _through_autograd(ctx, *given)
        ctx.calls = ctx.due = None
        # Of each tensor among the inputs, in order, what accumulates its gradient.
        nodes = [node for node, _ in ctx.next_functions]
        runs = grads.will_run(nodes, given)
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
    """The parameters of one call of a compiled frame, as its forward finds them. Its backward gathers what it does not
    keep once more, so they are to be the same then."""

    def __init__(
        self,
        refs: Sequence[ParamRef],
        models: Mapping[str, ShardedModel],
        frame: Frame,
        params: Sequence[DTensor],
    ) -> None:
        self._models, self._frame = models, frame
        self._found = [(ref, param, param._version) for ref, param in zip(refs, params, strict=True)]

    def checked_before_backward(self, outputs: Iterable[object], inputs: Iterable[object]) -> None:
        """Have autograd ask, before it runs the backward of these ``outputs`` of the call, whether they are; also where
        none of the parameters is to get a gradient."""
        before = {x.grad_fn for x in inputs if isinstance(x, torch.Tensor)}  # an output may be an input
        nodes = {out.grad_fn for out in outputs if isinstance(out, torch.Tensor)}
        for node in nodes - before:
            if node is not None:
                node.register_prehook(self._check)

    def _check(self, gradients: object) -> None:
        # Of every parameter at every backward: so it calls no function where nothing is wrong.
        places = {owner: model.places for owner, model in self._models.items()}
        in_backward = self._frame.in_backward
        for ref, param, version in self._found:
            if ref not in in_backward:  # a frozen weight, or one that is read under no_grad
                continue
            if param._version != version:
                parameter_errors.check_unmodified(param, ref.name, version)
            # Backward gathers what stands in the module.
            for module, attribute in places[ref.owner][ref.name]:
                if module._parameters.get(attribute) is param:
                    break
            else:
                self._models[ref.owner].param(ref.name)  # raises where there is none
                parameter_errors.exchanged(ref.name)
