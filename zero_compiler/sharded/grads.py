"""Where a gradient goes is decided here alone: to ``.grad``, into what waits there for a reduction, to a file or an
update, or on by way of autograd.

A full gradient is kept (:func:`keep`) or given to a reduction (:func:`to_reduce`). This rank's rows, which that gives,
are offered to who takes them at once (:func:`deliver`), and else handed to autograd (:func:`handed_on`), which
calls hooks.

Under ``zero.no_sync`` a backward adds its full local gradient to ``p.grad`` as a :class:`PendingGrad`. That
object *is* the state: setting ``p.grad`` to None drops it, as it drops any gradient, and an optimizer or a
clipping function that touches it is told what is missing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch.distributed.tensor import DTensor

from ..errors import GradientError, ShardError
from ..ir.transfers import Part
from ..layout import Layout, tiled_rows
from ..ranges import ranged
from ..ranks.group import Group
from ..torch_cpp import set_gradients
from . import blocking_transfers


class PendingGrad(torch.Tensor):
    """Gradient of a sharded parameter that holds contributions not reduced over the ranks yet.

    ``full`` is the sum of the local full gradients (in ``reduce_dtype``); ``base`` is the gradient that had
    been reduced before them, or None.
    """

    full: torch.Tensor
    base: Any
    # Whether this process has made one: where it has not, no gradient needs to be looked at.
    ever_made = False

    @staticmethod
    def __new__(cls, param: torch.Tensor, full: torch.Tensor, base: DTensor | None) -> PendingGrad:
        PendingGrad.ever_made = True
        self = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, dtype=param.dtype, device=param.device, requires_grad=False
        )
        self.full, self.base = full, base
        return self

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"PendingGrad(shape={tuple(self.shape)}, not reduced yet)"

    def full_tensor(self, **_: object) -> NoReturn:
        raise _not_reduced()

    to_local = redistribute = full_tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: dict[str, object] | None = None
    ) -> object:
        name = getattr(func, "__name__", "")
        own = bool(args) and isinstance(args[0], PendingGrad)
        if name in ("__get__", "__set__") or (own and name in _HARMLESS):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name == "_foreach_zero_":
            for grad in args[0]:
                grad.zero_()
            return None
        raise _not_reduced()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: object, types: object, args: Sequence[object] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        first = args[0] if args else None
        if isinstance(first, PendingGrad):
            if func is torch.ops.aten.detach.default or func is torch.ops.aten.detach_.default:
                return first
            if func is torch.ops.aten.zero_.default:
                # zero_grad(set_to_none=False): the contributions are dropped, the buffer is kept.
                first.full.zero_()
                first.base = None
                return first
            if func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor) and isinstance(
                args[1], DTensor
            ):
                # autograd adds a gradient that did not pass through a gathered weight: it is reduced already.
                first.base = args[1] if first.base is None else first.base + args[1]
                return first
        raise _not_reduced()


# What zero_grad and autograd do to any gradient, and what only asks for its form.
_HARMLESS = frozenset(
    "__repr__ __hash__ detach detach_ requires_grad_ zero_ add add_ size stride dim numel storage_offset "
    "is_floating_point is_complex is_contiguous is_conj is_neg is_inference _is_view _is_zerotensor "
    "untyped_storage".split()
)


class AppliedGrad(torch.Tensor):
    """Stands as ``.grad`` from the update of a parameter in mid-backward to ``step()``: its gradient is used up.

    It has no values. What would read it or add to it, clipping among them, is an error instead of a silent nothing.
    """

    @staticmethod
    def __new__(cls, param: torch.Tensor) -> AppliedGrad:
        return torch.Tensor._make_wrapper_subclass(
            cls, param.shape, dtype=param.dtype, device=param.device, requires_grad=False
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"AppliedGrad(shape={tuple(self.shape)}, used up by overlap=True)"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: object, args: Sequence[object] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__") or (name in _HARMLESS and name not in ("add", "add_", "zero_")):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise used_up()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: object, types: object, args: Sequence[object] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.detach_.default):
            return args[0]
        raise used_up()


def used_up(again: bool = False) -> GradientError:
    """The error of everything that needs gradients which updates have used up already.

    Args:
        again: it is another backward. A region that is made again with reentry runs one of its own, whose end nobody
            can tell from that of the step.
    """
    more = (
        "; to torch.utils.checkpoint give use_reentrant=False: with True, each region is a backward"
        if again
        else ""
    )
    return GradientError(
        "zero.optimizer(overlap=True) has updated parameters with these gradients in the backward: there is nothing "
        "to clip, unscale, add to or drop; give max_grad_norm=... to clip, call step() after every backward, read "
        "parameters in the model's forward alone, or leave overlap out" + more
    )


def check_reduced(params: Iterable[object]) -> None:
    """Raise where a gradient of ``params``, of which some may be no tensors, waits for its reduction.

    Raises:
        GradientError: before any of them was touched.
    """
    if PendingGrad.ever_made and any(type(getattr(param, "grad", None)) is PendingGrad for param in params):
        raise _not_reduced()


def _not_reduced() -> GradientError:
    return GradientError(
        "these gradients are not reduced yet: they were accumulated under zero.no_sync; run a backward outside "
        "it before clipping, stepping or reading .grad"
    )


def as_dtensor(param: DTensor, local: torch.Tensor) -> DTensor:
    """``local`` rows as a DTensor with the placement of ``param``; no communication, no check."""
    # Without __init__, which does nothing and costs as much as the rest.
    return DTensor.__new__(DTensor, local, param._spec, requires_grad=False)


def keep(
    param: Any, full: torch.Tensor, dtype: torch.dtype, layout: Layout, tile: Part | None = None
) -> None:
    """Add a full local gradient, or a tile of it, to what waits in ``.grad`` for the next synchronising backward, in
    ``dtype``; nothing where the backward that runs does not add to ``.grad``."""
    if not goes_to_grad(param):
        return
    grad = param.grad
    if tile is not None:
        if not isinstance(grad, PendingGrad):
            whole = torch.zeros(param.shape, dtype=dtype, device=full.device)
            param.grad = grad = PendingGrad(param, whole, grad)
        part = full.to(dtype)
        for theirs, ours in tiled_rows(layout, tile.begin, full.shape[0]):
            grad.full[theirs].add_(part[ours])
    elif isinstance(grad, PendingGrad):
        grad.full.add_(full.to(dtype))
    else:
        # A private copy, and only one: the caller's gradient may lie in a buffer that is used again.
        param.grad = PendingGrad(param, full.detach().to(dtype, copy=True), grad)


def to_reduce(
    sharded_model: _Trained,
    name: str,
    param: DTensor,
    full: torch.Tensor,
    dtype: torch.dtype,
    tile: Part | None = None,
) -> torch.Tensor:
    """A full gradient, or a tile of it, with what waited for its reduction, in ``dtype`` then; ``.grad`` becomes the
    part that was reduced before. What waits of other weights is reduced when the backward ends."""
    if not PendingGrad.ever_made or not goes_to_grad(param):
        return full
    flush_at_end(sharded_model)
    grad = param.grad
    if not isinstance(grad, PendingGrad):
        return full
    full = full.to(dtype)
    if tile is None:
        param.grad = grad.base
        return grad.full.add_(full)
    out = full.clone()
    for theirs, ours in tiled_rows(sharded_model.params[name].layout, tile.begin, full.shape[0]):
        out[ours].add_(grad.full[theirs])
    if tile.last:
        param.grad = grad.base
    return out


def deliver(sharded_model: _Trained, name: str, param: DTensor, local: torch.Tensor, final: bool) -> bool:
    """Offer this rank's reduced rows to who takes them at once; False: autograd is to go on with them.

    Args:
        final: see :meth:`Sink.land`.
    """
    sink = _taker(sharded_model, name, param)
    return sink is not None and sink.land(param, local, final)


def deliver_part(
    sharded_model: _Trained, name: str, param: DTensor, part: torch.Tensor, tile: Part, final: bool
) -> bool:
    """The same with a tile of these rows."""
    sink = _taker(sharded_model, name, param)
    return sink is not None and sink.land_part(param, part, tile.begin, tile.last, final)


def _taker(sharded_model: _Trained, name: str, param: DTensor) -> Sink | None:
    """Who takes a gradient past autograd: nobody where it is asked for by ``torch.autograd.grad``, or has hooks."""
    sink = sharded_model.sinks.get(name) if sharded_model.sinks else None
    if sink is None or not goes_to_grad(param) or hooked(param, sink.hooks):
        return None
    return sink


def handed_on(
    params: tuple[DTensor, ...], given: tuple[torch.Tensor | None, ...], runs: Sequence[bool] | None
) -> list[DTensor | None]:
    """What autograd is to add to each ``.grad``, of this rank's reduced rows; None where there is nothing left to add.

    Args:
        runs: whether the backward comes to where autograd adds to ``.grad``; None: to each of them.
    """
    out: list[DTensor | None] = [None] * len(params)
    for at in set_gradients(params, given, DTensor) if runs is None else range(len(params)):
        param, local = params[at], given[at]
        if local is None:
            continue
        # What was frozen since the forward gets none; what has hooks gets it by way of them: autograd sees to it.
        direct = (runs is None or runs[at]) and param.requires_grad and not hooked(param)
        if not (direct and _added(param, local)):
            out[at] = as_dtensor(param, local)
    return out


def check_unhooked(param: DTensor, name: str) -> None:
    """Raise where a hook would have to see a gradient that is not reduced: it has the form of the parameter.

    Raises:
        GradientError: naming the parameter.
    """
    if hooked(param):
        raise GradientError(
            f"parameter {name!r} has a hook for its gradient, and zero.no_sync has none to show before it is reduced: "
            "remove the hook, or run this backward outside zero.no_sync"
        )


def publish(param: DTensor, local: torch.Tensor) -> None:
    """Add this rank's reduced rows to ``param.grad``, as autograd's accumulation would."""
    grad = param.grad
    if grad is None:
        param.grad = as_dtensor(param, local)
    elif isinstance(grad, DTensor):
        grad._local_tensor.add_(local)
    else:
        raise ShardError(
            f"the gradient of a sharded parameter must be a DTensor, not {type(grad).__name__}; "
            "set p.grad to None or to a DTensor with the placement of p"
        )


def _added(param: DTensor, local: torch.Tensor) -> bool:
    """Add this rank's reduced rows to ``param.grad`` without autograd, whose accumulation detaches a DTensor by way of
    Python's dispatch; False where what stands there is for autograd to add to."""
    grad = param.grad
    if grad is None:
        param.grad = as_dtensor(param, local)
    elif type(grad) is DTensor and grad._spec is param._spec and not grad.requires_grad:
        grad._local_tensor.add_(local)
    else:
        return False
    return True


class Sink(Protocol):
    """Who takes the gradient of a parameter as soon as it is reduced.

    ``uses_up``: there is no gradient afterwards. ``hooks``: ids of hooks that are not the user's.
    """

    uses_up: bool
    hooks: Collection[int]

    def land(self, param: DTensor, local: torch.Tensor, final: bool) -> bool:
        """This rank's rows of the gradient, in a backward that runs.

        Args:
            final: nothing of this backward reads the weight any more, and no other part of it adds to the gradient.

        Returns whether it was taken; else autograd goes on with it.
        """

    def land_part(self, param: DTensor, part: torch.Tensor, begin: int, last: bool, final: bool) -> bool:
        """A tile of this rank's rows, from element ``begin`` on; returns whether it was taken. ``final`` is said of the
        whole gradient, with the last tile."""


def goes_to_grad(param: torch.Tensor) -> bool:
    """Whether the backward that runs adds to ``.grad``; ``torch.autograd.grad`` and ``inputs=`` may not."""
    return param.requires_grad and will_run([torch.autograd.graph.get_gradient_edge(param).node], [param])[0]


def will_run(nodes: Sequence[Any], given: Sequence[torch.Tensor | None]) -> list[bool]:
    """Whether the backward that runs comes to each of ``nodes``, which add to a ``.grad``; only asked where ``given``
    has something for it."""
    asked = torch._C._will_engine_execute_node
    try:
        return [g is not None and asked(n) for n, g in zip(nodes, given, strict=True)]
    except RuntimeError:  # torch does not say so within torch.autograd.grad, which adds to none
        return [False] * len(nodes)


HOOKS = "_zero_hooks"  # of a parameter: ids of hooks that are not the user's


def hooked(param: torch.Tensor, ours: Collection[int] = ()) -> bool:
    """Whether the user has hooks on the parameter that are to see its gradient; ``ours`` are the ids of our own."""
    both = (param._backward_hooks, param._post_accumulate_grad_hooks)
    if both == (None, None):  # as nearly all, of which each is asked in every backward
        return False
    other = param.__dict__.get(HOOKS, ())
    return any(k not in ours and k not in other for hooks in both if hooks for k in hooks)


class ForwardCall:
    """A forward whose backward has yet to run: it may read ``names`` once more. Lives as long as its graph."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)


class _Trained(Protocol):
    """A sharded model, as far as its gradients need to know it.

    ``flush_queued``: autograd's number of the backward at whose end waiting gradients are reduced.
    """

    group: Group
    params: dict[str, Any]
    sinks: weakref.WeakValueDictionary[str, Sink]
    calls: weakref.WeakSet[ForwardCall]
    flush_queued: int | None
    protocol: Any

    def find(self, name: str) -> Any: ...

    def meet(self, operation: str) -> None: ...


def opened(sharded_model: _Trained, names: Iterable[str]) -> ForwardCall | None:
    """Note a forward, where somebody wants to know."""
    if not sharded_model.sinks:
        return None
    call = ForwardCall(names)
    sharded_model.calls.add(call)
    return call


def is_last_call(sharded_model: _Trained, name: str) -> bool:
    """Whether only one forward has yet to run backward through the weight ``name``: the one that does now."""
    return sum(name in call.names for call in sharded_model.calls) == 1


def flush_at_end(sharded_model: _Trained) -> None:
    """When the running backward ends, reduce what still waits: weights that it did not use."""
    if not PendingGrad.ever_made:
        return
    if sharded_model.flush_queued == torch._C._current_graph_task_id():
        return
    sharded_model.flush_queued = torch._C._current_graph_task_id()

    def flush() -> None:

        sharded_model.flush_queued = None
        for name, info in sharded_model.params.items():
            param = sharded_model.find(name)
            grad = getattr(param, "grad", None)
            if isinstance(grad, PendingGrad):
                what = f"eager reduction of the gradient of {name}"
                with ranged(what):
                    rows = sharded_model.protocol.transfer(
                        partial(sharded_model.meet, what),
                        partial(
                            blocking_transfers.reduce,
                            sharded_model.group,
                            info.layout,
                            grad.full,
                            info.reduce_dtype,
                        ),
                    )
                param.grad = grad.base
                publish(param, rows.to(param._local_tensor.device))

    torch.autograd.Variable._execution_engine.queue_callback(flush)


class _AtEnd:
    """See :func:`at_end`."""

    def __init__(self, end: Callable[[], None], broke_off: Callable[[], None]) -> None:
        self._end, self._broke_off, self._over = end, broke_off, False

    def __call__(self) -> None:
        try:
            self._over = True
            self._end()
        except BaseException:
            # Not when this is dropped: the traceback of the error holds it, maybe until a later backward runs.
            self._broke_off()
            raise

    def __del__(self) -> None:
        if not self._over:
            self._broke_off()


def at_end(end: Callable[[], None], broke_off: Callable[[], None]) -> None:
    """Call ``end`` when the backward that runs is over, or ``broke_off`` where that ends with an error or Ctrl-C, of
    whomever: autograd calls nobody then, and drops what it was to call. It does so before ``backward()`` raises; in a
    thread of its own, which an accelerator has, at that moment."""
    torch.autograd.Variable._execution_engine.queue_callback(_AtEnd(end, broke_off))
