"""Waits for other ranks that end when one of them is gone, late, or in a deadlock, with an error that names it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as dist

from ..errors import RankMismatchError, TransferError, ZeroError
from .failing import COMPLETE, noticed
from .group import Group, store_of
from .peer_connections import LONGEST_PAUSE_S, Peers, known, of, waiting
from .store_clients import clients_of
from .store_requests import Unanswered

log = logging.getLogger("zero_compiler")

LOOK_S = 0.5  # how often a rank that waits in a collective looks whether a peer has failed

_SOON_S = 1.0  # within which a connection is closed that ends with another one of the same process
_ASK_S = 0.5  # after which a rank that waits for one that has not come asks the kernel for it
_CROSSED_S = 3.0  # what was heard of the other rank for so long is no longer on its way here
_LONG_S = 30.0  # after which a rank that waits says so


class Wait:
    """A wait for one rank of a group, which ends when that is gone.

    It ends after the timeout, too, in which time the rank neither came nor was at work.
    """

    def __init__(self, group: Group, rank: int, what: str, timeout_s: float) -> None:
        self._group, self._rank, self._timeout_s = group, rank, timeout_s
        self._what = what
        now = time.monotonic()
        self._end, self._says = now + timeout_s, now + _LONG_S
        self._pause_s = _ASK_S
        self._asks = now + self._pause_s
        self._crossed: tuple[str, float] | None = None

    def __enter__(self) -> Wait:
        self._around = waiting()
        self._around.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._around.__exit__(None, None, None)

    def gone(self) -> str | None:
        """A sentence if the rank is gone."""
        peers = of(self._group)
        if peers is None:
            return None
        at_work = peers.at_work(self._rank)
        if at_work is not None:
            self._end = max(self._end, at_work + self._timeout_s)
        if time.monotonic() > self._says:
            self._says = float("inf")
            me, other = self._group.name_of(self._group.rank), self._group.name_of(self._rank)
            heard = peers.last_heard(self._rank) or "; nothing has been heard of that rank yet"
            log.warning("%s: %s has waited for %s for %.0f s%s", self._what, me, other, _LONG_S, heard)
        return peers.gone(self._rank) or self._never_came(peers)

    def crossed(self) -> RankMismatchError | None:
        """An error if the rank waits for this one in another call: neither of them would ever go on."""
        peers = known(self._group)
        other = None if peers is None else peers.waits_for_this(self._rank, store_of(self._group))
        now = time.monotonic()
        if other is None or self._crossed is None or self._crossed[0] != other:
            self._crossed = None if other is None else (other, now + _CROSSED_S)
            return None
        if now < self._crossed[1]:
            return None
        me, it = self._group.name_of(self._group.rank), self._group.name_of(self._rank)
        error = RankMismatchError(
            f"ranks are in different calls, and would wait for each other: {me} for {it} in the {self._what}, {it} for "
            f"{me} in the {other}; let all ranks make the same calls in the same order"
        )
        error.passing = True  # a graph that was about to be compiled may be, when all ranks come
        return error

    def _never_came(self, peers: Peers) -> str | None:
        """A sentence if one of the ranks is gone that this one is not connected with yet; asked less and less often."""
        now = time.monotonic()
        if now < self._asks or peers.knows(self._rank):
            return None
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._asks = now + self._pause_s
        return never_came(self._group, peers)

    def left_s(self) -> float:
        """Seconds that are left."""
        return self._end - time.monotonic()


def never_came(group: Group, peers: Peers) -> str | None:
    """A sentence if one of the ranks is gone of which nothing was heard yet. It takes some milliseconds."""
    missing, job = peers.missing(), dist.get_world_size()
    if missing is None or group.world < job:  # others of the job may have ended, and rightly so
        return None
    there = clients_of(store_of(group).store)
    if there is None or there >= job:
        return None
    return f"{missing} is gone: its process has ended before its first call of zero_compiler"


def no_answer(group: Group, rank: int | None, what: str, error: BaseException | None) -> TransferError:
    """The error of a rank that got no answer of another one (None: of its peers) in ``what``.

    Args:
        error: of the backend, which does not say whom it waited for.
    """
    who = "its peers" if rank is None else group.name_of(rank)
    reason = "" if error is None else next(iter(str(error).strip().splitlines()), type(error).__name__)
    return explained(group, what, error, rank) or TransferError(
        f"{what}: {group.name_of(group.rank)} got no answer from {who}: {reason}"
    )


def no_store(group: Group, what: str, error: BaseException) -> TransferError:
    """The error of a rank that the store of the process group does not answer, in ``what``."""
    if isinstance(error, Unanswered):
        peers = known(group.everyone)
        heard = "" if peers is None else peers.last_heard()
        return TransferError(
            f"{what}: the store of the process group has not answered {group.name_of(group.rank)} for "
            f"{error.seconds:.0f} s, the timeout of the process group"
            + (heard or "; the process that serves it, rank 0 of the job or its launcher, may be stopped")
        )
    found = explained(group, what, None, within_s=_SOON_S)
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return found or TransferError(
        f"{what}: the store of the process group does not answer {group.name_of(group.rank)} ({reason}): the process "
        "that serves it is gone, which is rank 0 of the job, or its launcher"
    )


def explained(
    group: Group, what: str, error: BaseException | None, rank: int | None = None, within_s: float = 0.0
) -> TransferError | None:
    """The same where the reason is known, and the ``error`` does not say it.

    Args:
        within_s: seconds in which it may still become known, where there is no error.
    """
    group = group.everyone
    if isinstance(error, Unanswered):
        return no_store(group, what, error)
    peers = known(group)
    me = group.name_of(group.rank)
    reason = "" if error is None else str(error)
    if " is gone: " in reason:
        return _went_before(peers, reason)
    gone = None if peers is None else peers.any_gone(rank, within_s if error is None else _SOON_S)
    if gone is not None:
        return TransferError(f"{what}: {me} waited for an answer in vain: {gone}")
    if "imed out" in reason:
        return late(group, rank, what, None)
    who, one = ("its peers", ", of which one") if rank is None else (group.name_of(rank), ", which")
    if any(closed in reason for closed in ("closed by peer", "reset by peer", "Broken pipe")):
        return TransferError(
            f"{what}: {me} got no answer from {who}{one} is gone: its process has ended, or has destroyed the process "
            "group, before it came to this"
        )
    return None


def _went_before(peers: Peers | None, reason: str) -> TransferError | None:
    """Where a ``reason`` names a rank that is gone, and another one went before, of which that may have come."""
    first = None if peers is None else peers.any_gone()
    if first is None or first.partition(": ")[0] in reason:
        return None
    return TransferError(f"{reason}; before that {first}")


def late(group: Group, rank: int | None, what: str, timeout_s: float | None) -> TransferError:
    """The error of a rank for which another one (None: some peer) did not come in time; gloo has a time of its own."""
    peers = known(group)
    who = "its peers" if rank is None else group.name_of(rank)
    time_ = "the timeout" if timeout_s is None else f"{timeout_s:.0f} s, the timeout"
    heard = "" if peers is None else peers.last_heard(rank)
    return TransferError(
        f"{what}: {group.name_of(group.rank)} got no answer from {who} within {time_} of the process group{heard}"
    )


@contextlib.contextmanager
def answered(group: Group, what: str) -> Iterator[None]:
    """Around collectives of torch: where a peer is gone, the error says which, and what it was doing."""
    try:
        yield
    except ZeroError:
        raise
    except RuntimeError as error:
        found = explained(group, what, error)
        if found is None:
            raise
        raise found from error


def broken_off(group: Group) -> ZeroError | None:
    """The error of a peer that cannot complete its part of a call. One that has failed behind it (in a step of its
    optimizer, say) still has sent all that is waited for."""
    told = noticed(group)
    return told if told is not None and getattr(told.failure, "what", None) == COMPLETE else None


def wait(work: dist.Work, group: Group, told: Callable[[Group], ZeroError | None] = broken_off) -> None:
    """Wait for a collective of ``group``, which another thread cannot end.

    Args:
        told: looks for the error of a peer with which the collective has ended.

    Raises:
        RuntimeError: it failed.
        ZeroError: that of the peer.
    """
    if group.device.type != "cpu":
        work.wait()
        return
    while True:
        try:
            work.wait(timedelta(seconds=LOOK_S))
            return
        except RuntimeError:  # gloo's goes on after this time, until the group's timeout
            if work.is_completed():
                work.wait()  # it may have ended well since: then the error was that of this time
                return
            error = told(group)
            if error is not None:
                raise error from None
