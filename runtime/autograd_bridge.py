"""The link between autograd and a compiled frame: parameters in, local rows out, gradients back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch.distributed.tensor import DTensor

from zero_compiler.errors import ShardError
from zero_compiler.ir.facts import ParamRef
from zero_compiler.ranks.failure_broadcast import cannot_begin
from zero_compiler.report.frame import Frame
from zero_compiler.sharded import grads, parameter_errors
from zero_compiler.sharded.frame_parameters import FrameParameters
from zero_compiler.sharded.sharded_model import ShardedModel
from zero_compiler.tensors.foreach import MANAGED
from zero_compiler.torch_cpp import Values, Versions, backward_runs_all, local_rows

T = TypeVar("T")
Gradients = list[torch.Tensor | None]


class Handover:
    """Where the backward of a frame leaves the gradients of all local rows, for the node of their parameters.

    One of the rows comes from that node, so that it runs behind the node of the frame; the others are the same tensors
    from call to call, and have no history. Else autograd would make a tensor for each row in each forward, and take
    each gradient from one node to the other.

    ``used``: the frame is called with such rows. Else a caller has given each a history, and autograd does the rest.
    """

    def __init__(self) -> None:
        self.used = False
        self._begun = threading.local()

    def begin(self, call: ForwardWeights) -> None:
        """The backward of a call comes next in this thread."""
        self._begun.call = call

    def around(
        self, backward: Callable[[list[Any]], list[Any]], at: Sequence[int]
    ) -> Callable[[list[Any]], list[Any]]:
        """``backward``, which gives the gradients of rows at the places ``at`` of its results."""
        rows = Values(at)

        def call(args: list[Any]) -> list[Any]:
            if not self.used:
                return backward(args)
            weights: ForwardWeights = self._begun.__dict__.pop(
                "call"
            )  # ForwardWeights.check has run before it
            out = weights.run(lambda: backward(args))
            weights.grads[:] = rows.take(out)
            rows.drop(out)
            return out

        return call


def anchor(params: Sequence[torch.Tensor]) -> int:
    """Which of the rows comes from the node of all parameters: one with a gradient, where there is any."""
    return next((k for k, param in enumerate(params) if param.requires_grad), 0)


class LocalRows(torch.autograd.Function):
    """Plain aliases of the local rows of sharded parameters; backward turns their gradients into DTensors.

    One node for all parameters of a frame. The aliases share storage with the parameters, and autograd sees
    the parameters themselves: hooks, ``autograd.grad`` and ``backward(inputs=)`` mean what they always do.
    """

    @staticmethod
    def forward(
        ctx: Any,
        refs: Sequence[ParamRef],
        models: Mapping[str, ShardedModel],
        frame: Frame,
        handed: Gradients | None,
        *params: DTensor,
    ) -> tuple[torch.Tensor, ...]:
        """
        Args:
            refs: owner and name of each of ``params``.
            models: by owner.
            handed: where the frame's backward leaves the gradients (:class:`Handover`); None: they come from autograd.

        Returns the rows of :func:`anchor`, or of all where gradients come from autograd.
        """
        ctx.params, ctx.refs, ctx.models, ctx.handed = params, refs, models, handed
        ctx.due = frame.opened()
        # One owner's names may be another's too: then an update waits for longer than it needs to.
        ctx.calls = [grads.opened(owner, (ref.name for ref in refs)) for owner in models.values()]
        for param in params:  # a copy of a parameter, or one that was assigned, has no such mark
            param.__dict__[MANAGED] = True
        ctx.set_materialize_grads(False)
        # Autograd, which keeps for backward what that gathers from, notices what is written to the parameters.
        rows, frozen = local_rows(params if handed is None else (params[anchor(params)],))
        ctx.mark_non_differentiable(*frozen)
        return rows

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor | None) -> tuple[object, ...]:
        if ctx.handed is not None:
            given = tuple(ctx.handed)
            ctx.handed.clear()
        if torch.is_grad_enabled():  # create_graph=True: autograd is to know every gradient
            return _through_autograd(ctx, *given)
        ctx.calls = ctx.due = None
        runs = None
        if not backward_runs_all():
            # Of each tensor among the inputs, in order, what accumulates its gradient.
            runs = grads.will_run([node for node, _ in ctx.next_functions], given)
        return (None, None, None, None, *grads.handed_on(ctx.params, given, runs))


def _through_autograd(ctx: Any, *given: torch.Tensor | None) -> tuple[object, ...]:
    ctx.calls = ctx.due = None
    grown = (None if g is None else _GradientRows.apply(g, p) for p, g in zip(ctx.params, given, strict=True))
    return (None, None, None, None, *grown)


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
        self,
        refs: Sequence[ParamRef],
        models: Mapping[str, ShardedModel],
        found: tuple[FrameParameters, tuple[DTensor, ...]],
        used: Sequence[int],
        handover: Handover | None,
    ) -> None:
        """
        Args:
            refs: owner and name of each parameter of the frame.
            models: by owner.
            found: these parameters.
            used: numbers of those that backward computes with or gives gradients.
            handover: by which backward hands ``grads`` on; None: autograd does.
        """
        self._models, self._refs, self._used, self._handover = models, refs, used, handover
        self._held, self._params = found
        self.grads: Gradients = []
        self._versions = Versions(self._those())

    def _those(self) -> tuple[DTensor, ...]:
        return tuple([self._params[i] for i in self._used])

    def check(self, gradients: object) -> None:
        """Refuse a backward whose weights are others. Autograd asks this before each, also where none of the parameters
        is to get a gradient.

        Raises:
            ShardError: naming the first that was written to or replaced. The other ranks are told.
        """
        # Backward gathers what stands in the module.
        places = [self._held.places[i] for i in self._used]
        at = self._versions.first_changed(self._those(), places)
        if at >= 0:
            self._refuse(self._refs[self._used[at]], self._params[self._used[at]], self._versions.of(at))
        if self._handover is not None:
            self._handover.begin(self)

    def run(self, backward: Callable[[], T]) -> T:
        """The backward of the frame, behind :meth:`check`."""
        same = self._held.hold(self._params)
        return self._held.run("backward", self._models.values(), same, backward)

    def _refuse(self, ref: ParamRef, param: DTensor, version: int) -> NoReturn:
        model = self._models[ref.owner]
        try:
            parameter_errors.check_unmodified(param, ref.name, version)
            model.param(ref.name)  # raises where there is none
            parameter_errors.exchanged(ref.name)
        except ShardError as error:
            cannot_begin(model.group, error)
            raise
