"""Plain parameters: what is not sharded trains as stage 0 under ``torch.compile(model, backend="zero")``.

That is a model of which nothing is sharded, or what stands beside the sharded part of one. Parameters stay what
they are. When a backward ends, the gradients that it brought, from compiled and eager frames alike, are averaged
over the ranks in the order of the parameters, as DDP does. A parameter that was used on some ranks only counts as
zero on the others. Nothing else is sent, so ranks may evaluate as they like. Before an average ranks exchange
headers (`call_handshake.py`), since one may be in another model or in another call.

Which parameters those are is found in `plain_modules.py`.
"""

from __future__ import annotations

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
_DOING = "average of the gradients of parameters that are not sharded"


class PlainParameter:
    """What is known of one parameter that is not sharded; an attribute of it.

    Args:
        param: of floating or complex numbers; it may be frozen, and be trained later.

    Attributes:
        state: the model that it is averaged with; None where nothing of it is compiled.
        root: the module in which it was found under ``name``.
        waiting: to its ``.grad`` this rank alone has added. What else is in it is equal on all ranks, and so is left as
            it is by an average.
        left: ``.grad`` as the last backward under zero.no_sync left it.
        sync: not within zero.no_sync.
        compared: it is known to have begun with the same values on all ranks.
    """

    def __init__(self, param: nn.Parameter) -> None:
        self.param = param
        self.state: PlainModel | None = None
        self.name = ""
        self.root: weakref.ref[nn.Module] | None = None
        self.waiting = self.compared = False
        self.sync = True
        self.left: tuple[int, int] | None = None
        trained = param.requires_grad
        try:
            param.requires_grad_(
                True
            )  # a hook stays when it is frozen again, and nothing is heard when it is trained
            param.__dict__.setdefault(HOOKS, set()).add(param.register_hook(self._arriving).id)
        finally:
            param.requires_grad_(trained)

    def __reduce__(self) -> str | tuple[object, ...]:
        # A parameter that is saved or copied takes no hooks and no other parameters along. torch.load knows sets.
        return (set, ())

    @torch._dynamo.disable(reason="a backward within a compiled function runs it")
    def _arriving(self, grad: torch.Tensor) -> None:
        """A gradient was made, which is to be averaged if it goes to ``.grad``."""
        if self.state is not None and several_ranks(self.state.group) and goes_to_grad(self.param):
            self.state.arriving(self)


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
    """A parameter was replaced, here at least: nothing holds it, and its next gradient asks whether it is still in the
    model."""
    known = known_of(param)
    if known is not None and known.state is not None:
        known.state.members.pop(id(param), None)


class PlainModel:
    """The plain parameters that are averaged together, and when.

    They are those of modules, as they are when a backward ends, and those that were found in modules that nobody has
    named. Which modules came first, or whether a part of one did, does not matter to their order.

    Attributes:
        group: of the ranks that are averaged over; None: all.
        members: by their identity, as the last average found them.
        queued: the backward whose end is to be heard of.
        into: the one that this became a part of.
    """

    def __init__(self) -> None:
        self.group: Group | None = None
        self.members: dict[int, PlainParameter] = {}
        self.queued: int | None = None
        self.into: PlainModel | None = None
        self.said = False  # that it trains as stage 0
        self._roots: list[weakref.ref[nn.Module]] = []
        self._changed: PlainParameter | None = None  # written to after a backward under zero.no_sync
        self._digest: tuple[object, bytes] = None, b""  # of what ranks must agree on, and what it was made of

    def add(self, param: nn.Parameter, name: str) -> None:
        """Average ``param`` too, whichever module it is of."""
        if (known := plain_parameter(param)) is not None:
            known.name = known.name or name
            self._take(known)

    def add_module(self, root: nn.Module) -> None:
        """Average all plain parameters that ``root`` has when a backward ends."""
        roots = [(ref, one) for ref in self._roots if (one := ref()) is not None]
        if not any(root is m for _, one in roots for m in one.modules()):
            inside = set(map(id, root.modules()))
            self._roots = [ref for ref, one in roots if id(one) not in inside] + [weakref.ref(root)]
        for name, param in plain_parameters(root).items():
            self.add(param, name)

    def over(self, group: Group | None) -> None:
        """Average over ``group``; of several the largest counts."""
        if group is not None and (self.group is None or group.world > self.group.world):
            self.group = group

    def _take(self, known: PlainParameter) -> None:
        other, known.state = known.state, self
        self.members[id(known.param)] = known
        if other is not None and other is not self:
            self._absorb(other)

    def _absorb(self, other: PlainModel) -> None:
        """A parameter is of both, so they are averaged together."""
        other.into = self
        self.said |= other.said
        self.over(other.group)
        for ref in other._roots:
            if (root := ref()) is not None:
                self.add_module(root)
        for known in other.members.values():
            known.state = self
            self.members[id(known.param)] = known
        if other.queued is not None:
            self._queue()

    def _refresh(self) -> None:
        """Find the members anew: modules are given other parameters, and lose some."""
        found: dict[int, PlainParameter] = {}
        for ref in list(self._roots):
            root = ref()
            for name, param in () if root is None else plain_parameters(root).items():
                unheard = known_of(param) is None and param.grad is not None
                known = plain_parameter(param)
                if known is not None and id(param) not in found:
                    known.waiting |= unheard
                    known.name, known.root = name, ref
                    found[id(param)] = known
        for key, known in list(self.members.items()):
            gone = known.root is not None and known.root() is not None  # from a module that is still there
            if key not in found and not gone:
                found[key] = known
            elif key not in found:
                known.state = None
        self.members = found
        for known in list(found.values()):
            self._take(known)

    def arriving(self, known: PlainParameter) -> None:
        """A gradient of one of them goes to ``.grad``."""
        if id(known.param) not in self.members:
            self._refresh()
            if id(known.param) not in self.members:
                known.state = None
                return
        self._queue()
        grad = known.param.grad
        if known.left is not None and grad is not None and known.left != _mark(grad):
            if grad.any():  # and was not set to zero
                self._changed = known
        known.waiting = True

    def _queue(self) -> None:
        running = torch._C._current_graph_task_id()
        if self.queued != running:
            self.queued, self._changed = running, None
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    @torch._dynamo.disable(reason="a backward within a compiled function ends with it")
    @torch.no_grad()
    def _finish(self) -> None:
        self.queued = None
        if self.into is not None:
            return
        self._refresh()
        members = list(self.members.values())
        waiting = [(k, grad) for k in members if k.waiting and (grad := k.param.grad) is not None]
        sync = any(k.sync for k in members if k.param.requires_grad)
        if self._changed is not None:
            self._refuse(_partly_summed(self._changed.name), sync)
        sparse = next((k for k, grad in waiting if grad.layout is not torch.strided), None)
        if sparse is not None:
            self._refuse(_sparse(sparse.name), sync)
        for known, grad in waiting:
            known.left = None if known.sync else _mark(grad)
        if not sync:
            return
        if not several_ranks(self.group):
            self._check_alone()
            return
        self._meet(members)
        used = [k.waiting and k.param.grad is not None and k.sync for k in members]
        new = [k.param.requires_grad and not k.compared for k in members]
        flags = torch.tensor([used, new], dtype=torch.uint8, device=self.device)
        with answered(self.everyone, _DOING):
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.pg)
        used, new = flags.tolist()
        self._compare([k for k, flag in zip(members, new, strict=True) if flag])
        todo = [k.param for k, flag in zip(members, used, strict=True) if flag]
        for p in todo:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        with answered(self.everyone, _DOING):
            _average([p.grad for p in todo], self.pg)
        for known in members:
            known.waiting &= not known.sync

    def _check_alone(self) -> None:
        """There were several ranks when gradients came."""
        if dist.is_available() and dist.is_initialized() and not (self.group and self.group.destroyed):
            return  # a part was sharded since, and is trained by one rank
        raise TransferError(
            "the process group over which gradients of parameters that are not sharded were averaged has been "
            "destroyed; call torch.distributed.destroy_process_group after the last backward"
        )

    def _refuse(self, error: GradientError, sync: bool) -> NoReturn:
        """Raise ``error``, also on ranks that begin an average."""
        self._changed = None
        for known in self.members.values():
            known.left = None
        if sync and several_ranks(self.group):
            cannot_begin(self.everyone, error)
        raise error

    @property
    def device(self) -> torch.device:
        return next(iter(self.members.values())).param.device

    @property
    def everyone(self) -> Group:
        """The ranks over which gradients are averaged."""
        return self.group or make_group(None, self.device)

    @property
    def pg(self) -> Any:
        return None if self.group is None else self.group.pg

    def _meet(self, members: Sequence[PlainParameter]) -> None:
        """Before the first collective of an average: all ranks are in one, of the same model.

        Raises:
            RankMismatchError: on every rank, naming the first difference.
            TransferError: a peer did not answer.
        """

        def text() -> str:
            rows = [f"parameter {k.name}: {list(k.param.shape)} {k.param.dtype}" for k in members]
            held = [k.name for k in members if not k.sync]
            return "\n".join([_DOING, *rows, f"in zero.no_sync: {', '.join(held) or 'none'}"])

        made_of = [(id(k.param), k.name, k.sync) for k in members]
        if self._digest[0] != made_of:
            self._digest = made_of, short_digest(text())
        meet(self.everyone, self._digest[1], text, _DOING)

    def _compare(self, new: Sequence[PlainParameter]) -> None:
        """Before the first average of parameters: ranks began with the same values, which nobody sent around.

        Raises:
            RankMismatchError: on every rank, naming the first parameter that differs.
        """
        if not new:
            return
        sums = torch.stack([_sum_of(k.param).to(self.device) for k in new])
        most = torch.cat([sums, ~sums])
        with answered(self.everyone, _DOING):
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.pg)
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
    return [k for k in map(known_of, params) if k is not None and k.state is not None]


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
    states = dict.fromkeys(k.state for k in _known(params))
    return [s.everyone for s in states if s is not None and s.members and several_ranks(s.group)]


def averages_follow(params: Iterable[object]) -> bool:
    """Whether gradients of ``params`` are averaged later at the end of the backward that ends now."""
    running = torch._C._current_graph_task_id()
    return any(k.state is not None and k.state.queued == running for k in _known(params))


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
