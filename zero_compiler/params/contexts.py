"""Context managers of a sharded model: accumulation that sends no gradient, and full weights for a while."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import RankMismatchError, ShardError, ZeroError
from ..ranges import ranged
from ..ranks.failing import is_known, mark_known
from ..ranks.failure_broadcast import cannot_begin, fail, failure_of, together
from ..ranks.group import Group, group_of
from ..ranks.peer_waits import answered, wait
from ..replicated.end_of_backward import replicated_parameter
from ..replicated.parameters import averaged_over, replicated_parameters
from ..sharded import blocking_transfers, parameter_errors
from ..sharded.managed_parameters import Places, local_of
from ..sharded.sharded_model import ShardedModel
from ..tensors.full_weight import FULL
from . import parameter_memory
from .modules import check_accumulates, sharded_models_of


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards begun inside accumulate full gradients locally, in ``reduce_dtype``: no gradient is sent.

    The next backward outside reduces the total. ``model`` may be plain, sharded or compiled, before or after
    its first call. Stepping or clipping while gradients wait is an error.

    Raises:
        ShardError: ``model`` is no module.
        GradientError: a ``zero.optimizer(overlap=True)`` uses its gradients up.
    """
    _check_module("zero.no_sync", model)
    states: list[Any] = [*sharded_models_of(model)]
    plain = map(replicated_parameter, replicated_parameters(model).values())
    states += [known for known in plain if known is not None]
    check_accumulates(states, "zero.no_sync")
    before = [s.sync for s in states]
    for s in states:
        s.sync = False
    try:
        with together(lambda: _ranks_of(model), "zero.no_sync", works=False):
            yield
    finally:
        for s, sync in zip(states, before, strict=True):
            s.sync = sync


def _ranks_of(model: nn.Module) -> Group | None:
    """The ranks that a model, or the part of it that is not sharded, is trained on."""
    return group_of(sharded_models_of(model)) or next(
        iter(averaged_over(replicated_parameters(model).values())), None
    )


def _check_module(what: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ShardError(f"{what} takes an nn.Module, plain or compiled, not {type(model).__name__}")


@contextlib.contextmanager
def gathered(model: nn.Module, write: bool = False) -> Iterator[None]:
    """Full weights for a while: generation, surgery, export. Collective: every rank enters and leaves.

    Inside, every managed parameter of ``model`` is a plain full tensor (``state_dict`` too), without gradient.
    With ``write=True`` every rank must write equal values, which are sharded again at exit, also after an
    exception; names and identities of the parameters stay.

    Raises:
        RankMismatchError: ranks wrote different values; the shards are then left as they were.
        ShardError: a parameter has another shape at exit, or the model is gathered already.
    """
    _check_module("zero.gathered", model)
    sharded_models = sharded_models_of(model)
    for sharded_model in sharded_models:
        if sharded_model.opened:
            raise ShardError("zero.gathered: this model is gathered already; leave the first one before")
    with together(lambda: group_of(sharded_models), "zero.gathered", works=False):
        opened: list[_Opened] = []
        inside, all_there = False, True
        try:
            for sharded_model in sharded_models:
                _open(sharded_model, opened)
            inside = True
            yield
        except BaseException as error:
            # Peers come to the end only of what they have entered.
            all_there = inside and (not write or _all_fail(sharded_models, error))
            raise
        finally:
            # Shards first, so that the model is whole again whatever the check of the written values says.
            written = [(o, _close(o)) for o in opened]
            for sharded_model in sharded_models:
                sharded_model.opened = False
            if write and all_there:
                _write(written)


def _all_fail(sharded_models: list[ShardedModel], error: BaseException) -> bool:
    """Tell the other ranks, which are at the end of a ``zero.gathered(write=True)`` or on their way, that an ``error``
    has ended it here. Whether that has happened on all of them."""
    group = group_of(sharded_models)
    if group is None or group.one_rank or is_known(error):
        return True
    try:
        return fail(group, failure_of(group, error, "complete its zero.gathered"), new=True)
    except ZeroError:
        return False  # a peer is gone: the error of this rank says more
    finally:
        mark_known(error)


@dataclass(frozen=True)
class _Opened:
    """A parameter whose full tensor ``whole`` stands, for a while, wherever its shard ``original`` stood."""

    sharded_model: ShardedModel
    name: str
    original: Any
    whole: nn.Parameter
    places: Places


def _open(sharded_model: ShardedModel, opened: list[_Opened]) -> None:
    # What is gathered is known, and nothing stands in the way of it, before ranks meet.
    try:
        found = _standing(sharded_model)
        for name, (param, _) in found.items():
            if parameter_errors.was_dropped(param):
                parameter_errors.dropped(name)
            parameter_memory.check_closed(param, name)
    except ShardError as error:
        cannot_begin(sharded_model.group, error)
        raise
    details = "\n".join(f"gathers {name}" for name in found)
    sharded_model.protocol.transfer(
        partial(sharded_model.meet, "zero.gathered", details),
        partial(_gather, sharded_model, found, opened),
    )
    sharded_model.opened = True


def _gather(
    sharded_model: ShardedModel, found: dict[str, tuple[DTensor, Places]], opened: list[_Opened]
) -> None:
    for name, (param, at) in found.items():
        info = sharded_model.params[name]
        # What was tied after zero.shard stays tied.
        whole = next((o.whole for o in opened if o.original is param), None)
        if whole is None:
            with ranged(f"zero.gathered: gather of {name}"):
                full = blocking_transfers.gather(
                    sharded_model.group, info.layout, param._local_tensor, info.layout.dtype
                )
            if sharded_model.group.world == 1 or not info.layout.sharded:
                full = full.clone()  # nothing that is written inside reaches the shard by itself
            whole = nn.Parameter(full if info.part is None else info.part.of(full), requires_grad=False)
            setattr(whole, FULL, True)
        opened.append(_Opened(sharded_model, name, param, whole, at))
        for module, attribute in at:
            module._parameters[attribute] = whole


def _standing(sharded_model: ShardedModel) -> dict[str, tuple[DTensor, Places]]:
    """The sharded parameters of a model, by name, and where they stand; but for what was deleted, or set to None.

    Raises:
        ShardError: another one stands in the place of one of them.
    """
    found: dict[str, tuple[DTensor, Places]] = {}
    for name in sharded_model.params:
        at = [(m, a) for m, a in sharded_model.places[name] if m._parameters.get(a) is not None]
        if at:
            found[name] = sharded_model.param(name), at
    return found


def _close(o: _Opened) -> torch.Tensor:
    """Put the shard back; what was written: into the full tensor, or by putting another one in its place."""
    standing = [m._parameters.get(a) for m, a in o.places]
    for module, attribute in o.places:
        module._parameters[attribute] = o.original
    return next((p for p in standing if p is not None and p is not o.whole), o.whole)


def _write(written: list[tuple[_Opened, torch.Tensor]]) -> None:
    for sharded_model in {id(o.sharded_model): o.sharded_model for o, _ in written}.values():
        theirs = [(o, full) for o, full in written if o.sharded_model is sharded_model]
        try:
            for o, full in theirs:
                _check_form(o, full)
        except ShardError as error:
            cannot_begin(sharded_model.group, error)  # the others are about to compare values
            raise
        _check_equal(sharded_model, [(o.name, full) for o, full in theirs])
    with torch.no_grad():
        for o, full in written:
            layout = o.sharded_model.params[o.name].layout
            rank = o.sharded_model.group.rank
            full = local_of(full)
            rows = (
                full[layout.start(rank) : layout.start(rank) + layout.rows(rank)] if layout.sharded else full
            )
            local = o.original._local_tensor
            rows = rows.to(local.device, local.dtype)  # it may rest on the host of the device
            if not torch.equal(local, rows):
                local.copy_(rows)
                torch.autograd.graph.increment_version(o.original)  # a backward of an earlier forward is told


def _check_form(o: _Opened, full: torch.Tensor) -> None:
    shape = o.sharded_model.params[o.name].shape
    if isinstance(o.whole, DTensor) and not isinstance(full, DTensor):
        raise ShardError(
            f"zero.gathered(write=True): a plain tensor stands at exit where parameter {o.name!r} was a DTensor over "
            "the tensor-parallel dimension; write into that one"
        )
    if tuple(full.shape) != shape:
        raise ShardError(
            f"zero.gathered(write=True): parameter {o.name!r} has shape {tuple(full.shape)} at exit, expected {shape}; "
            "a shape can only change before zero.shard"
        )


def _check_equal(sharded_model: ShardedModel, fulls: list[tuple[str, torch.Tensor]]) -> None:
    group = sharded_model.group
    if group.one_rank:
        return
    # Ranks of one place in the tensor-parallel dimension hold the same values; that place comes last.
    sums = torch.zeros(len(fulls) + 1, 16, dtype=torch.uint8)
    sums[-1, 0] = group.tensor.rank if group.tensor is not None else 0
    for i, (_, full) in enumerate(fulls):
        raw = local_of(full).to("cpu").contiguous().view(-1).view(torch.uint8).numpy().data
        sums[i] = torch.frombuffer(
            bytearray(hashlib.blake2b(raw, digest_size=16).digest()), dtype=torch.uint8
        )
    sums = sums.to(group.device)
    everyone = group.everyone
    every = [torch.empty_like(sums) for _ in range(everyone.world)]

    def show() -> None:
        with answered(everyone, "zero.gathered(write=True)"):
            wait(dist.all_gather(every, sums, group=everyone.pg, async_op=True), everyone)

    details = "\n".join(f"writes {name}" for name, _ in fulls)
    sharded_model.protocol.transfer(
        partial(sharded_model.meet, "end of zero.gathered(write=True)", details), show
    )
    for rank, theirs in enumerate(every):
        first = next(r for r, t in enumerate(every) if torch.equal(t[-1], theirs[-1]))
        differ = (theirs != every[first]).any(dim=1).nonzero().flatten().tolist()
        if differ:
            raise RankMismatchError(
                f"zero.gathered(write=True): ranks {first} and {rank} wrote different values to "
                f"{fulls[differ[0]][0]!r}; every rank must write the same; nothing was written"
            )
