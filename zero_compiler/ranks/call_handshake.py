"""Headers of calls, in which ranks find out before the first collective that they are in different calls.

They have one size whatever the call: messages between CPU ranks, and on a group without gloo one all-gather, which fits
that of a peer whatever call the peer is in, since each begins with it.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import RankMismatchError, TransferError, ZeroError
from ..ir import ops
from ..torch_versions import all_gather_flat
from . import peer_connections
from .agreement import agree, digest, first_difference
from .failing import (
    SOON_S,
    Failure,
    begun,
    ended,
    mark_known,
    noticed,
)
from .group import Group, group_timeout_s, in_store, store_of
from .peer_waits import never_came, no_answer
from .store_requests import Unanswered

HEADER_BYTES = 32
_DIGEST_BYTES = 16
SAID_BYTES = HEADER_BYTES - _DIGEST_BYTES - 1  # of the header of a failure: where the reason lies
# Far from the small tags that people choose for their own messages, and not one of the engine's. One tag for all
# headers of a group, whichever model or eager weight they speak for: what arrives next is the peer's next call.
_HEADER_TAG = 0x59000000
_FIRST_LOOK_S, _LOOK_S = 20e-6, 1e-3  # where a rank looks again and again whether its peers have answered
TELLING = "what this rank tells others through the store of the process group"
_ASK_S = 0.5
UNMADE = "a call that this rank could not make"
FAILED = bytes(_DIGEST_BYTES)  # this rank cannot make the call, and the rest names the reason


def short_digest(text: str) -> bytes:
    """The first half of a header: what a rank is about to do."""
    return digest(text)[:_DIGEST_BYTES]


def meet(group: Group, doing: bytes, text: Callable[[], str], what: str, more: bytes = b"") -> list[bytes]:
    """Exchange headers before the first collective of a call; each rank's ``more``.

    A header has the same size whatever a rank is up to, so that ranks in different calls find out here, and
    not in collectives that do not fit together.

    Args:
        doing: :func:`short_digest` of ``text``, the description that ranks must share.
        what: the call, for messages.
        more: at most 16 bytes that may differ.

    Raises:
        RankMismatchError: on every rank, naming the first difference.
        TransferError: a peer did not answer.
        ZeroError: of a peer that could not make its part of the call; see `failure_broadcast.py`.
    """
    group = group.everyone
    peer_connections.in_a_call()
    headers = exchange(group, (doing + more).ljust(HEADER_BYTES, b"\0"), what)
    failed = next((h for h in headers if h.startswith(FAILED)), None)
    if failed is not None:
        ended(group)
        raise mark_known(_told(group, failed))
    if any(h[:_DIGEST_BYTES] != doing for h in headers):
        _explain(group, [h[:_DIGEST_BYTES] for h in headers], text())
    return [h[_DIGEST_BYTES:] for h in headers]


def begin(group: Group, what: str) -> None:
    """Begin a call that all ranks make together, and that is no call of a model: all are in it now.

    From here on ranks notice when one of them goes (`peer_connections.py`); until here those with gloo do.

    Raises:
        RankMismatchError: on every rank, where one is in another call.
        TransferError: a rank is gone, or did not come within the timeout of the process group.
        ZeroError: of a rank that could not begin it.
    """
    group = group.everyone
    if group.one_rank:
        return
    gloo = has_gloo(group)
    if group.rank == 0 or not gloo:
        _connect(group, what)  # the others connect when all are here
    else:
        peer_connections.ready(group)  # where that fails, all learn it before they go on
    if gloo:
        with plain_torch():
            meet(group, short_digest(what), lambda: what, what)
        _connect(group, what)  # the first rank listens by now
    else:
        agree(group, f"begin/{begun(group)}", what, what)


def _connect(group: Group, what: str) -> None:
    with naming_peer(group, None, what):
        peer_connections.of(group)


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Tensors that are made inside are in memory, whatever is to be made on meta or as a fake around it."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def exchange(group: Group, mine: bytes, what: str) -> list[bytes]:
    """The headers of all ranks, in order, given this rank's. One that is still owed goes first."""
    due = owed.pop(group.pg, None)
    if due is not None:
        posted, told_at = due
        posted.wait(UNMADE)
        with contextlib.suppress(RuntimeError):  # all have met, so nobody looks there any more
            store_of(group, SOON_S).delete_key(told_at)
    return Exchange(group, mine, what).wait(what)


class Exchange:
    """A header of this rank on its way to each peer, and one of each peer to this rank.

    An accelerator's backend has no tags that would keep these messages apart from others, and reads no host memory:
    there an all-gather on the device carries them, and reading it waits for what the device was given before.

    Args:
        what: the call, for messages.

    Raises:
        TransferError: a peer is gone.
        ZeroError: one that had said why.
    """

    def __init__(self, group: Group, mine: bytes, what: str) -> None:
        self._group, pg = group, group.pg
        self._number = peer_connections.enter_header(pg)
        self._works: list[tuple[int | None, dist.Work]] = []
        # Kept until they have been read, whoever looks at the result.
        self._sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        self._got = torch.empty(group.world, len(mine), dtype=torch.uint8)
        if not has_gloo(group):
            self._sent, self._got = self._sent.to(group.device), self._got.to(group.device)
            with naming_peer(group, None, what):
                work = all_gather_flat(self._got.view(-1), self._sent, group=pg, async_op=True)
            self._works.append((None, work))
            return
        self._got[group.rank] = self._sent
        others = [r for r in range(group.world) if r != group.rank]
        # Where a peer is gone the others are to have this header all the same: they find out when they wait for it.
        failed: tuple[int, RuntimeError] | None = None
        for post in (self._receive, self._send):
            for peer in others:
                try:
                    self._works.append((peer, post(peer)))
                except RuntimeError as error:
                    failed = failed or (peer, error)
        if failed is not None:
            with naming_peer(group, failed[0], what):
                raise failed[1]

    def _receive(self, peer: int) -> dist.Work:
        return self._group.pg.recv([self._got[peer]], peer, _HEADER_TAG)

    def _send(self, peer: int) -> dist.Work:
        return self._group.pg.send([self._sent], peer, _HEADER_TAG)

    def wait(self, what: str) -> list[bytes]:
        """The headers of all ranks, in order.

        Args:
            what: the call, for messages.

        Raises:
            TransferError: a peer did not answer.
            ZeroError: a peer is gone that had said why.
        """
        for peer, work in self._works:
            with (
                naming_peer(self._group, peer, what),
                peer_connections.awaiting_header(self._group.pg, self._number, what),
            ):
                if peer is None:
                    self._until_done(work, what)
                work.wait()
        with naming_peer(self._group, None, what):
            return [bytes(row) for row in self._got.tolist()]

    def _until_done(self, work: dist.Work, what: str) -> None:
        """The backend would not notice that a peer is gone.

        Raises:
            TransferError: one is.
        """
        known, pause = peer_connections.of(self._group), _FIRST_LOOK_S
        asks = time.monotonic() + _ASK_S
        while known is not None and not work.is_completed():
            if known.any_gone() is not None:
                raise no_answer(self._group, None, what, None)
            if time.monotonic() > asks:
                peer_connections.of(self._group)  # if it could not be connected before
                gone, asks = (
                    never_came(self._group, known),
                    time.monotonic() + peer_connections.LONGEST_PAUSE_S,
                )
                if gone is not None:
                    raise TransferError(
                        f"{what}: {self._group.name_of(self._group.rank)} waited in vain: {gone}"
                    )
            time.sleep(pause)
            pause = min(2 * pause, _LOOK_S)


# What a rank that failed has posted where no peer was waiting for it, and where in the store it has said why.
owed: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[Exchange, str]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def naming_peer(group: Group, peer: int | None, what: str) -> Iterator[None]:
    """Errors of a backend say whom this rank was waiting for; None: all peers."""
    try:
        yield
    except RuntimeError as error:
        # Where the time is over the process that serves the store may be the one that is stopped, and would not answer.
        silent = isinstance(error, Unanswered) or "imed out" in str(error)
        told = None if silent else noticed(group)
        if told is not None:
            raise told from error
        if isinstance(error, ZeroError):
            raise
        raise no_answer(group, peer, what, error) from error


def lay_text(group: Group, text: str, nbytes: int) -> bytes:
    """Lay ``text`` where peers find it (:func:`laid_text`) that are told what is returned, a part of a header."""
    group, name = group.everyone, digest(text)[:nbytes]
    with naming_peer(group, None, TELLING):
        store_of(group).set(in_store(group, f"call/{name.hex()}"), text)
    return name


def laid_text(group: Group, told: bytes) -> str | None:
    """What a peer laid there; None where it is not to be had."""
    group = group.everyone
    store, name = store_of(group), in_store(group, f"call/{told.hex()}")
    try:
        store.wait([name], timedelta(seconds=min(10.0, group_timeout_s(group))))
        return str(store.get(name).decode())
    except (RuntimeError, dist.DistStoreError):
        return None


def has_gloo(group: Group) -> bool:
    try:
        return group.pg._get_backend(torch.device("cpu")).name() == "gloo"
    except RuntimeError:
        return False


def _explain(group: Group, digests: list[bytes], text: str) -> NoReturn:
    with contextlib.suppress(RuntimeError):  # the store is gone: what this rank is in it can say all the same
        store_of(group).set(in_store(group, f"call/{digests[group.rank].hex()}"), text)
    # The same two ranks on every rank, so that all say the same.
    other = next(r for r, d in enumerate(digests) if d != digests[0])
    texts = {r: text if r == group.rank else laid_text(group, digests[r]) for r in (0, other)}
    first, second = texts[0], texts[other]
    if first is not None and second is not None:
        found = first_difference(first, second, group.name_of(0), group.name_of(other))
        raise mark_known(RankMismatchError(f"ranks are in different calls; first difference: {found}"))
    me = group.name_of(group.rank)
    unread = " and ".join(group.name_of(r) for r, t in texts.items() if t is None)
    raise mark_known(
        RankMismatchError(
            f"ranks are in different calls: {me} begins {text.splitlines()[0]!r}, and the call of {unread} could not "
            "be read: that process, or the one that serves the store of the process group, may have ended since"
        )
    )


def _told(group: Group, header: bytes) -> ZeroError:
    """The error of a rank whose peer sent the ``header`` of a failure."""
    text = laid_text(group, header[_DIGEST_BYTES + 1 :])
    if text is None:
        return RankMismatchError("another rank could not make its part of this call, and did not say why")
    failure = Failure.read(text)
    error = failure.error()
    for sharded_model in ops.owners():
        if sharded_model.identity.is_among(failure.broken, group.everyone):
            sharded_model.protocol.break_off(str(error))
    return error
