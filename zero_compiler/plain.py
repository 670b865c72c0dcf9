"""Plain models: ``torch.compile(model, backend="zero")`` with nothing sharded trains as stage 0.

Parameters stay what they are. When a backward ends, the gradients that it brought, from compiled and eager
frames alike, are averaged over the ranks in the order of the parameters, as DDP does. A parameter that was
used on some ranks only counts as zero on the others.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

log = logging.getLogger("zero_compiler")
_BUCKET_BYTES = 25 << 20  # as DDP's default
_ATTRIBUTE = "_zero_plain"
_SAID = "_zero_said"


class PlainModel:
    """The parameters of one plain model, and gradients on the way to their average.

    Each parameter carries a reference to it, so that it lives and dies with the model.
    """

    def __init__(self) -> None:
        self.params: list[nn.Parameter] = []
        self.known: set[int] = set()
        self.hooked: set[int] = set()
        self.sync = True
        # By index of the parameter: the average of earlier backwards, set aside while new gradients arrive.
        self.averaged: dict[int, torch.Tensor | None] = {}
        self.queued = False

    def __reduce__(self) -> Any:
        return (PlainModel, ())  # a pickled or copied parameter takes no hooks and no other parameters along

    def add(self, param: nn.Parameter) -> None:
        self.known.add(id(param))
        setattr(param, _ATTRIBUTE, self)
        if id(param) in self.hooked or not _several_ranks():
            return
        self.hooked.add(id(param))
        index = len(self.params)
        self.params.append(param)

        def arriving(grad: torch.Tensor) -> None:
            self._arriving(index)

        param.register_hook(arriving)

    def _arriving(self, index: int) -> None:
        """A gradient is about to be added to ``.grad``; what stands there already has been averaged."""
        param = self.params[index]
        if index not in self.averaged:
            self.averaged[index], param.grad = param.grad, None
        elif param.grad is None:
            self.averaged[index] = None  # zero_grad() since: it drops what was averaged too
        if not self.queued and self.sync:
            self.queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        self.queued = False
        params, averaged = self.params, self.averaged
        self.averaged = {}
        if _several_ranks():
            device = params[0].device
            used = torch.zeros(len(params), dtype=torch.uint8)
            used[list(averaged)] = 1
            used = used.to(device)
            dist.all_reduce(used, op=dist.ReduceOp.MAX)
            todo = [i for i, flag in enumerate(used.tolist()) if flag]
            for i in todo:
                if i not in averaged:
                    averaged[i], params[i].grad = params[i].grad, None
                if params[i].grad is None:
                    params[i].grad = torch.zeros_like(params[i])
            _average([params[i].grad for i in todo])
        for i, earlier in averaged.items():
            # The earlier tensor keeps its identity, as under plain accumulation.
            if earlier is not None:
                new = params[i].grad
                params[i].grad = earlier if new is None else earlier.add_(new)


def _average(grads: Sequence[Any]) -> None:
    """Average ``grads`` over the default group, in place, in buckets of one dtype."""
    world = dist.get_world_size()
    bucket: list[torch.Tensor] = []

    def flush() -> None:
        if not bucket:
            return
        flat = torch.cat([g.reshape(-1) for g in bucket]) if len(bucket) > 1 else bucket[0].contiguous()
        dist.all_reduce(flat)
        flat.div_(world)
        at = 0
        for g in bucket:
            g.copy_(flat.view(-1)[at : at + g.numel()].view(g.shape))
            at += g.numel()
        bucket.clear()

    for grad in grads:
        if bucket and (
            bucket[0].dtype != grad.dtype or sum(g.nbytes for g in bucket) + grad.nbytes > _BUCKET_BYTES
        ):
            flush()
        bucket.append(grad)
    flush()


def watched(compiled: Callable[..., Any], example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """``compiled``, a frame in which nothing is sharded, for whichever model calls it.

    Dynamo runs a frame for every module of a class that passes its guards, and asks the backend once.
    """
    at = [i for i, p in enumerate(example_inputs) if type(p) is nn.Parameter]
    if not at:
        return compiled
    watch(example_inputs)

    @torch._dynamo.disable(reason="entry of a compiled frame")
    def call(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(not _known(args[i]) for i in at):
            watch(args)
        return compiled(*args)

    return call


def _known(param: Any) -> bool:
    if not param.requires_grad:
        return True
    state = getattr(param, _ATTRIBUTE, None)
    # A process group may have been made since the model was first called.
    return state is not None and id(param) in (state.hooked if _several_ranks() else state.known)


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def watch(example_inputs: Sequence[Any]) -> None:
    """See to it that the model of a frame is averaged: called for a frame in which nothing is sharded."""
    params = [p for p in example_inputs if type(p) is nn.Parameter and not hasattr(p, "_zero_full")]
    if not params:
        return
    model = _model_of(params)
    members = list(model.parameters()) if model is not None else params
    state = plain_model(members)
    if not getattr(state, _SAID, False):
        setattr(state, _SAID, True)
        log.warning(
            'backend "zero": nothing in this model is sharded, so it trains as stage 0; '
            "call zero.shard(model, stage=3) before torch.compile to partition it"
        )
    for param in members:
        if param.requires_grad:
            state.add(param)


def plain_model(params: Sequence[nn.Parameter]) -> PlainModel:
    """The state of the model that ``params`` belong to; made where there is none."""
    for param in params:
        state = getattr(param, _ATTRIBUTE, None)
        if state is not None:
            return state
    state = PlainModel()
    if params:
        # Known before it is hooked: zero.no_sync may come before the first call.
        setattr(params[0], _ATTRIBUTE, state)
    return state


def _model_of(params: Sequence[nn.Parameter]) -> nn.Module | None:
    """The outermost module on the call stack that owns one of ``params``.

    A backend is given a frame and not the model, whose other frames may run eagerly; the caller of the frame
    is the model.
    """
    wanted = {id(p) for p in params}
    found: nn.Module | None = None
    frame = sys._getframe(1)
    while frame is not None:
        for value in list(frame.f_locals.values()):
            if isinstance(value, nn.Module) and not isinstance(value, torch.fx.GraphModule):
                if any(id(p) in wanted for p in value.parameters()):
                    found = value
        frame = frame.f_back  # type: ignore[assignment]
    return found
