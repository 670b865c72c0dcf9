"""What ranks agree on through the process group's store, before any collective that could hang."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch.distributed as dist

from .errors import RankMismatchError, ZeroError
from .failing import Failure, notice
from .group import Group, group_timeout_s, in_store, store_of

# A rank that waits for another one's text looks for it, and whether that rank has failed, after the first of these,
# then after twice as long each time, up to the second. The store's own wait with a timeout would print warnings.
_FIRST_LOOK_S, _LOOK_S = 0.001, 0.2
_WELL = "no problem"


def digest(text: str) -> bytes:
    """32 bytes that stand for ``text`` in the agreement between ranks."""
    return hashlib.sha256(text.encode()).digest()


def post_text(group: Group, key: str, text: str) -> None:
    """Lay ``text`` where the other ranks of the group can read it."""
    store_of(group).set(in_store(group, f"{key}/{group.rank}"), text)


def read_texts(
    group: Group, key: str, timeout_s: float, ranks: Iterable[int] | None = None
) -> dict[int, str]:
    """Texts that the ranks (default: all) posted under ``key``; a rank that posted none in time is left out."""
    store = store_of(group)
    out: dict[int, str] = {}
    for rank in range(group.world) if ranks is None else ranks:
        name = in_store(group, f"{key}/{rank}")
        try:
            store.wait([name], timedelta(seconds=timeout_s))
            out[rank] = store.get(name).decode()
        except (RuntimeError, dist.DistStoreError):
            continue
    return out


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
        RankMismatchError: on every rank, naming the first difference; or a rank did not speak within the process
            group's timeout.
        ZeroError: of a rank that gave up.
    """
    group = group.everyone
    if group.alone:
        return
    texts = show(group, key, text, what, failed=failed)
    # The same two ranks on every rank, so that all say the same.
    for rank in range(1, group.world):
        if texts[rank] != texts[0]:
            found = first_difference(texts[0], texts[rank], group.name_of(0), group.name_of(rank))
            raise RankMismatchError(f"ranks disagree about {what}: first difference: {found}")


def raise_together(group: Group, key: str, what: str, problem: ZeroError | None) -> None:
    """Go on where no rank of the mesh has a ``problem``; else all raise: a rank its own, others that of the first.

    Args:
        what: what a rank with a problem could not do, for the others.

    Raises:
        RankMismatchError: a rank did not speak within the process group's timeout.
    """
    group, texts = group.everyone, []
    try:
        if not group.alone:
            mine = None if problem is None else Failure.of(problem, group.name_of(group.rank), what)
            texts = show(group, key, _WELL if mine is None else mine.text(), what)
    finally:
        if problem is not None:
            raise problem
    for text in texts:
        if text != _WELL:
            raise Failure.read(text).error()


def give_up(group: Group, key: str, what: str, error: BaseException) -> None:
    """Tell ranks that wait for this one, and look under ``key``, that it could not do ``what``, and why."""
    group = group.everyone
    if not group.alone:
        failure = Failure.of(error, group.name_of(group.rank), what)
        with contextlib.suppress(RuntimeError):  # the store is gone, and so are they
            store_of(group).set(in_store(group, key), failure.text())


def decide(group: Group, key: str, text: str) -> str:
    """Rank 0's ``text``, for all ranks: a choice that may depend on local sizes is made once.

    Raises:
        RankMismatchError: rank 0 did not speak within the process group's timeout.
        ZeroError: of a rank that could not compile its part of the call.
    """
    group = group.everyone
    if group.alone:
        return text
    if group.rank == 0:
        post_text(group, key, text)
        return text
    timeout_s = group_timeout_s(group)
    said = _await_text(group, in_store(group, f"{key}/0"), timeout_s, [notice(group)])
    if said is None:
        raise RankMismatchError(f"{key}: rank 0 did not decide within {timeout_s:.0f} s")
    return said


def show(
    group: Group, key: str, text: str, what: str, calls: Group | None = None, failed: str | None = None
) -> list[str]:
    """Texts of all ranks of the group under ``key``, in order, given this rank's; blocks until all have spoken.

    Args:
        calls: all ranks of the call in which this is asked, where those are more than ``group``.
        failed: as in :func:`agree`.

    Raises:
        RankMismatchError: a rank did not speak within the process group's timeout.
        ZeroError: of a rank that could not compile its part of the call.
    """
    post_text(group, key, text)
    timeout_s = group_timeout_s(group)
    texts = []
    for rank in range(group.world):
        notices = [notice(calls or group), *([] if failed is None else [in_store(group, failed)])]
        said = _await_text(group, in_store(group, f"{key}/{rank}"), timeout_s, notices)
        if said is None:
            raise RankMismatchError(f"{what}: {group.name_of(rank)} did not arrive within {timeout_s:.0f} s")
        texts.append(said)
    return texts


def _await_text(group: Group, name: str, timeout_s: float, notices: Sequence[str]) -> str | None:
    """What is posted under ``name``; None where nothing is in time.

    Args:
        notices: where a rank would say that it has failed, whose text may not come then.

    Raises:
        ZeroError: that of such a rank.
    """
    store, end, pause = store_of(group), time.monotonic() + timeout_s, _FIRST_LOOK_S
    while True:
        try:
            if store.check([name]):
                return str(store.get(name).decode())
            text = next((store.get(failed).decode() for failed in notices if store.check([failed])), None)
            if text is not None and store.check([name]):
                continue  # both came since: what was said before the failure holds
        except (RuntimeError, dist.DistStoreError):
            return None  # the store is gone
        if text is not None:
            raise Failure.read(text).error()
        left = end - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LOOK_S)
