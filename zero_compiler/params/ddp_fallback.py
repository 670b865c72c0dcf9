"""Plain parameters: what is not sharded trains as stage 0 under ``torch.compile(model, backend="zero")``.

That is a model of which nothing is sharded, or what stands beside the sharded part of one. Parameters stay what
they are. When a backward ends, the gradients that it brought, from compiled and eager frames alike, are averaged
over the ranks, as DDP does. A parameter that was used on some ranks only counts as zero on the others. Nothing else is
sent, so ranks may evaluate as they like. Before an average ranks exchange headers (`call_handshake.py`), since one may
be in another call.

Ranks average parameters in the order in which they came into an average first (:class:`AveragedParameters`). Which
parameter of this rank is which of another's, their ranks find out then (`parameter_matching.py`), from names and
values: not from what a rank has compiled, called or kept before, which may be its own affair.

Which parameters those are is found in `plain_modules.py`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import GradientError, TransferError
from ..ranks.call_handshake import meet, short_digest
from ..ranks.failure_broadcast import cannot_begin
from ..ranks.group import Group
from ..ranks.mesh import make_group
from ..ranks.parameter_matching import Described, find_like, match, not_found, value_of
from ..ranks.peer_waits import answered
from ..sharded.grads import HOOKS, goes_to_grad
from ..tensors.full_weight import FULL
from .held import at_rest

_BUCKET_BYTES = 25 << 20  # as DDP's default
ATTRIBUTE = "_zero_plain"  # of a parameter: its PlainParameter
_DOING = "average of the gradients of parameters that are not sharded"
# Of a parameter, what a rank says before an average: it is gone here, it is here, it has a gradient, it was not found.
_GONE, _HERE, _USED, _MISSING = range(4)


class PlainParameter:
    """What is known of one parameter that is not sharded; an attribute of it.

    Args:
        param: of floating or complex numbers; it may be frozen, and be trained later.

    Attributes:
        averaged: over the ranks of ``group`` (None: all), and not a parameter that nothing compiled has to do with.
        name: the shortest one by which it was found: a rank alone may have modules around a model.
        waiting: to its ``.grad`` this rank alone has added. What else is in it is equal on all ranks, and so is left as
            it is by an average.
        left: ``.grad`` as the last backward under zero.no_sync left it.
        sync: not within zero.no_sync.
        among: those it is averaged with; None before its first average.
        number: in which order this process came to know them.
    """

    _numbers = itertools.count()

    def __init__(self, param: nn.Parameter) -> None:
        self.param = param
        self.number = next(PlainParameter._numbers)
        self.name = ""
        self.averaged = self.waiting = False
        self.group: Group | None = None
        self.sync = True
        self.left: tuple[int, int] | None = None
        self.among: AveragedParameters | None = None
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

    def average(self, name: str, group: Group | None) -> None:
        """Average it from now on over ``group``; None: all ranks. Of several groups the largest counts."""
        if not self.averaged:
            self.averaged, self.waiting = True, self.param.grad is not None
            _averaged.add(self)
        self.name = min(filter(None, (self.name, name)), key=len, default=name)
        if group is not None and (self.group is None or group.world > self.group.world):
            self.group = group

    @torch._dynamo.disable(reason="a backward within a compiled function runs it")
    def _arriving(self, grad: torch.Tensor) -> None:
        """A gradient was made, which is to be averaged if it goes to ``.grad``."""
        if not (self.averaged and known_of(self.param) is self and goes_to_grad(self.param)):
            return
        if self.among is not None or several_ranks(self.group):
            EndOfBackward.that_runs().arriving(self)

    def written(self) -> bool:
        """Whether somebody has written to what a backward under zero.no_sync left (zeros do not count)."""
        grad = self.param.grad
        return self.left is not None and grad is not None and self.left != _mark(grad) and bool(grad.any())

    def uses(self) -> bool:
        """Whether there is something to be averaged: a gradient that is gone, or written anew, waits for nothing."""
        if self.param.grad is None:
            self.waiting, self.left = False, None
        return self.waiting and self.sync


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


def is_averaged(param: object) -> bool:
    """Whether gradients of a parameter are averaged over ranks."""
    return (known := known_of(param)) is not None and known.averaged


def is_plain(p: object) -> bool:
    """A parameter that no shard manages; not the full weight of one."""
    return issubclass(type(p), nn.Parameter) and not hasattr(p, FULL)


def plain_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of ``model`` that no shard manages, by name."""
    model = getattr(model, "_orig_mod", model)
    return {n: p for n, p in at_rest(model) if is_plain(p)}


_averaged: weakref.WeakSet[PlainParameter] = weakref.WeakSet()
_held_back: weakref.WeakSet[PlainParameter] = (
    weakref.WeakSet()
)  # their gradient is of a backward under zero.no_sync


class AveragedParameters:
    """The parameters that the ranks of one process group average, in one order on all of them."""

    _of_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, AveragedParameters] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self.slots: list[_AveragedParameter] = []
        self.digest: tuple[object, bytes] = None, b""  # of what ranks must agree on, and what it was made of

    @classmethod
    def of(cls, pg: dist.ProcessGroup) -> AveragedParameters:
        return cls._of_groups.setdefault(pg, cls())

    def here(self) -> Iterator[PlainParameter]:
        """Those of them that this rank still has."""
        for slot in self.slots:
            if (known := slot.known(self)) is not None:
                yield known

    def add(self, name: str, known: PlainParameter) -> None:
        known.among = self
        self.slots.append(_AveragedParameter(name, known))


class _AveragedParameter:
    """One of :class:`AveragedParameters`; the parameter may be gone on this rank, and not on others."""

    def __init__(self, name: str, known: PlainParameter) -> None:
        self.name = name
        self._ref = weakref.ref(known)
        self.shape, self.dtype = tuple(known.param.shape), known.param.dtype

    def known(self, among: AveragedParameters) -> PlainParameter | None:
        """What is known of the parameter; None where it is gone, or averaged with others by now."""
        known = self._ref()
        if known is None or known.among is not among:
            return None
        self.shape, self.dtype = tuple(known.param.shape), known.param.dtype
        return known


class EndOfBackward:
    """What is averaged when one backward ends."""

    _last: weakref.ref[EndOfBackward] | None = None

    def __init__(self, task: int) -> None:
        self._task = task
        self._arrived: dict[PlainParameter, None] = {}
        self._changed: PlainParameter | None = None  # written to after a backward under zero.no_sync
        # It lives as long as its backward, also one that fails.
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    @classmethod
    def pending(cls) -> EndOfBackward | None:
        """Of the backward that runs, where it will average something."""
        last = None if cls._last is None else cls._last()
        return last if last is not None and last._task == torch._C._current_graph_task_id() else None

    @classmethod
    def that_runs(cls) -> EndOfBackward:
        if (last := cls.pending()) is None:
            last = EndOfBackward(torch._C._current_graph_task_id())
            cls._last = weakref.ref(last)
        return last

    def arriving(self, known: PlainParameter) -> None:
        """A gradient of a parameter goes to ``.grad``."""
        self._arrived[known] = None
        if known.written():
            self._changed = known
        known.waiting = True

    @torch._dynamo.disable(reason="a backward within a compiled function ends with it")
    @torch.no_grad()
    def _finish(self) -> None:
        EndOfBackward._last = None
        groups: dict[Any, list[PlainParameter]] = {}
        for known in self._arrived:
            pg = dist.group.WORLD if known.group is None else known.group.pg
            groups.setdefault(pg, []).append(known)
        # In one order on all ranks, which may be in several of them.
        for arrived in sorted(groups.values(), key=lambda arrived: _ranks_of(arrived[0].group)):
            _GradientAverage(arrived).run(self._changed)


def _ranks_of(group: Group | None) -> tuple[list[int], str]:
    pg = dist.group.WORLD if group is None else group.pg
    return ([], "") if pg is None else (dist.get_process_group_ranks(pg), pg.group_name)


class _GradientAverage:
    """Of the gradients that a backward brought, and that wait since others, over the ranks of one group."""

    def __init__(self, arrived: Sequence[PlainParameter]) -> None:
        self._arrived = arrived
        self._group = arrived[0].group
        self._device = arrived[0].param.device

    def run(self, changed: PlainParameter | None) -> None:
        sync = any(known.sync for known in self._arrived)
        if sync and not several_ranks(self._group):  # there were when the gradients came
            raise TransferError(
                "the process group over which gradients of parameters that are not sharded were averaged has been "
                "destroyed; call torch.distributed.destroy_process_group after the last backward"
            )
        among = AveragedParameters.of(self._pg) if sync else None
        here = {known: None for known in self._arrived}
        if among is not None:
            here |= dict.fromkeys(among.here()) | dict.fromkeys(self._held_back())
        uses = [known for known in here if known.uses()]
        if changed is None or changed not in here:  # it may be of other ranks
            changed = next((k for k in uses if k not in self._arrived and k.written()), None)
        if changed is not None:
            self._refuse(_partly_summed(changed.name), sync)
        sparse = next(
            (k for k in here if (g := k.param.grad) is not None and g.layout is not torch.strided), None
        )
        if sparse is not None:
            self._refuse(_sparse(sparse.name), sync)
        for known in self._arrived:
            grad = known.param.grad
            known.left = None if known.sync or grad is None else _mark(grad)
            if known.left is not None:
                _held_back.add(known)
        if among is not None:
            self._average(among, [k for k in uses if k.among is not among])

    def _held_back(self) -> list[PlainParameter]:
        """Those of these ranks whose gradients wait since backwards under zero.no_sync, in one order."""
        return sorted(
            (k for k in _held_back if k.sync and k.left is not None and k.group is self._group),
            key=lambda known: known.number,
        )

    def _average(self, among: AveragedParameters, new: Sequence[PlainParameter]) -> None:
        """Average what waits, of the parameters ``among`` and of ``new`` ones."""
        if self._meet(among, bool(new)):
            self._enter(among, new)
        found = [slot.known(among) for slot in among.slots]
        said = [_GONE if k is None else _USED if k.uses() else _HERE for k in found]
        used = self._largest(said)
        todo = []
        for slot, known, flag in zip(among.slots, found, used, strict=True):
            if flag != _USED:
                continue
            if known is None:  # this rank has let go of it
                todo.append(torch.zeros(slot.shape, dtype=slot.dtype, device=self._device))
                continue
            if known.param.grad is None:
                known.param.grad = torch.zeros_like(known.param)
            todo.append(known.param.grad)
            known.waiting, known.left = False, None
            _held_back.discard(known)
        with answered(self._everyone, _DOING):
            _average_in_buckets(todo, self._pg)
        among.slots = [slot for slot, flag in zip(among.slots, used, strict=True) if flag != _GONE]

    def _largest(self, said: Sequence[int]) -> list[int]:
        """Of what each rank says, a number for each parameter, the largest."""
        flags = torch.tensor(said, dtype=torch.uint8, device=self._device)
        with answered(self._everyone, _DOING):
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._pg)
        largest: list[int] = flags.tolist()
        return largest

    def _enter(self, among: AveragedParameters, new: Sequence[PlainParameter]) -> None:
        """Agree with the other ranks on parameters that come into an average for the first time on one of them.

        Raises:
            RankMismatchError: on every rank, naming the first parameter that differs, or is not found.
        """
        lists: list[Any] = [None] * self._everyone.world
        with answered(self._everyone, _DOING):
            dist.all_gather_object(lists, _described(new), group=self._pg)
        matched = match(lists)
        here = self._everyone.rank
        found: dict[int, PlainParameter] = {i: new[m.at[here]] for i, m in enumerate(matched) if here in m.at}
        for i, m in enumerate(matched):
            if i not in found and (known := _find_like(m.described, [*new, *found.values()])) is not None:
                found[i] = known
        flags = self._largest([_HERE if i in found else _MISSING for i in range(len(matched))])
        if _MISSING in flags:
            raise not_found(matched[flags.index(_MISSING)], matched, len(lists))
        for i, m in enumerate(matched):
            among.add(m.described.name, found[i])

    def _refuse(self, error: GradientError, sync: bool) -> NoReturn:
        """Raise ``error``, also on ranks that begin an average."""
        for known in self._arrived:
            known.left = None
        if sync and several_ranks(self._group):
            cannot_begin(self._everyone, error)
        raise error

    @property
    def _everyone(self) -> Group:
        return self._group or make_group(None, self._device)

    @property
    def _pg(self) -> Any:
        return self._everyone.pg

    def _meet(self, among: AveragedParameters, new: bool) -> bool:
        """Before the first collective of an average: all ranks are in one, of the same parameters. Whether one of them
        has ``new`` ones.

        Raises:
            RankMismatchError: on every rank, naming the first difference.
            TransferError: a peer did not answer.
        """
        rows = []
        for slot in among.slots:
            known = slot.known(among)
            rows.append((slot.name, slot.shape, slot.dtype, known is not None and not known.sync))

        def text() -> str:
            held = ", ".join(name for name, _, _, held in rows if held)
            each = [f"parameter {name}: {list(shape)} {dtype}" for name, shape, dtype, _ in rows]
            return "\n".join([_DOING, *each, f"in zero.no_sync: {held}"])

        if among.digest[0] != rows:
            among.digest = rows, short_digest(text())
        return any(more[0] for more in meet(self._everyone, among.digest[1], text, _DOING, bytes([new])))


def _never_averaged() -> list[PlainParameter]:
    """Those that this rank trains, in the order in which it came to know them."""
    return sorted(
        (k for k in _averaged if k.among is None and k.param.requires_grad and not k.param.is_meta),
        key=lambda known: known.number,
    )


def _described(new: Sequence[PlainParameter]) -> list[Described]:
    """``new`` parameters of this rank, for others."""
    alike: dict[object, list[PlainParameter]] = {}
    for known in _never_averaged():
        alike.setdefault(_form(known), []).append(known)
    out = []
    for known in new:
        value, among = value_of(known.param), alike.get(_form(known), [])
        equal = [k for k in among if k is known or value_of(k.param) == value] if len(among) > 1 else among
        place = equal.index(known) if known in equal else 0
        out.append(Described(known.name, tuple(known.param.shape), str(known.param.dtype), value, place))
    return out


def _form(known: PlainParameter) -> tuple[object, ...]:
    return known.name, known.param.shape, known.param.dtype


def _find_like(wanted: Described, taken: Sequence[PlainParameter]) -> PlainParameter | None:
    """This rank's parameter that another rank describes, where it is none of those ``taken``."""
    used = set(map(id, taken))
    return known_of(find_like(wanted, [(k.name, k.param) for k in _never_averaged() if id(k) not in used]))


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
    return [k for k in map(known_of, params) if k is not None and k.averaged]


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
        if several_ranks(known.group):
            found[id(known.group)] = known.group or make_group(None, known.param.device)
    return list(found.values())


def averages_follow(params: Iterable[object]) -> bool:
    """Whether gradients of ``params`` may be averaged later at the end of the backward that ends now."""
    return EndOfBackward.pending() is not None and bool(_known(params))


def _average_in_buckets(grads: Sequence[torch.Tensor], pg: dist.ProcessGroup) -> None:
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
