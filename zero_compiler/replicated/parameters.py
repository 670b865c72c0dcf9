"""Replicated parameters: those that no shard manages, and what is known of those whose gradients are averaged.

Parameters stay what they are. What is known of one is an attribute of it; which of them are averaged, and over which
ranks, `averaged_modules.py` finds, and `gradient_average.py` averages.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import GradientError
from ..ranks.group import Group
from ..ranks.mesh import make_group
from ..sharded.grads import HOOKS, goes_to_grad
from ..tensors.full_weight import FULL

ATTRIBUTE = "_zero_replicated"  # of a parameter: its ReplicatedParameter
_averaged: weakref.WeakSet[ReplicatedParameter] = weakref.WeakSet()
# Those whose gradient is of a backward under zero.no_sync.
_held_back: weakref.WeakSet[ReplicatedParameter] = weakref.WeakSet()


class ReplicatedParameter:
    """What is known of one parameter that is not sharded; an attribute of it.

    Args:
        param: of floating or complex numbers; it may be frozen, and be trained later.
        arriving: is called where a backward brings a gradient that is to be averaged.

    Attributes:
        averaged: over the ranks of ``group`` (None: all), and not a parameter that nothing compiled has to do with.
        name: the longest one by which it was found: blocks that are compiled apart have more than their own.
        waiting: to its ``.grad`` this rank alone has added. What else is in it is equal on all ranks, and so is left as
            it is by an average.
        left: ``.grad`` as the last backward under zero.no_sync left it.
        sync: not within zero.no_sync.
        among: those it is averaged with; None before its first average.
        root: stands for the module in which it has that name.
        number: in which order this process came to know them.
    """

    _numbers = itertools.count()

    def __init__(self, param: nn.Parameter, arriving: Callable[[ReplicatedParameter], object]) -> None:
        self.param = param
        self._on_arrival = arriving
        self.number = next(ReplicatedParameter._numbers)
        self.name = ""
        self.averaged = self.waiting = False
        self.group: Group | None = None
        self.sync = True
        self.left: tuple[int, int] | None = None
        self.among: AveragedParameters | None = None
        self.root: object = None
        trained = param.requires_grad
        try:
            # A hook outlasts freezing, and nothing would say that the parameter is trained again.
            param.requires_grad_(True)
            if param._backward_hooks is not None:
                # torch.utils.swap_tensors takes them along, and not what calls them: this puts that there again.
                param._backward_hooks = param._backward_hooks
            param.__dict__.setdefault(HOOKS, set()).add(param.register_hook(self._arriving).id)
        finally:
            param.requires_grad_(trained)

    def __reduce__(self) -> str | tuple[object, ...]:
        # A parameter that is saved or copied takes no hooks and no other parameters along. torch.load knows sets.
        return (set, ())

    def average(self, name: str, root: object, group: Group | None) -> None:
        """Average it from now on over ``group``; None: all ranks. Of several groups the largest counts, and of several
        names the longest, with its ``root``."""
        if not self.averaged:
            self.averaged, self.waiting = True, self.param.grad is not None
            _averaged.add(self)
        if self.root is None or (root is not None and len(name) > len(self.name)):
            self.root = root
        self.name = max(self.name, name, key=len)
        if group is not None and (self.group is None or group.world > self.group.world):
            if pg_of(group) is not pg_of(self.group):
                self.among = None
            self.group = group

    @torch._dynamo.disable(reason="a backward within a compiled function runs it")
    def _arriving(self, grad: torch.Tensor) -> None:
        """A gradient was made, which is to be averaged if it goes to ``.grad``."""
        if not (self.averaged and known_of(self.param) is self and goes_to_grad(self.param)):
            return
        if self.among is not None or several_ranks(self.group):
            self._on_arrival(self)

    def written(self) -> bool:
        """Whether somebody has written to what a backward under zero.no_sync left (zeros do not count)."""
        grad = self.param.grad
        return self.left is not None and grad is not None and self.left != _mark(grad) and bool(grad.any())

    def leave(self) -> None:
        """A backward has ended: note how it leaves ``.grad``, where that waits under zero.no_sync."""
        grad = self.param.grad
        self.left = None if self.sync or grad is None else _mark(grad)
        if self.left is not None:
            _held_back.add(self)

    def average_done(self) -> None:
        """``.grad`` is equal on all ranks."""
        self.waiting, self.left = False, None
        _held_back.discard(self)

    def uses(self) -> bool:
        """Whether there is something to be averaged. A gradient that is gone waits for nothing from here on."""
        if self.param.grad is None:
            self.waiting, self.left = False, None
        return self.waiting and self.sync


def known_of(param: object) -> ReplicatedParameter | None:
    """What is known of a parameter, and not of one that it was copied from."""
    known = getattr(param, ATTRIBUTE, None)
    return known if isinstance(known, ReplicatedParameter) and known.param is param else None


def is_averaged(param: object) -> bool:
    """Whether gradients of a parameter are averaged over ranks."""
    return (known := known_of(param)) is not None and known.averaged


def is_replicated(p: object) -> bool:
    """A parameter that no shard manages: every rank has all of it. Not the full weight of a sharded one."""
    return issubclass(type(p), nn.Parameter) and not hasattr(p, FULL)


def replicated_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of ``model`` that no shard manages, by name."""
    model = getattr(model, "_orig_mod", model)
    return {n: p for n, p in at_rest(model) if is_replicated(p)}


def at_rest(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """``model.named_parameters()``, of shards also inside a forward."""
    return nn.Module._named_members(model, lambda module: module._parameters.items())


class AveragedParameters:
    """The parameters that the ranks of one process group average, in one order on all of them."""

    _of_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, AveragedParameters] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self.slots: list[_AveragedParameter] = []
        self.steps = 0  # of optimizers that have some of them, since the last average
        self.digest: tuple[object, bytes] = None, b""  # of what ranks must agree on, and what it was made of

    @classmethod
    def of(cls, pg: dist.ProcessGroup) -> AveragedParameters:
        return cls._of_groups.setdefault(pg, cls())

    def found(self) -> list[ReplicatedParameter | None]:
        """They, on this rank; None for one that is gone here, or averaged with others by now."""
        return [slot.known(self) for slot in self.slots]

    def companions(self) -> dict[object, int]:
        """Of each root the first of them that stands in it."""
        found = [(known.root, i) for i, known in enumerate(self.found()) if known is not None]
        return {root: i for root, i in reversed(found) if root is not None}

    def add(self, name: str, known: ReplicatedParameter) -> None:
        known.among = self
        self.slots.append(_AveragedParameter(name, known))


def grad_dtype(param: torch.Tensor) -> torch.dtype:
    return getattr(param, "grad_dtype", None) or param.dtype


class _AveragedParameter:
    """One of :class:`AveragedParameters`; the parameter may be gone on this rank, and not on others."""

    def __init__(self, name: str, known: ReplicatedParameter) -> None:
        self.name = name
        self._ref = weakref.ref(known)
        self._look(known)

    def _look(self, known: ReplicatedParameter) -> None:
        p = known.param
        self.shape, self.dtype, self.device = tuple(p.shape), grad_dtype(p), p.device

    def known(self, among: AveragedParameters) -> ReplicatedParameter | None:
        """See :meth:`AveragedParameters.found`."""
        known = self._ref()
        if known is None or known.among is not among:
            return None
        self._look(known)
        return known


def _mark(grad: torch.Tensor) -> tuple[int, int]:
    """Changes with what is written to ``grad``, or put in its place."""
    return grad.data_ptr(), grad._version


def never_averaged(among: AveragedParameters, pg: dist.ProcessGroup) -> list[ReplicatedParameter]:
    """What this rank trains over the ranks of ``pg`` and has not averaged ``among`` others, in the order in which it
    came to know of it."""
    return _in_order(
        k
        for k in _averaged
        if k.among is not among and k.param.requires_grad and not k.param.is_meta and pg_of(k.group) is pg
    )


def held_back(pg: dist.ProcessGroup) -> list[ReplicatedParameter]:
    """Those of the ranks of ``pg`` whose gradients wait since backwards under zero.no_sync, in one order."""
    return _in_order(k for k in _held_back if k.sync and k.left is not None and pg_of(k.group) is pg)


def _in_order(some: Iterable[ReplicatedParameter]) -> list[ReplicatedParameter]:
    return sorted(some, key=lambda known: known.number)


def averaged_of(params: Iterable[object]) -> list[ReplicatedParameter]:
    """What is known of those ``params`` that are plain and averaged."""
    return [k for k in map(known_of, params) if k is not None and k.averaged]


def check_averaged(params: Iterable[object]) -> None:
    """Raise where gradients of ``params`` are those of this rank alone.

    Raises:
        GradientError: before any of them was touched.
    """
    if any(k.waiting and k.param.grad is not None for k in averaged_of(params)):
        raise GradientError(
            "these gradients are those of this rank alone: parameters that are not sharded are averaged when a "
            "backward outside zero.no_sync ends; run one before stepping"
        )


def stepped(params: Iterable[object]) -> None:
    """An optimizer steps ``params``."""
    for among in {k.among for k in averaged_of(params) if k.among is not None}:
        among.steps += 1


def averaged_over(params: Iterable[object]) -> list[Group]:
    """Groups of ranks that average gradients of ``params``."""
    found = {}
    for known in averaged_of(params):
        if id(known.group) not in found and several_ranks(known.group):
            found[id(known.group)] = group_of(known.group)
    return list(found.values())


def pg_of(group: Group | None) -> Any:
    """None where it has been destroyed."""
    return dist.group.WORLD if group is None else None if group.destroyed else group.pg


def group_of(group: Group | None) -> Group:
    return group or make_group(None, None)


def several_ranks(group: Group | None) -> bool:
    if group is not None and group.destroyed:
        return False
    pg = None if group is None else group.pg
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(pg) > 1
