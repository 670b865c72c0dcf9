"""Plain parameters: what is not sharded trains as stage 0 under ``torch.compile(model, backend="zero")``.

That is a model of which nothing is sharded, or what stands beside the sharded part of one. Parameters stay what
they are. When a backward ends, the gradients that it brought, from compiled and eager frames alike, are averaged
over the ranks in the order of the parameters, as DDP does. A parameter that was used on some ranks only counts as
zero on the others. Nothing else is sent, so ranks may evaluate as they like. Before an average ranks exchange
headers (`call_handshake.py`), since one may be in another model or in another call.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from ..errors import GradientError, RankMismatchError, TransferError
from ..ranks.call_handshake import meet, short_digest
from ..ranks.failure_broadcast import cannot_begin
from ..ranks.group import Group
from ..ranks.mesh import make_group
from ..ranks.peer_waits import answered
from ..sharded.grads import HOOKS, goes_to_grad
from ..tensors.full_weight import FULL
from .held import at_rest

log = logging.getLogger("zero_compiler")
_BUCKET_BYTES = 25 << 20  # as DDP's default
ATTRIBUTE = "_zero_plain"  # of a parameter: the model that it is averaged with
_SAID = "_zero_said"
_COUNT_BYTES = 8  # of a header: how many parameters are known to have begun alike
_DOING = "average of the gradients of parameters that are not sharded"


class PlainModel:
    """The plain parameters of one model, and which of their gradients wait for their average.

    Each parameter carries a reference to it, so that it lives and dies with the model.
    """

    def __init__(self) -> None:
        self.params: list[nn.Parameter] = []
        self.names: list[str] = []
        self.known: set[int] = set()
        self.hooked: set[int] = set()
        self.sync = True
        self.group: Group | None = None  # of the ranks that are averaged over; None: all
        # Indices of parameters to whose ``.grad`` this rank alone has added. What else is in it is equal on all ranks,
        # and so is left as it is by an average.
        self.waiting: set[int] = set()
        self.left: dict[
            int, tuple[int, int]
        ] = {}  # of these, as the last backward under zero.no_sync left them
        self.changed: int | None = None  # one that was then written to
        self.queued: int | None = None  # the backward whose end is to be heard of
        self.digest = b""  # of what ranks must agree on
        self.compared = 0  # so many parameters are known to have begun with the same values on all ranks

    def __reduce__(self) -> str | tuple[object, ...]:
        return (PlainModel, ())  # a pickled or copied parameter takes no hooks and no other parameters along

    def add(self, param: nn.Parameter, name: str) -> None:
        self.known.add(id(param))
        setattr(param, ATTRIBUTE, self)
        if id(param) in self.hooked or not _several_ranks(self.group):
            return
        self.hooked.add(id(param))
        self.digest = b""
        index = len(self.params)
        self.params.append(param)
        self.names.append(name)

        def arriving(grad: torch.Tensor) -> None:
            self._arriving(index)

        param.__dict__.setdefault(HOOKS, set()).add(param.register_hook(arriving).id)

    def _arriving(self, index: int) -> None:
        """A gradient was made, which is to be averaged if it goes to ``.grad``."""
        param = self.params[index]
        if not goes_to_grad(param):
            return
        running = torch._C._current_graph_task_id()
        if self.queued != running:
            self.queued, self.changed = running, None
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if index in self.left and param.grad is not None and self.left[index] != _mark(param.grad):
            if param.grad.any():  # and was not set to zero
                self.changed = index
        self.waiting.add(index)

    @torch.no_grad()
    def _finish(self) -> None:
        self.queued = None
        if self.changed is not None:
            self._refuse(self._partly_summed(self.changed))
        sparse = next((i for i in self.waiting if _is_sparse(self.params[i].grad)), None)
        if sparse is not None:
            self._refuse(_sparse(self.names[sparse]))
        if not self.sync:
            grads = ((i, self.params[i].grad) for i in self.waiting)
            self.left = {i: _mark(grad) for i, grad in grads if grad is not None}
            return
        if not _several_ranks(self.group):  # there were when the hooks were made
            raise TransferError(
                "the process group over which gradients of parameters that are not sharded were averaged has been "
                "destroyed; call torch.distributed.destroy_process_group after the last backward"
            )
        self._compare(self._meet())
        params = self.params
        mine = [i in self.waiting and p.grad is not None for i, p in enumerate(params)]
        used = torch.tensor(mine, dtype=torch.uint8, device=params[0].device)
        with answered(self.everyone, _DOING):
            dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self.pg)
        todo = [p for p, flag in zip(params, used.tolist(), strict=True) if flag]
        for p in todo:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        with answered(self.everyone, _DOING):
            _average([p.grad for p in todo], self.pg)
        self.waiting.clear()
        self.left.clear()

    def _partly_summed(self, index: int) -> GradientError:
        """What was clipped, say, was a part of a sum, and of this rank's alone."""
        return GradientError(
            f"the gradient of parameter {self.names[index]!r} was written to (clipped, say, or unscaled) "
            "between a backward under zero.no_sync and the next one: it was that of this rank alone and not yet "
            "complete; run the last backward of a step outside zero.no_sync, and clip after it"
        )

    def _refuse(self, error: GradientError) -> NoReturn:
        """Raise ``error``, also on ranks that begin an average."""
        self.changed = None
        self.left.clear()
        if self.sync and _several_ranks(self.group):
            cannot_begin(self.everyone, error)
        raise error

    @property
    def everyone(self) -> Group:
        """The ranks over which gradients are averaged."""
        return self.group or make_group(None, self.params[0].device)

    @property
    def pg(self) -> Any:
        return None if self.group is None else self.group.pg

    def _meet(self) -> int:
        """Before the first collective of an average: all ranks are in one, of the same model.

        Returns of how many parameters every rank knows that they began with the same values.

        Raises:
            RankMismatchError: on every rank, naming the first difference.
            TransferError: a peer did not answer.
        """

        def text() -> str:
            named = zip(self.names, self.params, strict=True)
            return "\n".join([_DOING, *(f"parameter {n}: {list(p.shape)} {p.dtype}" for n, p in named)])

        self.digest = self.digest or short_digest(text())
        told = meet(self.everyone, self.digest, text, _DOING, self.compared.to_bytes(_COUNT_BYTES, "little"))
        return min(int.from_bytes(t[:_COUNT_BYTES], "little") for t in told)

    def _compare(self, compared: int) -> None:
        """Before the first average of parameters: ranks began with the same values, which nobody sent around.

        Args:
            compared: of so many all ranks know it.

        Raises:
            RankMismatchError: on every rank, naming the first parameter that differs.
        """
        params = self.params[compared:]
        if not params:
            return
        # Sums of bytes: exact, whatever the order in which a machine adds.
        sums = torch.stack([p.detach().reshape(-1).view(torch.uint8).sum(dtype=torch.int64) for p in params])
        most = torch.cat([sums, -sums])
        with answered(self.everyone, _DOING):
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.pg)
        highest, lowest = most.view(2, -1) * torch.tensor([[1], [-1]], device=most.device)
        differ = (highest != lowest).nonzero().flatten().tolist()
        if differ:
            name = self.names[compared + differ[0]]
            raise RankMismatchError(
                f"ranks have different values of parameter {name!r}, which is not sharded: build the model under the "
                "same seed on every rank, or load the same checkpoint"
            )
        self.compared = len(self.params)


def _is_sparse(grad: torch.Tensor | None) -> bool:
    return grad is not None and grad.layout is not torch.strided


def _sparse(name: str) -> GradientError:
    return GradientError(
        f"the gradient of parameter {name!r}, which is not sharded, is sparse, and those are not averaged over ranks; "
        "make its module with sparse=False"
    )


def _mark(grad: torch.Tensor) -> tuple[int, int]:
    """Changes with what is written to ``grad``, or put in its place."""
    return grad.data_ptr(), grad._version


def check_averaged(params: Iterable[object]) -> None:
    """Raise where gradients of ``params`` are those of this rank alone.

    Raises:
        GradientError: before any of them was touched.
    """
    for param in params:
        state = getattr(param, ATTRIBUTE, None)
        if state is not None and any(state.params[i].grad is not None for i in state.waiting):
            raise GradientError(
                "these gradients are those of this rank alone: parameters that are not sharded are averaged when a "
                "backward outside zero.no_sync ends; run one before stepping"
            )


def averaged_over(params: Iterable[object]) -> list[Group]:
    """Groups of ranks that average gradients of ``params``."""
    states = {getattr(param, ATTRIBUTE, None) for param in params}
    return [s.everyone for s in states if s is not None and s.params and _several_ranks(s.group)]


def averages_follow(params: Iterable[object]) -> bool:
    """Whether gradients of ``params`` are averaged later at the end of the backward that ends now."""
    running = torch._C._current_graph_task_id()
    states = (getattr(param, ATTRIBUTE, None) for param in params)
    return any(state is not None and state.queued == running for state in states)


def _average(grads: Sequence[Any], pg: dist.ProcessGroup) -> None:
    """Average ``grads`` over the ranks of ``pg``, in place, in buckets of one dtype."""
    world = dist.get_world_size(pg)
    bucket: list[torch.Tensor] = []

    def flush() -> None:
        if not bucket:
            return
        flat = torch.cat([g.reshape(-1) for g in bucket]) if len(bucket) > 1 else bucket[0].contiguous()
        dist.all_reduce(flat, group=pg)
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


def watched(
    compiled: Callable[..., object], example_inputs: Sequence[object], sources: Sequence[object]
) -> Callable[..., object]:
    """``compiled``, a frame that may read plain parameters, for whichever model calls it.

    Dynamo runs a frame for every module of a class that passes its guards, and asks the backend once.

    Args:
        sources: where Dynamo finds each of the inputs.
    """
    at = [i for i, p in enumerate(example_inputs) if _plain(p)]
    if not at:
        return compiled
    in_modules = {i for i in at if _in_module(sources[i])}

    @torch._dynamo.disable(reason="entry of a compiled frame")
    def call(*args: Any) -> object:
        if torch.is_grad_enabled() and any(not _known(args[i]) for i in at):
            watch([args[i] for i in at], found=[args[i] for i in at if i in in_modules])
        return compiled(*args)

    return call


def _in_module(source: Any) -> bool:
    """Whether Dynamo finds a parameter in a module, and not as an argument or a local variable."""
    while source is not None:
        if getattr(source, "member", None) == "_parameters":
            return True
        source = getattr(source, "base", None)
    return False


def _plain(p: object) -> bool:
    """A parameter that no shard manages; not the full weight of one."""
    return type(p) is nn.Parameter and not hasattr(p, FULL)


def _known(param: torch.Tensor) -> bool:
    if not param.requires_grad:
        return True
    state = getattr(param, ATTRIBUTE, None)
    # A process group may have been made since the model was first called.
    return state is not None and id(param) in (state.hooked if _several_ranks(state.group) else state.known)


def _several_ranks(group: Group | None) -> bool:
    if group is not None and group.destroyed:
        return False
    pg = None if group is None else group.pg
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(pg) > 1


def _ranks_of(model: nn.Module) -> Group | None:
    """The ranks that train the sharded parts of a model: its plain parts are theirs too.

    None, for all ranks, where nothing is sharded. Of parts on several meshes the largest counts.
    """
    parts = (
        m.__dict__["_zero"].sharded_model.group.everyone for m in model.modules() if "_zero" in m.__dict__
    )
    return max(parts, key=lambda group: group.world, default=None)


def watch_compiled(is_ours: Callable[[object], bool]) -> None:
    """From now on, see to it that a model given to ``torch.compile`` is averaged also where Dynamo captures nothing of
    it (an RNN, a graph break within a loop): then nobody asks the backend.

    Args:
        is_ours: whether a backend, as ``torch.compile`` holds it, is this one.
    """
    from torch._dynamo.eval_frame import OptimizedModule, innermost_backend

    def registered(wrapper: nn.Module, name: str, model: nn.Module) -> None:
        # torch says of every module what it is registered in, and Dynamo's wrapper registers the model.
        if (
            name != "_orig_mod"
            or not isinstance(wrapper, OptimizedModule)
            or not isinstance(model, nn.Module)
        ):
            return
        made = sys._getframe(1)
        while made is not None and made.f_code is not OptimizedModule.__init__.__code__:
            made = made.f_back  # type: ignore[assignment]
        callback = getattr(made.f_locals.get("dynamo_ctx"), "callback", None) if made is not None else None
        if callable(callback) and is_ours(innermost_backend(callback)):
            for param in plain_parameters(model).values():
                if param.requires_grad:
                    _watch_gradient(param, model)

    torch.nn.modules.module.register_module_module_registration_hook(registered)


def _watch_gradient(param: nn.Parameter, model: nn.Module) -> None:
    """Join ``model`` when a gradient of ``param`` comes and no frame has."""

    def arriving(grad: torch.Tensor) -> None:
        if _several_ranks(None) and _plain(param) and not _known(param):
            watch([param], model)
            state = getattr(param, ATTRIBUTE)
            state._arriving(next(i for i, p in enumerate(state.params) if p is param))

    param.__dict__.setdefault(HOOKS, set()).add(param.register_hook(arriving).id)


def watch(
    params: Sequence[nn.Parameter], model: nn.Module | None = None, found: Sequence[nn.Parameter] = ()
) -> None:
    """See to it that the plain parameters of ``model`` are averaged, by default that of the frame that runs.

    A parameter that is of no module, while others are or while a module is called, is the caller's own (an argument, or
    made for this call): its gradient stays that of this rank, as that of any other tensor.

    Args:
        params: plain parameters, as the frame is given them.
        found: those of them that Dynamo found in a module, whichever that is.
    """
    models = [model] if model is not None else _models_of(params)
    members: dict[str, nn.Parameter] = {}
    for k, one in enumerate(models):
        for name, param in plain_parameters(one).items():
            members[f"{name} of module {k}" if name in members else name] = param
    averaged = set(map(id, members.values()))
    bare = (
        [] if models or _in_module_call() else params
    )  # of a function that nothing but parameters is given to
    members |= {f"number {i}": p for i, p in enumerate(found or bare) if id(p) not in averaged}
    averaged |= set(map(id, members.values()))
    own = [p for p in params if p.requires_grad and id(p) not in averaged and not _known(p)]
    if own and _several_ranks(None):
        _say_own(tuple(own[0].shape))
    if not members:
        return
    state = plain_model(list(members.values()))
    if models:
        state.group = max(map(_ranks_of, models), key=lambda group: 0 if group is None else group.world)
    trained = sum(p.requires_grad for p in members.values())
    if trained and not getattr(state, _SAID, False):
        setattr(state, _SAID, True)
        rest = sum(1 for one in models for _ in at_rest(one)) - len(members)
        if rest > 0:
            what = f"{trained} parameters of this model are not sharded, so they train as stage 0"
        else:
            what = "nothing in this model is sharded, so it trains as stage 0"
        log.warning(
            'backend "zero": %s; call zero.shard(model, stage=3) before torch.compile to partition it', what
        )
    for name, param in members.items():
        if param.requires_grad:
            state.add(param, name)


def watch_beside(model: nn.Module) -> None:
    """:func:`watch` for a sharded model that runs without compile and was given plain parameters since."""
    if torch.is_grad_enabled() and _several_ranks(None):
        left = [p for _, p in at_rest(model) if _plain(p) and not _known(p)]
        if left:
            watch(left)


def plain_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of ``model`` that no shard manages, by name."""
    model = getattr(model, "_orig_mod", model)
    return {n: p for n, p in at_rest(model) if _plain(p)}


def plain_model(params: Sequence[nn.Parameter]) -> PlainModel:
    """The state of the model that ``params`` belong to; made where there is none."""
    for param in params:
        state = getattr(param, ATTRIBUTE, None)
        if state is not None:
            return state
    state = PlainModel()
    if params:
        # Known before it is hooked: zero.no_sync may come before the first call.
        setattr(params[0], ATTRIBUTE, state)
    return state


@functools.cache
def _say_own(shape: tuple[int, ...]) -> None:
    """Once for each shape: such parameters may be made anew for every call."""
    log.warning(
        'backend "zero": a compiled call is given a parameter of shape %s that is of no module; its gradient stays '
        "that of this rank",
        list(shape),
    )


def _in_module_call() -> bool:
    """Whether a method of a module is on the call stack."""
    frame = sys._getframe(1)
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), nn.Module):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _models_of(params: Sequence[nn.Parameter]) -> list[nn.Module]:
    """Of each of ``params`` the outermost module on the call stack that owns it: a function may call several.

    A backend is given a frame and not the model, whose other frames may run eagerly; the caller of the frame
    is the model.
    """
    wanted = {id(p) for p in params}
    owner: dict[int, nn.Module] = {}
    frame = sys._getframe(1)
    while frame is not None:
        for value in list(frame.f_locals.values()):
            if isinstance(value, nn.Module) and not isinstance(value, torch.fx.GraphModule):
                owner |= {id(p): value for _, p in at_rest(value) if id(p) in wanted}
        frame = frame.f_back  # type: ignore[assignment]
    return list({id(m): m for p in params if (m := owner.get(id(p))) is not None}.values())
