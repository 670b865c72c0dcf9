"""A rank failed, and says so to the others: those that wait for it in a call, and those that come to their next one.

Ways of saying that in calls are here; while ranks agree through the store, `give_up` and `raise_together` of
`agreement.py` say it. A rank in the middle of a call learns of it in `runtime/peer_watchdog.py`, or, in an eager
collective, in `peer_waits.py`. How a failure is written down, and where ranks look for one, is in `failing.py`; the
headers that carry it are those of `call_handshake.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from ..errors import ZeroError
from ..ir import ops
from . import call_handshake, peer_connections
from .call_handshake import (
    FAILED,
    SAID_BYTES,
    TELLING,
    UNMADE,
    Exchange,
    exchange,
    lay_text,
    naming_peer,
    owed,
    plain_torch,
)
from .failing import (
    BEGIN,
    COMPILE,
    COMPLETE,
    SOON_S,
    Failure,
    ended,
    is_known,
    mark_known,
    notice,
    passed,
    warn_others,
)
from .group import Group, by_ranks, store_of


def failure_of(group: Group, error: BaseException, what: str, titles: Sequence[str] = ()) -> Failure:
    """That of this rank, which could not do ``what``; no rank can call the models of these ``titles`` any more."""
    everyone = group.everyone
    return Failure.of(error, everyone.name_of(everyone.rank), what, titles)


@contextlib.contextmanager
def together(group: Callable[[], Group | None], what: str, works: bool = True) -> Iterator[None]:
    """A call that all ranks make together: an error on this one is told to the others, unless they know.

    Args:
        group: who they are, when there is an error; None where there is nobody, or that is not known.
        what: the call, for messages.
        works: as in :func:`zero_compiler.ranks.peer_connections.working`.
    """
    with peer_connections.working(what, works):
        try:
            yield
        except GeneratorExit:
            raise
        except BaseException as error:
            tell(group, error, f"complete its {what}")
            raise


def tell(group: Callable[[], Group | None], error: BaseException, what: str) -> None:
    """Have the next call of every peer end with ``error``, unless they know of it."""
    if is_known(error):
        return
    with contextlib.suppress(Exception), plain_torch():  # the error of this rank says more
        others = group()
        if others is not None and not others.one_rank and not others.destroyed:
            fail_later(others, error, what)
            mark_known(error)


def fail(group: Group, failure: Failure, new: bool) -> bool:
    """End a call that this rank cannot make, together with its peers: those that can make it are in :func:`meet`.

    Args:
        new: this rank holds no Program of the model yet.

    Returns whether no rank can make it, and it is ``new`` to all.

    Raises:
        TransferError: a peer did not answer.
    """
    if group.one_rank:
        return new
    group = group.everyone
    with naming_peer(group, None, TELLING):
        warn_others(group, failure)
    said = lay_text(group, failure.text(), SAID_BYTES)
    headers = exchange(group, FAILED + bytes([new]) + said, UNMADE)
    ended(group)
    return all(h.startswith(FAILED + bytes([True])) for h in headers)


def fail_later(group: Group, error: BaseException, what: str, titles: Sequence[str] = ()) -> None:
    """Have the next call of every peer end with the ``error`` of this rank, which could not do ``what``.

    For what fails where no peer waits for this rank, which therefore does not wait either: its own next call comes
    behind theirs.

    While peers have not met one failure, there is room for no other.
    """
    group = group.everyone
    if group.one_rank or group.destroyed or (group.pg in owed and not _met(group)):
        return
    failure, told_at = failure_of(group, error, what, titles), notice(group)
    # Where a peer is gone, or the store, the error of this rank says more.
    with contextlib.suppress(RuntimeError):
        warn_others(group, failure)
        said = lay_text(group, failure.text(), SAID_BYTES)
        owed[group.pg] = Exchange(group, FAILED + bytes([False]) + said, UNMADE), told_at
    passed(group)


def _met(group: Group) -> bool:
    """Whether a peer was told by its call what this rank owed, which is done with then. What has happened to all is
    told to nobody."""
    posted, told_at = owed[group.pg]
    try:
        if store_of(group, SOON_S).check([told_at]):
            return False
        headers = posted.wait(UNMADE)  # whoever has deleted it had the headers of all
    except RuntimeError:  # a peer is gone, or the store
        return False
    del owed[group.pg]
    return not all(h.startswith(FAILED) for h in headers)


def broke_off(group: Group, error: BaseException, titles: Sequence[str]) -> None:
    """The same for a call that an ``error`` has ended on this rank among its collectives. Peers that are in it look for
    that (`runtime/peer_watchdog.py`, `peer_waits.py`), and none can call the models of these ``titles`` again.

    A group without gloo would take a header for one of those collectives: there peers find why, and no more.
    """
    group = group.everyone
    mark_known(error)
    if call_handshake.has_gloo(group):
        fail_later(group, error, COMPLETE, titles)
    else:
        with contextlib.suppress(RuntimeError):  # the store is gone
            warn_others(group, failure_of(group, error, COMPLETE, titles))


def cannot_begin(group: Group, error: BaseException) -> None:
    """The same for a call of which this rank has the Programs, and that an ``error`` ends before :func:`meet`."""
    mark_known(error)
    with contextlib.suppress(ZeroError):  # a peer is gone: the error that this rank has says more
        fail(group, failure_of(group, error, BEGIN), new=False)


class Broken:
    """A frame that did not compile on this rank. Its other ranks may wait for what this rank was to decide, or in the
    call itself, which they can make: they are warned at once, and meet in :meth:`end_call`.

    Args:
        owners: keys of the sharded models of the frame.
        error: why it did not compile.
    """

    def __init__(self, owners: Collection[str], error: BaseException) -> None:
        self._owners = frozenset(owners)
        self._failure: Failure | None = None
        sharded_models = self._sharded_models()
        if sharded_models:
            group = sharded_models[0].group
            self._failure = failure_of(group, error, COMPILE)
            with contextlib.suppress(RuntimeError, ValueError):  # no store: nobody waits at it
                warn_others(group, self._failure)

    def _sharded_models(self) -> list[Any]:
        return by_ranks(p for p in ops.owners() if p.key in self._owners)

    def end_call(self) -> None:
        """Let the call end on all ranks, as it does here. Where no rank could compile and none has before, what they
        have decided on the way is forgotten: it was for sizes or a budget that did not do."""
        sharded_models = self._sharded_models()
        if self._failure is None or not sharded_models or sharded_models[0].protocol.broken is not None:
            return
        new = not any(sharded_model.frames for sharded_model in sharded_models)
        try:
            forgets = fail(sharded_models[0].group, self._failure, new)
        except ZeroError:
            return  # a peer is gone: the reason that this rank has says more
        if forgets:
            for sharded_model in sharded_models:
                sharded_model.agreed.forget()
                if sharded_model.runtime is not None:
                    sharded_model.runtime.kept_offsets.clear()
