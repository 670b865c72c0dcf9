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

import functools
import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import GradientError, RankMismatchError, TransferError, ZeroError
from ..ranks.call_handshake import meet, short_digest
from ..ranks.failing import mark_known
from ..ranks.failure_broadcast import broke_off, cannot_begin, fail_later
from ..ranks.group import Group
from ..ranks.mesh import make_group
from ..ranks.parameter_matching import Described, find_like, match, names_agree, not_found, value_of
from ..ranks.peer_waits import answered, wait
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
        name: the longest one by which it was found: blocks that are compiled apart have more than their own.
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
        self.name = max(self.name, name, key=len)
        if group is not None and (self.group is None or group.world > self.group.world):
            if _pg_of(group) is not _pg_of(self.group):
                self.among = None
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
        """Whether there is something to be averaged. A gradient that is gone waits for nothing from here on."""
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
# Those whose gradient is of a backward under zero.no_sync.
_held_back: weakref.WeakSet[PlainParameter] = weakref.WeakSet()


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

    def found(self) -> list[PlainParameter | None]:
        """They, on this rank; None for one that is gone here, or averaged with others by now."""
        return [slot.known(self) for slot in self.slots]

    def add(self, name: str, known: PlainParameter) -> None:
        known.among = self
        self.slots.append(_AveragedParameter(name, known))


def _grad_dtype(param: torch.Tensor) -> torch.dtype:
    return getattr(param, "grad_dtype", None) or param.dtype


class _AveragedParameter:
    """One of :class:`AveragedParameters`; the parameter may be gone on this rank, and not on others."""

    def __init__(self, name: str, known: PlainParameter) -> None:
        self.name = name
        self._ref = weakref.ref(known)
        self._look(known)

    def _look(self, known: PlainParameter) -> None:
        p = known.param
        self.shape, self.dtype, self.device = tuple(p.shape), _grad_dtype(p), p.device

    def known(self, among: AveragedParameters) -> PlainParameter | None:
        """See :meth:`AveragedParameters.found`."""
        known = self._ref()
        if known is None or known.among is not among:
            return None
        self._look(known)
        return known


class EndOfBackward:
    """What is averaged when one backward ends."""

    # By the backward: one may run within another. An end lives as long as its backward, also one that fails.
    _of_tasks: weakref.WeakValueDictionary[int, EndOfBackward] = weakref.WeakValueDictionary()

    def __init__(self, task: int) -> None:
        self._task = task
        self._arrived: dict[PlainParameter, None] = {}
        self._changed: PlainParameter | None = None  # written to after a backward under zero.no_sync
        torch.autograd.Variable._execution_engine.queue_callback(self._begin)

    @classmethod
    def pending(cls) -> EndOfBackward | None:
        """Of the backward that runs, where it will average something."""
        return cls._of_tasks.get(torch._C._current_graph_task_id())

    @classmethod
    def that_runs(cls) -> EndOfBackward:
        if (found := cls.pending()) is None:
            task = torch._C._current_graph_task_id()
            found = cls._of_tasks[task] = EndOfBackward(task)
        return found

    def arriving(self, known: PlainParameter) -> None:
        """A gradient of a parameter goes to ``.grad``."""
        self._arrived[known] = None
        if known.written():
            self._changed = known
        known.waiting = True

    @torch._dynamo.disable(reason="a backward within a compiled function ends with it")
    def _begin(self) -> None:
        """Come behind all else that is to be done at this end, in whichever order a rank has come to it."""
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    @torch._dynamo.disable(reason="a backward within a compiled function ends with it")
    @torch.no_grad()
    def _finish(self) -> None:
        EndOfBackward._of_tasks.pop(self._task, None)
        groups: dict[Any, list[PlainParameter]] = {}
        for known in self._arrived:
            groups.setdefault(_pg_of(known.group), []).append(known)
        # In one order on all ranks, which may be in several of them.
        left = sorted(groups.values(), key=lambda arrived: _ranks_of(arrived[0].group))
        try:
            while left:
                _GradientAverage(left.pop(0)).run(self._changed)
        except BaseException as error:
            for arrived in left:
                if several_ranks(arrived[0].group):
                    fail_later(_group_of(arrived[0].group), error, _DOING)
            raise


def _pg_of(group: Group | None) -> Any:
    """None where it has been destroyed."""
    return dist.group.WORLD if group is None else None if group.destroyed else group.pg


def _group_of(group: Group | None) -> Group:
    return group or make_group(None, None)


def _ranks_of(group: Group | None) -> tuple[list[int], str]:
    pg = _pg_of(group)
    return ([], "") if pg is None else (dist.get_process_group_ranks(pg), pg.group_name)


class _GradientAverage:
    """Of the gradients that a backward brought, and that wait since others, over the ranks of one group."""

    def __init__(self, arrived: Sequence[PlainParameter]) -> None:
        self._arrived = dict.fromkeys(arrived)
        self._group = arrived[0].group

    def run(self, changed: PlainParameter | None) -> None:
        sync = any(known.sync for known in self._arrived)
        if sync and not several_ranks(self._group):  # there were when the gradients came
            raise TransferError(
                "the process group over which gradients of parameters that are not sharded were averaged has been "
                "destroyed; call torch.distributed.destroy_process_group after the last backward"
            )
        among = AveragedParameters.of(self._pg) if sync else None
        found = [] if among is None else among.found()  # what is here now stays until the average has ended
        here = dict.fromkeys([*self._arrived, *(known for known in found if known is not None)])
        if among is not None:
            here |= dict.fromkeys(self._held_back())
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
            self._average(among, found, [k for k in uses if k.among is not among])

    def _held_back(self) -> list[PlainParameter]:
        """Those of these ranks whose gradients wait since backwards under zero.no_sync, in one order."""
        return sorted(
            (k for k in _held_back if k.sync and k.left is not None and _pg_of(k.group) is self._pg),
            key=lambda known: known.number,
        )

    def _average(
        self,
        among: AveragedParameters,
        found: Sequence[PlainParameter | None],
        new: Sequence[PlainParameter],
    ) -> None:
        """Average what waits, of the parameters ``among`` others, as they were ``found`` here, and of ``new`` ones."""
        some_have_new = self._meet(among, found, bool(new))
        try:
            if some_have_new:
                found = [*found, *self._enter(among, new)]
            self._exchange(among, found)
        except ZeroError:  # of a peer, which others know too
            raise
        except BaseException as error:
            broke_off(self._everyone, error, [])
            raise

    def _exchange(self, among: AveragedParameters, found: Sequence[PlainParameter | None]) -> None:
        flags = self._largest([_GONE if k is None else _USED if k.uses() else _HERE for k in found])
        slots = list(zip(among.slots, found, flags, strict=True))
        among.slots = [slot for slot, _, flag in slots if flag != _GONE]
        used = [(slot, known) for slot, known, flag in slots if flag == _USED]
        todo = []
        for slot, known in used:
            if known is None:  # this rank has let go of it
                todo.append(torch.zeros(slot.shape, dtype=slot.dtype, device=slot.device))
                continue
            if known.param.grad is None:
                known.param.grad = torch.zeros_like(known.param, dtype=_grad_dtype(known.param))
            todo.append(known.param.grad)
        with answered(self._everyone, _DOING):
            _average_in_buckets(todo, self._everyone)
        for _, known in used:
            if known is not None:
                known.waiting, known.left = False, None
                _held_back.discard(known)
        among.steps = 0

    def _largest(self, said: Sequence[int]) -> list[int]:
        """Of what each rank says, a number for each parameter, the largest."""
        flags = torch.tensor(said, dtype=torch.uint8, device=self._everyone.device)
        with answered(self._everyone, _DOING):
            wait(dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._pg, async_op=True), self._everyone)
        largest: list[int] = flags.tolist()
        return largest

    def _enter(self, among: AveragedParameters, new: Sequence[PlainParameter]) -> list[PlainParameter]:
        """Agree with the other ranks on parameters that come into an average for the first time on one of them; they,
        on this rank.

        Raises:
            RankMismatchError: on every rank, naming the first parameter that differs, or is not found.
        """
        lists: list[Any] = [None] * self._everyone.world
        with answered(self._everyone, _DOING):
            dist.all_gather_object(lists, _described(new, self._never_averaged(among)), group=self._pg)
        matched = match(lists)
        here = self._everyone.rank
        found: dict[int, PlainParameter] = {i: new[m.at[here]] for i, m in enumerate(matched) if here in m.at}
        others = [(known.name, known.param) for known in self._never_averaged(among)]
        taken = set(found.values())
        for i, m in enumerate(matched):
            if i not in found:
                known = known_of(find_like(m.described, others))
                if known is not None and known not in taken:
                    found[i] = known
                    taken.add(known)
        flags = self._largest([_HERE if i in found else _MISSING for i in range(len(matched))])
        if _MISSING in flags:
            raise not_found(matched[flags.index(_MISSING)], matched, len(lists))
        for i, m in enumerate(matched):
            among.add(m.described.name, found[i])
        return [found[i] for i in range(len(matched))]

    def _never_averaged(self, among: AveragedParameters) -> list[PlainParameter]:
        """What this rank trains and has not averaged over these ranks, in the order in which it came to know of it."""
        return sorted(
            (
                k
                for k in _averaged
                if k.among is not among
                and k.param.requires_grad
                and not k.param.is_meta
                and _pg_of(k.group) is self._pg
            ),
            key=lambda known: known.number,
        )

    def _refuse(self, error: GradientError, sync: bool) -> NoReturn:
        """Raise ``error``, also on ranks that begin an average."""
        for known in self._arrived:
            known.left = None
        if sync and several_ranks(self._group):
            cannot_begin(self._everyone, error)
        raise error

    @functools.cached_property
    def _everyone(self) -> Group:
        return _group_of(self._group)

    @functools.cached_property
    def _pg(self) -> Any:
        return self._everyone.pg

    def _meet(self, among: AveragedParameters, found: Sequence[PlainParameter | None], new: bool) -> bool:
        """Before the first collective of an average: all ranks are in one, of the same parameters. Whether one of them
        has ``new`` ones.

        Raises:
            RankMismatchError: on every rank, naming the first difference.
            TransferError: a peer did not answer.
        """
        rows = [
            (slot.name, slot.shape, slot.dtype, known is not None and not known.sync)
            for slot, known in zip(among.slots, found, strict=True)
        ]

        def text() -> str:
            held = ", ".join(name for name, _, _, held in rows if held)
            each = [f"parameter {name}: {list(shape)} {dtype}" for name, shape, dtype, _ in rows]
            return "\n".join([_DOING, *each, f"in zero.no_sync: {held}"])

        if among.digest[0] != rows:
            among.digest = rows, short_digest(text())
        mine = bytes([new, among.steps % 256])
        all_more = meet(self._everyone, among.digest[1], text, _DOING, mine)
        steps = [more[1] for more in all_more]
        if len(set(steps)) > 1:
            other = next(r for r, count in enumerate(steps) if count != steps[0])
            name = self._everyone.name_of
            raise mark_known(
                RankMismatchError(
                    f"ranks are in different steps: since their last {_DOING} {name(0)} has stepped its optimizers "
                    f"{steps[0]} times and {name(other)} {steps[other]} times; a backward outside zero.no_sync has "
                    "brought a gradient of such a parameter on some ranks, and none on others: give each rank a loss "
                    "that depends on one"
                )
            )
        return any(more[0] for more in all_more)


def _described(new: Sequence[PlainParameter], never_averaged: Sequence[PlainParameter]) -> list[Described]:
    """``new`` parameters of this rank, for others."""
    by_form: dict[object, list[PlainParameter]] = {}
    for known in never_averaged:
        by_form.setdefault((known.param.shape, known.param.dtype), []).append(known)
    out = []
    for known in new:
        value = value_of(known.param)
        near = by_form.get((known.param.shape, known.param.dtype), [])
        alike = [
            k for k in near if k is known or (names_agree(k.name, known.name) and value_of(k.param) == value)
        ]
        namesakes = [k for k in alike if k.name == known.name]
        shape, dtype = tuple(known.param.shape), str(known.param.dtype)
        places = [(among.index(known), len(among)) for among in (namesakes, alike)]
        out.append(Described(known.name, shape, dtype, value, *places))
    return out


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


def stepped(params: Iterable[object]) -> None:
    """An optimizer steps ``params``."""
    for among in {k.among for k in _known(params) if k.among is not None}:
        among.steps += 1


def averaged_over(params: Iterable[object]) -> list[Group]:
    """Groups of ranks that average gradients of ``params``."""
    found = {}
    for known in _known(params):
        if id(known.group) not in found and several_ranks(known.group):
            found[id(known.group)] = _group_of(known.group)
    return list(found.values())


def averages_follow(params: Iterable[object]) -> bool:
    """Whether gradients of ``params`` may be averaged later at the end of the backward that ends now."""
    return EndOfBackward.pending() is not None and bool(_known(params))


def _average_in_buckets(grads: Sequence[torch.Tensor], group: Group) -> None:
    """Average ``grads`` over the ranks of ``group``, in place, in buckets of one dtype and device. Divided first, as by
    DDP: a sum of halves may be more than a half can be."""
    bucket: list[torch.Tensor] = []

    def flush() -> None:
        if not bucket:
            return
        in_place = len(bucket) == 1 and bucket[0].is_contiguous()
        flat = bucket[0] if in_place else torch.cat([g.reshape(-1) for g in bucket])
        flat.div_(group.world)
        wait(dist.all_reduce(flat, group=group.pg, async_op=True), group)
        at = 0
        for g in () if in_place else bucket:
            g.copy_(flat[at : at + g.numel()].view(g.shape))
            at += g.numel()
        bucket.clear()

    for grad in grads:
        if not grad.numel():  # autograd may have expanded it, and nothing can be written to it then
            continue
        if bucket:
            alike = (bucket[0].dtype, bucket[0].device) == (grad.dtype, grad.device)
            if not alike or sum(g.nbytes for g in bucket) + grad.nbytes > _BUCKET_BYTES:
                flush()
        bucket.append(grad)
    flush()


def several_ranks(group: Group | None) -> bool:
    if group is not None and group.destroyed:
        return False
    pg = None if group is None else group.pg
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(pg) > 1
