"""The average of gradients of replicated parameters over the ranks of one group, in place, as DDP's.

Before it ranks exchange headers (`call_handshake.py`), since one may be in another call. Ranks average parameters in
the order in which they came into an average first (:class:`AveragedParameters`). Which parameter of this rank is which
of another's, their ranks find out then (`matching.py`), from names and values: not from what a rank has compiled,
called or kept before, which may be its own affair.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..errors import GradientError, RankMismatchError, TransferError, ZeroError
from ..ranks.call_handshake import meet, short_digest
from ..ranks.failing import mark_known
from ..ranks.failure_broadcast import broke_off, cannot_begin
from ..ranks.group import Group
from ..ranks.peer_waits import answered, wait
from .matching import Described, Matched, NeverAveraged, find_like, match, names_agree, not_found, value_of
from .parameters import (
    AveragedParameters,
    ReplicatedParameter,
    grad_dtype,
    group_of,
    held_back,
    known_of,
    never_averaged,
    several_ranks,
)

_BUCKET_BYTES = 25 << 20  # as DDP's default
DOING = "average of the gradients of parameters that are not sharded"
# Of a parameter, what a rank says before an average: it is gone here, it is here, it has a gradient, it was not found.
_GONE, _HERE, _USED, _MISSING = range(4)


class GradientAverage:
    """Of the gradients that a backward brought, and that wait since others, over the ranks of one group."""

    def __init__(self, arrived: Sequence[ReplicatedParameter]) -> None:
        self._arrived = dict.fromkeys(arrived)
        self._group = arrived[0].group

    def run(self, changed: ReplicatedParameter | None) -> None:
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
            here |= dict.fromkeys(held_back(self._pg))
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
            known.leave()
        if among is not None:
            self._average(among, found, [k for k in uses if k.among is not among])

    def _average(
        self,
        among: AveragedParameters,
        found: Sequence[ReplicatedParameter | None],
        new: Sequence[ReplicatedParameter],
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

    def _exchange(self, among: AveragedParameters, found: Sequence[ReplicatedParameter | None]) -> None:
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
                known.param.grad = torch.zeros_like(known.param, dtype=grad_dtype(known.param))
            todo.append(known.param.grad)
        with answered(self._everyone, DOING):
            _average_in_buckets(todo, self._everyone)
        for _, known in used:
            if known is not None:
                known.average_done()
        among.steps = 0

    def _largest(self, said: Sequence[int]) -> list[int]:
        """Of what each rank says, a number for each parameter, the largest."""
        flags = torch.tensor(said, dtype=torch.uint8, device=self._everyone.device)
        with answered(self._everyone, DOING):
            wait(dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._pg, async_op=True), self._everyone)
        largest: list[int] = flags.tolist()
        return largest

    def _enter(
        self, among: AveragedParameters, new: Sequence[ReplicatedParameter]
    ) -> list[ReplicatedParameter]:
        """Agree with the other ranks on parameters that come into an average for the first time on one of them; they,
        on this rank.

        Raises:
            RankMismatchError: on every rank, naming the first parameter that differs, or is not found.
        """
        lists: list[Any] = [None] * self._everyone.world
        near = never_averaged(among, self._pg)
        with answered(self._everyone, DOING):
            dist.all_gather_object(lists, _described(new, near, among), group=self._pg)
        matched = match(lists)
        here = self._everyone.rank
        found: dict[int, ReplicatedParameter] = {
            i: new[m.at[here]] for i, m in enumerate(matched) if here in m.at
        }
        others = [NeverAveraged(k.name, k.param, k.root) for k in near]
        taken = set(found.values())
        roots = _roots_here(lists, matched, found, among)
        for i, m in enumerate(matched):
            if i not in found:
                known = known_of(find_like(m.described, others, roots(m)))
                if known is not None and known not in taken:
                    found[i] = known
                    taken.add(known)
        flags = self._largest([_HERE if i in found else _MISSING for i in range(len(matched))])
        if _MISSING in flags:
            raise not_found(matched[flags.index(_MISSING)], matched, len(lists))
        for i, m in enumerate(matched):
            among.add(m.described.name, found[i])
        return [found[i] for i in range(len(matched))]

    def _refuse(self, error: GradientError, sync: bool) -> NoReturn:
        """Raise ``error``, also on ranks that begin an average."""
        for known in self._arrived:
            known.left = None
        if sync and several_ranks(self._group):
            cannot_begin(self._everyone, error)
        raise error

    @functools.cached_property
    def _everyone(self) -> Group:
        return group_of(self._group)

    @functools.cached_property
    def _pg(self) -> Any:
        return self._everyone.pg

    def _meet(
        self, among: AveragedParameters, found: Sequence[ReplicatedParameter | None], new: bool
    ) -> bool:
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
            return "\n".join([DOING, *each, f"in zero.no_sync: {held}"])

        if among.digest[0] != rows:
            among.digest = rows, short_digest(text())
        mine = bytes([new, among.steps % 256])
        all_more = meet(self._everyone, among.digest[1], text, DOING, mine)
        steps = [more[1] for more in all_more]
        if len(set(steps)) > 1:
            other = next(r for r, count in enumerate(steps) if count != steps[0])
            name = self._everyone.name_of
            raise mark_known(
                RankMismatchError(
                    f"ranks are in different steps: since their last {DOING} {name(0)} has stepped its optimizers "
                    f"{steps[0]} times and {name(other)} {steps[other]} times; a backward outside zero.no_sync has "
                    "brought a gradient of such a parameter on some ranks, and none on others: give each rank a loss "
                    "that depends on one"
                )
            )
        return any(more[0] for more in all_more)


def _described(
    new: Sequence[ReplicatedParameter],
    never_averaged: Sequence[ReplicatedParameter],
    among: AveragedParameters,
) -> list[Described]:
    """``new`` parameters of this rank, for others."""
    companions = among.companions()
    roots: dict[object, int] = {}
    by_form: dict[object, list[ReplicatedParameter]] = {}
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
        out.append(
            Described(
                known.name,
                shape,
                dtype,
                value,
                among_namesakes=(namesakes.index(known), len(namesakes)),
                among_alike=(alike.index(known), len(alike)),
                root=roots.setdefault(known.root or known, len(roots)),
                companion=companions.get(known.root),
            )
        )
    return out


def _roots_here(
    lists: Sequence[Sequence[Described]],
    matched: Sequence[Matched],
    found: Mapping[int, ReplicatedParameter],
    among: AveragedParameters,
) -> Callable[[Matched], set[object]]:
    """In which modules of this rank that stands which stands in one module with a parameter elsewhere."""
    of_modules: dict[tuple[int, int], set[object]] = {}
    for i, known in found.items():
        for rank, at in matched[i].at.items():
            of_modules.setdefault((rank, lists[rank][at].root), set()).add(known.root)
    averaged = among.found()

    def roots(wanted: Matched) -> set[object]:
        out: set[object] = set()
        for rank, at in wanted.at.items():
            described = lists[rank][at]
            out |= of_modules.get((rank, described.root), set())
            known = None if described.companion is None else averaged[described.companion]
            out |= set() if known is None else {known.root}
        return out - {None}

    return roots


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
