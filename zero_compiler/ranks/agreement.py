"""What ranks agree on through the process group's store, before any collective that could hang.

The order of collectives is compared in the headers of calls instead: `call_handshake.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterable, Sequence

import torch.distributed as dist

from ..errors import RankMismatchError, TransferError, ZeroError
from .failing import SOON_S, Failure, mark_known, notice
from .group import Group, group_timeout_s, in_store, store_of
from .peer_connections import awaiting_text, of
from .peer_waits import Wait, late, no_store

# A rank that waits for another one's text looks for it, and whether that rank has failed or is gone, after the first of
# these, then after twice as long each time, up to the second. The store's own wait would not notice that it is gone.
_FIRST_LOOK_S, _LOOK_S = 0.001, 0.2
_WELL = "no problem"


def digest(text: str) -> bytes:
    """32 bytes that stand for ``text`` in the agreement between ranks."""
    return hashlib.sha256(text.encode()).digest()


def post_text(group: Group, key: str, text: str) -> None:
    """Lay ``text`` where the other ranks of the group can read it."""
    try:
        of(group)  # who may wait for another rank's, or for whom others may, is connected with them
        store_of(group).set(in_store(group, f"{key}/{group.rank}"), text)
    except ZeroError:
        raise
    except RuntimeError as error:
        raise no_store(group, "agreement of ranks", error) from error


def read_texts(group: Group, key: str, what: str, ranks: Iterable[int] | None = None) -> dict[int, str]:
    """Texts that the ranks (default: all) post under ``key``; blocks until all have.

    Args:
        what: the call in which they do, for messages.

    Raises:
        TransferError: a rank is gone, or did not post its text within the timeout of the process group.
        ZeroError: of a rank that could not make its part of a call.
    """
    asked = range(group.world) if ranks is None else ranks
    return {rank: _await_text(group, rank, key, what, [notice(group)]) for rank in asked}


def first_difference(a_text: str, b_text: str, a_name: str, b_name: str) -> str:
    """The first line in which two descriptions differ, and who said what."""
    a, b = a_text.splitlines(), b_text.splitlines()
    for left, right in zip(a, b, strict=False):
        if left != right:
            return f"{left.strip()!r} on {a_name}, {right.strip()!r} on {b_name}"
    if len(a) == len(b):
        return "nothing in their text"
    longer, who = (a, a_name) if len(a) > len(b) else (b, b_name)
    return f"{longer[min(len(a), len(b))].strip()!r} only on {who}"


def agree(group: Group, key: str, what: str, text: str, failed: str | None = None) -> None:
    """Every rank of the mesh must say the same ``text`` under ``key``; blocks until all have spoken.

    Args:
        failed: the key under which a rank that cannot speak any more says why, see :func:`give_up`.

    Raises:
        RankMismatchError: on every rank, naming the first difference.
        TransferError: a rank is gone, or did not speak within the process group's timeout.
        ZeroError: of a rank that gave up.
    """
    group = group.everyone
    if group.one_rank:
        return
    texts = show(group, key, text, what, failed=failed)
    # The same two ranks on every rank, so that all say the same.
    for rank in range(1, group.world):
        if texts[rank] != texts[0]:
            found = first_difference(texts[0], texts[rank], group.name_of(0), group.name_of(rank))
            raise mark_known(RankMismatchError(f"ranks disagree about {what}: first difference: {found}"))


def raise_together(group: Group, key: str, what: str, problem: ZeroError | None) -> None:
    """Go on where no rank of the mesh has a ``problem``; else all raise: a rank its own, others that of the first.

    Args:
        what: what a rank with a problem could not do, for the others.

    Raises:
        TransferError: a rank is gone, or did not speak within the process group's timeout.
    """
    group, texts = group.everyone, []
    try:
        if not group.one_rank:
            mine = None if problem is None else Failure.of(problem, group.name_of(group.rank), what)
            asked = f"agreement whether each rank could {what}"
            texts = show(group, key, _WELL if mine is None else mine.text(), asked)
    finally:
        if problem is not None:
            raise mark_known(problem)
    for text in texts:
        if text != _WELL:
            raise mark_known(Failure.read(text).error())


def give_up(group: Group, key: str, what: str, error: BaseException) -> None:
    """Tell ranks that wait for this one, and look under ``key``, that it could not do ``what``, and why."""
    group = group.everyone
    if not group.one_rank:
        failure = Failure.of(error, group.name_of(group.rank), what)
        with contextlib.suppress(RuntimeError):  # the store is gone, and so are they
            store_of(group, SOON_S).set(in_store(group, key), failure.text())


def decide(group: Group, key: str, text: str, what: str) -> str:
    """Rank 0's ``text``, for all ranks: a choice that may depend on local sizes is made once.

    Args:
        what: the choice, for messages.

    Raises:
        TransferError: rank 0 is gone, or did not speak within the process group's timeout, in which it did not work on
            that either.
        ZeroError: of a rank that could not compile its part of the call.
    """
    group = group.everyone
    if group.one_rank:
        return text
    if group.rank == 0:
        post_text(group, key, text)
        return text
    return _await_text(group, 0, key, what, [notice(group)])


def show(
    group: Group, key: str, text: str, what: str, calls: Group | None = None, failed: str | None = None
) -> list[str]:
    """Texts of all ranks of the group under ``key``, in order, given this rank's; blocks until all have spoken.

    Args:
        calls: all ranks of the call in which this is asked, where those are more than ``group``.
        failed: as in :func:`agree`.

    Raises:
        TransferError: a rank is gone, or did not speak within the process group's timeout.
        ZeroError: of a rank that could not compile its part of the call.
    """
    post_text(group, key, text)
    notices = [notice(calls or group), *([] if failed is None else [in_store(group, failed)])]
    return [_await_text(group, rank, key, what, notices) for rank in range(group.world)]


def _await_text(group: Group, rank: int, key: str, what: str, notices: Sequence[str]) -> str:
    """What ``rank`` has posted under ``key``, or will.

    Args:
        what: the call in which this rank waits for it, for messages.
        notices: where a rank would say that it has failed, whose text may not come then.

    Raises:
        TransferError: the rank is gone, or did not post it in time.
        ZeroError: that of a rank that has failed.
    """
    store, name, pause = store_of(group), in_store(group, f"{key}/{rank}"), _FIRST_LOOK_S
    timeout_s = group_timeout_s(group)
    try:
        if store.check([name]):
            return str(store.get(name).decode())
        everywhere = dist.get_global_rank(group.pg, rank)
        with awaiting_text(name, everywhere, what), Wait(group, rank, what, timeout_s) as wait:
            while True:
                # What a rank has said before it failed, or went, holds: so that is looked for last.
                gone, left_s = wait.gone(), wait.left_s()
                text = next((store.get(failed).decode() for failed in notices if store.check([failed])), None)
                if store.check([name]):
                    return str(store.get(name).decode())
                if text is not None:
                    raise Failure.read(text).error()
                crossed = wait.crossed()
                if crossed is not None:
                    raise crossed
                if gone is not None or left_s <= 0:
                    break
                time.sleep(min(pause, left_s))
                pause = min(2 * pause, _LOOK_S)
    except ZeroError:
        raise
    except (RuntimeError, dist.DistStoreError) as error:  # the store is gone, with the process that serves it
        raise no_store(group, what, error) from error
    if gone is not None:
        raise TransferError(f"{what}: {group.name_of(group.rank)} waited for an answer in vain: {gone}")
    raise late(group, rank, what, timeout_s)
