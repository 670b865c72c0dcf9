"""Plain parameters: what is not sharded trains as stage 0 under ``torch.compile(model, backend="zero")``.

That is a model of which nothing is sharded, or what stands beside the sharded part of one. Parameters stay what
they are. When a backward ends, the gradients that it brought, from compiled and eager frames alike, are averaged
over the ranks in the order of the parameters, as DDP does. A parameter that was used on some ranks only counts as
zero on the others. Nothing else is sent, so ranks may evaluate as they like. Before an average ranks exchange
headers (`call_handshake.py`), since one may be in another model or in another call.

Which parameters those are is found in `plain_modules.py`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import GradientError, RankMismatchError, TransferError
from ..ranks.call_handshake import meet, short_digest
from ..ranks.failure_broadcast import cannot_begin
from ..ranks.group import Group
from ..ranks.mesh import make_group
from ..ranks.peer_waits import answered
from ..sharded.grads import HOOKS, goes_to_grad
from ..tensors.full_weight import FULL
from .held import at_rest

_BUCKET_BYTES = 25 << 20  # as DDP's default
_COMPARED_BYTES = 1 << 20  # of a parameter at a time, where first values are compared
ATTRIBUTE = "_zero_plain"  # of a parameter: its PlainParameter
_numbered: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of each group, the last model's number
_DOING = "average of the gradients of parameters that are not sharded"


class PlainParameter:
    """What is known of one parameter that is not sharded; an attribute of it.

    Args:
        param: of floating or complex numbers; it may be frozen, and be trained later.

    Attributes:
        name: in the module in which it was found last.
        models: that it was found in; the last one that still has it is averaged with it.
        waiting: to its ``.grad`` this rank alone has added. What else is in it is equal on all ranks, and so is left as
            it is by an average.
        left: ``.grad`` as the last backward under zero.no_sync left it.
        sync: not within zero.no_sync.
        compared: it is known to have begun with the same values on all ranks.
    """

    def __init__(self, param: nn.Parameter) -> None:
        self.param = param
        self.name = ""
        self.models: list[PlainModel] = []
        self.waiting = self.compared = False
        self.sync = True
        self.left: tuple[int, int] | None = None
        trained = param.requires_grad
        try:
            # A hook outlasts freezing, and nothing would say that the parameter is trained again.
            param.requires_grad_(True)
            param.__dict__.setdefault(HOOKS, set()).add(param.register_hook(self._arriving).id)
        finally:
            param.requires_grad_(trained)

    def __reduce__(self) -> str | tuple[object, ...]:
        # A parameter that is saved or copied takes no hooks and no other parameters along. torch.load knows sets.
        return (set, ())

    @property
    def model(self) -> PlainModel | None:
        """That it is averaged with; None where nothing of it is compiled."""
        while self.models:
            if self.models[-1].has(self):
                return self.models[-1]
            self.models.pop()
        return None

    def is_of(self, model: PlainModel) -> None:
        """It is averaged with ``model`` from now on."""
        self.models = [m for m in self.models if m is not model and m.lives()] + [model]

    @torch._dynamo.disable(reason="a backward within a compiled function runs it")
    def _arriving(self, grad: torch.Tensor) -> None:
        """A gradient was made, which is to be averaged if it goes to ``.grad``."""
        if self.models and goes_to_grad(self.param):
            model = self.model
            if model is not None and (model.spread or several_ranks(model.group)):
                EndOfBackward.that_runs().arriving(self, model)


def known_of(param: object) -> PlainParameter | None:
    """What is known of a parameter, and not of one that it was copied from."""
    known = getattr(param, ATTRIBUTE, None)
    return known if isinstance(known, PlainParameter) and known.param is param else None


def plain_parameter(param: nn.Parameter) -> PlainParameter | None:
    """What is known of a parameter from now on; None of one that can have no gradient, or has no shape yet."""
    if (known := known_of(param)) is not None:
        return known
    numbers = param.is_floating_point() or param.is_complex()
    if not numbers or not param.is_leaf or is_lazy(param) or param.is_inference():
        return None
    known = param.__dict__[ATTRIBUTE] = PlainParameter(param)
    return known


def is_plain(p: object) -> bool:
    """A parameter that no shard manages; not the full weight of one."""
    return issubclass(type(p), nn.Parameter) and not hasattr(p, FULL)


def plain_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of ``model`` that no shard manages, by name."""
    model = getattr(model, "_orig_mod", model)
    return {n: p for n, p in at_rest(model) if is_plain(p)}


def forget(param: torch.Tensor) -> None:
    """A parameter was replaced, here at least: nothing holds it, and its next gradient asks whether it is still in a
    model."""
    known = known_of(param)
    for model in known.models if known is not None else ():
        model.members.pop(id(param), None)


class PlainModel:
    """The plain parameters of what a compiled call reads: of modules as they are when a backward ends, and others that
    the call found in modules that nobody has named.

    Attributes:
        group: of the ranks that are averaged over; None: all.
        spread: there were several of them at its last call.
        members: by their identity, as they were found last.
        made: in which order this process made them.
        number: the same model has the same on all ranks of its group: models are numbered when they are averaged first,
            apart for each group, since this rank may be in groups in which others are not.
    """

    _made = itertools.count()

    def __init__(self, roots: Sequence[nn.Module], found: Sequence[nn.Parameter] = ()) -> None:
        self.group: Group | None = None
        self.spread = several_ranks(None)
        self.members: dict[int, PlainParameter] = {}
        self.said = False  # that it trains as stage 0
        self.made = next(PlainModel._made)
        self.number: int | None = None
        self.queued: int | None = None  # the backward at whose end it is averaged
        self.digest: tuple[object, bytes] = None, b""  # of what ranks must agree on, and what it was made of
        self._roots = [weakref.ref(root) for root in roots]
        self._found: dict[int, PlainParameter] = {}
        for i, param in enumerate(found):
            if (known := plain_parameter(param)) is not None:
                known.name = f"number {i}"
                self._found[id(param)] = known
        self.refresh()

    @property
    def roots(self) -> list[nn.Module]:
        return [root for ref in self._roots if (root := ref()) is not None]

    def lives(self) -> bool:
        """Whether a module that it was made for is there."""
        return any(ref() is not None for ref in self._roots)

    def over(self, group: Group | None) -> None:
        """Average over ``group``; of several the largest counts."""
        if group is not None and (self.group is None or group.world > self.group.world):
            self.group, self.number = group, None
        self.spread = several_ranks(self.group)

    def add(self, known: PlainParameter) -> None:
        self.members[id(known.param)] = known
        known.is_of(self)

    def has(self, known: PlainParameter) -> bool:
        if id(known.param) not in self.members:
            self.refresh()
        return id(known.param) in self.members

    def refresh(self) -> None:
        """Find the members anew: modules are given other parameters, and lose some. Those of a module that is gone
        stay: a backward may come after it."""
        if len(self.roots) < len(self._roots):
            return
        members = {}
        for root in self.roots:
            for name, param in plain_parameters(root).items():
                unheard = known_of(param) is None and param.grad is not None
                if (known := plain_parameter(param)) is not None:
                    known.name, known.waiting = name, known.waiting or unheard
                    members[id(param)] = known
        self.members = members | self._found
        for known in self.members.values():
            if self not in known.models:
                known.is_of(self)

    def take(self) -> None:
        """Its call is the last one that has read its parameters."""
        for known in self.members.values():
            known.is_of(self)


class EndOfBackward:
    """What is averaged when one backward ends."""

    _last: EndOfBackward | None = None

    def __init__(self, task: int) -> None:
        self._task = task
        self._models: dict[PlainModel, None] = {}
        self._changed: PlainParameter | None = None  # written to after a backward under zero.no_sync
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    @classmethod
    def that_runs(cls) -> EndOfBackward:
        running = torch._C._current_graph_task_id()
        if cls._last is None or cls._last._task != running:
            cls._last = EndOfBackward(running)
        return cls._last

    def arriving(self, known: PlainParameter, model: PlainModel) -> None:
        """A gradient of a parameter goes to ``.grad``."""
        self._models[model] = None
        model.queued = self._task
        grad = known.param.grad
        if known.left is not None and grad is not None and known.left != _mark(grad):
            if grad.any():  # and was not set to zero
                self._changed = known
        known.waiting = True

    @torch._dynamo.disable(reason="a backward within a compiled function ends with it")
    @torch.no_grad()
    def _finish(self) -> None:
        if EndOfBackward._last is self:
            EndOfBackward._last = None
        by_ranks: dict[Any, list[PlainModel]] = {}
        for model in sorted(self._models, key=lambda m: m.made):
            model.queued = None
            pg = dist.group.WORLD if model.group is None else model.group.pg
            by_ranks.setdefault(pg, []).append(model)
            if model.number is None and pg is not None:  # it may have been destroyed
                model.number = _numbered[pg] = _numbered.get(pg, -1) + 1
        for models in by_ranks.values():
            _GradientAverage(sorted(models, key=lambda m: m.number or 0)).run(self._changed)


class _GradientAverage:
    """Of the gradients of ``models`` over the ranks of their group."""

    def __init__(self, models: Sequence[PlainModel]) -> None:
        self._models = models
        found: dict[int, PlainParameter] = {}
        for model in models:
            model.refresh()
            for key, known in model.members.items():
                found.setdefault(key, known)
        self._members = list(found.values())
        self._group = models[0].group
        self._device = self._members[0].param.device

    def run(self, changed: PlainParameter | None) -> None:
        members = self._members
        waiting = [(k, grad) for k in members if k.waiting and (grad := k.param.grad) is not None]
        sync = any(k.sync for k in members)
        if changed is not None and changed in members:  # and not of other ranks
            self._refuse(_partly_summed(changed.name), sync)
        sparse = next((k for k, grad in waiting if grad.layout is not torch.strided), None)
        if sparse is not None:
            self._refuse(_sparse(sparse.name), sync)
        for known, grad in waiting:
            known.left = None if known.sync else _mark(grad)
        if not sync:
            return
        if not several_ranks(self._group):  # there were when the gradients came
            raise TransferError(
                "the process group over which gradients of parameters that are not sharded were averaged has been "
                "destroyed; call torch.distributed.destroy_process_group after the last backward"
            )
        self._meet()
        used = [k.waiting and k.param.grad is not None and k.sync for k in members]
        new = [k.param.requires_grad and not k.compared for k in members]
        flags = torch.tensor([used, new], dtype=torch.uint8, device=self._device)
        with answered(self._everyone, _DOING):
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._pg)
        used, new = flags.tolist()
        self._compare([k for k, flag in zip(members, new, strict=True) if flag])
        todo = [k.param for k, flag in zip(members, used, strict=True) if flag]
        for p in todo:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        with answered(self._everyone, _DOING):
            _average([p.grad for p in todo], self._pg)
        for known in members:
            known.waiting &= not known.sync

    def _refuse(self, error: GradientError, sync: bool) -> NoReturn:
        """Raise ``error``, also on ranks that begin an average."""
        for known in self._members:
            known.left = None
        if sync and several_ranks(self._group):
            cannot_begin(self._everyone, error)
        raise error

    @property
    def _everyone(self) -> Group:
        return self._group or make_group(None, self._device)

    @property
    def _pg(self) -> Any:
        return None if self._group is None else self._group.pg

    def _meet(self) -> None:
        """Before the first collective of an average: all ranks are in one, of the same models.

        Raises:
            RankMismatchError: on every rank, naming the first difference.
            TransferError: a peer did not answer.
        """
        which = ", ".join(str(model.number) for model in self._models)
        rows = [(id(k.param), k.name, tuple(k.param.shape), k.param.dtype, k.sync) for k in self._members]

        def text() -> str:
            held = ", ".join(name for _, name, _, _, sync in rows if not sync)
            each = [f"parameter {name}: {list(shape)} {dtype}" for _, name, shape, dtype, _ in rows]
            return "\n".join(
                [_DOING, f"models {which}, as they were first averaged", *each, f"in zero.no_sync: {held}"]
            )

        first = self._models[0]
        if first.digest[0] != (which, rows):
            first.digest = (which, rows), short_digest(text())
        meet(self._everyone, first.digest[1], text, _DOING)

    def _compare(self, new: Sequence[PlainParameter]) -> None:
        """Before the first average of parameters: ranks began with the same values, which nobody sent around.

        Raises:
            RankMismatchError: on every rank, naming the first parameter that differs.
        """
        if not new:
            return
        sums = torch.stack([_sum_of(k.param).to(self._device) for k in new])
        most = torch.cat([sums, ~sums])
        with answered(self._everyone, _DOING):
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._pg)
        highest, lowest = most[: len(new)], ~most[len(new) :]
        differ = (highest != lowest).nonzero().flatten().tolist()
        if differ:
            raise RankMismatchError(
                f"ranks have different values of parameter {new[differ[0]].name!r}, which is not sharded: build the "
                "model under the same seed on every rank, or load the same checkpoint"
            )
        for known in new:
            known.compared = True


def _sum_of(param: nn.Parameter) -> torch.Tensor:
    """A number of 64 bits that depends on every byte and on its place: exact, whatever the order in which a machine
    adds."""
    total = torch.zeros((), dtype=torch.int64, device=param.device)
    for part in param.detach().reshape(-1).view(torch.uint8).split(_COMPARED_BYTES):
        words = torch.cat([part, part.new_zeros(-part.numel() % 8)]).view(torch.int64)
        places = 2 * torch.arange(words.numel(), device=param.device) + 1
        total = total * 1_000_003 + (words * places).sum()
    return total


def _partly_summed(name: str) -> GradientError:
    """What was clipped, say, was a part of a sum, and of this rank's alone."""
    return GradientError(
        f"the gradient of parameter {name!r} was written to (clipped, say, or unscaled) "
        "between a backward under zero.no_sync and the next one: it was that of this rank alone and not yet "
        "complete; run the last backward of a step outside zero.no_sync, and clip after it"
    )


def _sparse(name: str) -> GradientError:
    return GradientError(
        f"the gradient of parameter {name!r}, which is not sharded, is sparse, and those are not averaged over ranks; "
        "make its module with sparse=False"
    )


def _mark(grad: torch.Tensor) -> tuple[int, int]:
    """Changes with what is written to ``grad``, or put in its place."""
    return grad.data_ptr(), grad._version


def _known(params: Iterable[object]) -> list[PlainParameter]:
    """What is known of those ``params`` that are plain and averaged."""
    return [k for k in map(known_of, params) if k is not None and k.models]


def check_averaged(params: Iterable[object]) -> None:
    """Raise where gradients of ``params`` are those of this rank alone.

    Raises:
        GradientError: before any of them was touched.
    """
    if any(k.waiting and k.param.grad is not None for k in _known(params)):
        raise GradientError(
            "these gradients are those of this rank alone: parameters that are not sharded are averaged when a "
            "backward outside zero.no_sync ends; run one before stepping"
        )


def averaged_over(params: Iterable[object]) -> list[Group]:
    """Groups of ranks that average gradients of ``params``."""
    found = {}
    for known in _known(params):
        model = known.models[-1]
        if several_ranks(model.group):
            found[id(model.group)] = model.group or make_group(None, known.param.device)
    return list(found.values())


def averages_follow(params: Iterable[object]) -> bool:
    """Whether gradients of ``params`` are averaged later at the end of the backward that ends now."""
    running = torch._C._current_graph_task_id()
    return any(model.queued == running for known in _known(params) for model in known.models)


def _average(grads: Sequence[Any], pg: dist.ProcessGroup) -> None:
    """Average ``grads`` over the ranks of ``pg``, in place, in buckets of one dtype. Divided first, as by DDP: a sum of
    halves may be more than a half can be."""
    world = dist.get_world_size(pg)
    bucket: list[torch.Tensor] = []

    def flush() -> None:
        if not bucket:
            return
        flat = torch.cat([g.reshape(-1) for g in bucket]) if len(bucket) > 1 else bucket[0].contiguous()
        flat.div_(world)
        dist.all_reduce(flat, group=pg)
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


def several_ranks(group: Group | None) -> bool:
    if group is not None and group.destroyed:
        return False
    pg = None if group is None else group.pg
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(pg) > 1
