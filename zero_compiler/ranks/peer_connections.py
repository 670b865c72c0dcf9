"""Which ranks of a process group are still there, and what each one does.

A lookup in the store of a process group does not notice that a rank has gone, and neither does an accelerator's
backend. So the processes of a group hold connections of their own: each rank one to the first rank. The kernel closes
them however a process ends; the first rank passes on who has gone. Over the same connections every rank says which
call of this package it is in, and that it is alive, so that a rank that works for long is told from one that was
stopped. One thread of a process serves all of its groups, and wakes up about once a second.

Connections are made when a group is first used. A rank that is gone before that is noticed by gloo, in the header with
which :func:`.call_handshake.begin` starts; without gloo by what the kernel shows of the store's connections, on
one host (`store_clients.py`), and else when the timeout of the group is over.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist

from . import user_collectives
from .group import Group, in_store, is_registered, store_of
from .peer_links import BEAT_S, PeerLink, PeerThread, host_name, own_addresses
from .store_requests import StoreRequests

log = logging.getLogger("zero_compiler")

SILENT_S = 5.0  # a rank that was not heard of for so long is silent, and may be stopped
_RANKS_A_BEAT = 256  # of larger groups the ranks say so less often
_CONNECT_S = 2.0
LONGEST_PAUSE_S = 8.0  # between attempts to connect
_ATTEMPTS = 6
_REASON_CHARACTERS = 300


_MAIN = threading.main_thread().ident


# What this process does ------------------------------------------------------------------------------------------


class _Doing:
    """What this process does, as its peers are told."""

    def __init__(self) -> None:
        self.text = "before its first call"
        self.works = False  # inside such a call, and not waiting for another rank there
        self.awaits: _Awaits | None = None  # what others must do before this process goes on
        self.thread = _MAIN  # which makes the calls of this package

    def say(self, text: str, works: bool) -> None:
        self.thread = threading.get_ident()
        if (text, works) != (self.text, self.works):
            self.text, self.works = text, works
            _watch.tell_all()


class _Awaits(NamedTuple):
    """What a process waits for, in the call ``what``: that all ranks of the process group ``of`` enter the header of
    this ``number``, or, where it is a ``collective`` of the user's, that one; or that this ``rank`` of the job lays the
    text of the name ``of`` into the store."""

    what: str
    of: Any
    number: int = 0
    rank: int | None = None
    collective: bool = False

    def told(self) -> list[object]:
        of = self.of if self.rank is not None else _name(self.of)
        return [self.what, of, self.number, self.rank, self.collective]


def _name(pg: dist.ProcessGroup) -> str:
    """Of a process group, equal on its ranks; "" where it has been destroyed."""
    try:
        return f"{getattr(pg, 'group_name', '')}.{dist.get_global_rank(pg, 0)}"
    except ValueError:
        return ""


_doing = _Doing()
# How many headers this process has entered, by process group. All of its ranks count alike.
_headers: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def working(what: str, works: bool = True) -> Iterator[None]:
    """Peers that ask what became of this rank learn that it was in ``what``, or what came after that.

    They wait for it longer than the timeout of the group while it ``works`` there, and does not wait for others itself.
    """
    before = _doing.text, _doing.works
    _doing.say(f"in {what}", works)
    after = f"after {what}"
    try:
        yield
    except BaseException as error:
        reason = next(iter(str(error).strip().splitlines()), "")[:_REASON_CHARACTERS]
        after = f"after {what} had raised {type(error).__name__}" + (f": {reason}" if reason else "")
        raise
    finally:
        _doing.say(*(before if before[1] else (after, False)))


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Inside, this rank waits for another one."""
    text, works = _doing.text, _doing.works
    _doing.say(text, False)
    try:
        yield
    finally:
        _doing.say(text, works)


def enter_header(pg: dist.ProcessGroup) -> int:
    """This rank enters the next header of its process group, and need not wait for it at once; its number."""
    number = _headers[pg] = _headers.get(pg, 0) + 1
    return number


@contextlib.contextmanager
def awaiting_header(pg: dist.ProcessGroup, number: int, what: str) -> Iterator[None]:
    """Inside, this rank waits in a header for all others. Peers learn of it where it takes longer than a second."""
    with _awaiting(_Awaits(what, pg, number)):
        yield


@contextlib.contextmanager
def awaiting_text(name: str, rank: int, what: str) -> Iterator[None]:
    """The same of a text that a ``rank`` of the job is to lay into the store under this ``name``."""
    with _awaiting(_Awaits(what, name, rank=rank)):
        yield


@contextlib.contextmanager
def _awaiting(awaits: _Awaits) -> Iterator[None]:
    before, _doing.awaits = _doing.awaits, awaits
    try:
        yield
    finally:
        _doing.awaits = before


def _waits_for_this(awaits: _Awaits, store: StoreRequests) -> bool:
    """Whether a peer waits for what this rank has not done yet."""
    if awaits.rank is not None:
        return awaits.rank == dist.get_rank() and not store.check([awaits.of])
    if awaits.collective:
        groups = list(_known)
        entered = (user_collectives.entered(pg) for pg in groups if _name(pg) == awaits.of)
    else:
        entered = (n for pg, n in list(_headers.items()) if _name(pg) == awaits.of)
    return bool(awaits.of) and next(entered, 0) < awaits.number


def in_a_call() -> None:
    """This rank is in a call of its model, unless it says that it is in another one. Peers hear of the first of several
    calls alone, since these must be quick."""
    if not _doing.text.startswith("in "):
        _doing.say(_IN_CALLS, False)


_IN_CALLS = "in or after a call of its model"


# What it knows of others -----------------------------------------------------------------------------------------


@dataclass
class _Peer:
    """One rank, as this one knows it. ``heard``: when it was last known to be alive; None: never yet. ``gone``: in a
    sentence, where it is."""

    name: str
    text: str = "before its first call"
    works: bool = False
    heard: float | None = None
    gone: str | None = None
    awaits: _Awaits | None = None

    def update(self, text: object, works: object, awaits: Any) -> None:
        self.text, self.works = str(text), bool(works)
        self.awaits = None if awaits is None else _Awaits(*awaits)

    def shown(self) -> list[object]:
        return [self.text, self.works, None if self.awaits is None else list(self.awaits)]


class Peers:
    """What this rank knows of the others of one process group; see :func:`of`.

    Args:
        group: all ranks of it.
    """

    def __init__(self, group: Group) -> None:
        self._pg = weakref.ref(group.pg)
        self.rank, self.world = group.rank, group.world
        self._peers = [_Peer(group.name_of(r)) for r in range(group.world)]
        self._gone: list[int] = []  # ranks in the order in which they went, as far as that is known
        self._links: dict[int, PeerLink] = {}
        self._server: socket.socket | None = None
        self._token = ""
        self._changed: set[int] = set()  # ranks of which the others are to be told
        self._told: list[object] | None = None  # what this rank waits for, as the others know it
        self._within: tuple[str | None, int] = None, 0  # the collective in which it was at the last beat
        self._blocked: list[object] | None = None  # the one that it has not left since, as told
        self._tried, self._next_try = 0, 0.0
        self._next_beat = 0.0
        self._beat_s = BEAT_S * max(1.0, self.world / _RANKS_A_BEAT)
        if self.rank == 0:
            self._listen(group)
        _watch.add(self)

    # --- for those who wait for a rank ---------------------------------------------------------------------------

    def gone(self, rank: int) -> str | None:
        """A sentence if that rank is gone, about the first that went: others end because of it."""
        return None if self._peers[rank].gone is None else self._first_gone()

    def _first_gone(self) -> str | None:
        return self._peers[self._gone[0]].gone if self._gone else None

    def any_gone(self, rank: int | None = None, wait_s: float = 0.0) -> str | None:
        """The same if any rank is gone, or that one; it may still become known for some seconds."""
        end = time.monotonic() + wait_s
        while True:
            found = self._first_gone() if rank is None else self.gone(rank)
            if found is not None or not self._links or time.monotonic() > end:
                return found
            time.sleep(0.01)

    def knows(self, rank: int) -> bool:
        """Whether anything was heard of that rank yet."""
        return self._peers[rank].heard is not None

    def missing(self) -> str | None:
        """The rank of which nothing was heard yet, or one of several; None where all have come."""
        names = [p.name for r, p in enumerate(self._peers) if r != self.rank and p.heard is None]
        return f"one of {', '.join(names)}" if len(names) > 1 else next(iter(names), None)

    def at_work(self, rank: int) -> float | None:
        """When that rank was last known to compute something in a call that others may have to wait for; None where it
        does not, as far as is known. One that waits there itself does so as long as any other rank is at work."""
        peer = self._peers[rank]
        if peer.gone is not None:
            return None
        if peer.works:
            return peer.heard
        if not peer.text.startswith("in ") or peer.text == _IN_CALLS:
            return None
        others = (p for r, p in enumerate(self._peers) if r not in (rank, self.rank) and p.works)
        return max((p.heard for p in others if p.gone is None and p.heard is not None), default=None)

    def waits_for_this(self, rank: int, store: StoreRequests) -> str | None:
        """The call in which that rank waits for something that this one has not done."""
        awaits = self._peers[rank].awaits
        return awaits.what if awaits is not None and _waits_for_this(awaits, store) else None

    def last_heard(self, rank: int | None = None) -> str:
        """What was last heard of that rank, or of the first that is silent: the end of a sentence about it."""
        now = time.monotonic()
        for peer in self._peers if rank is None else self._peers[rank : rank + 1]:
            silent = 0.0 if peer.heard is None else now - peer.heard
            if silent > self._beat_s + SILENT_S / 2:
                last = f"before that it was {peer.text}"
                return f"; nothing was heard of {peer.name} for {silent:.0f} s: its process may be stopped; {last}"
        if rank is None or self._peers[rank].heard is None:
            return ""
        return f"; its process is alive, {self._peers[rank].text}"

    # --- connections ---------------------------------------------------------------------------------------------

    def _listen(self, group: Group) -> None:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, backlog=self.world, dualstack_ipv6=both)
        self._server.setblocking(False)
        self._token = secrets.token_hex(16)
        store = store_of(group)
        where = {
            "token": self._token,
            "port": self._server.getsockname()[1],
            "addresses": own_addresses(store.store),
            "host": host_name(),
        }
        store.set(in_store(group, _KEY), json.dumps(where))

    def join(self, group: Group) -> None:
        """Connect to the first rank if it has said where; else that is tried again the next time."""
        if self.rank == 0 or self._links or self._peers[0].gone is not None or self._tried >= _ATTEMPTS:
            return
        now = time.monotonic()
        store, key = store_of(group), in_store(group, _KEY)
        if now < self._next_try or not store.check([key]):
            return
        where = json.loads(store.get(key))
        here = ["127.0.0.1", "::1"] if where["host"] == host_name() else []
        problem = "no address is known"
        for address in [*here, *where["addresses"]]:
            try:
                self._connect(address, where)
                return
            except (OSError, EOFError, ValueError) as error:
                problem = f"{address} port {where['port']}: {error}"
        self._next_try = now + min(2.0**self._tried / 2, LONGEST_PAUSE_S)
        self._tried += 1
        if self._tried == _ATTEMPTS:
            log.warning(
                "%s cannot connect to %s (%s): a rank that goes is noticed by the process group alone, in places "
                "after its timeout",
                self._peers[self.rank].name,
                self._peers[0].name,
                problem,
            )

    def _connect(self, address: str, where: dict[str, Any]) -> None:
        connection = socket.create_connection((address, where["port"]), timeout=_CONNECT_S)
        try:
            hello = {"token": where["token"], "rank": self.rank, **self._message()}
            connection.sendall(json.dumps(hello).encode() + b"\n")
            first = b""
            while not first.endswith(b"\n"):
                data = connection.recv(1 << 16)
                if not data:
                    raise EOFError("another process answers there")
                first += data
            for line in first.splitlines():
                self._from_first(json.loads(line))
        except BaseException:
            connection.close()
            raise
        self._links[0] = link = PeerLink(connection, 0)
        _watch.register(connection, lambda: self._read(link))
        self.tell()  # what has changed meanwhile

    # --- on the thread -------------------------------------------------------------------------------------------

    def attach(self) -> None:
        if self._server is not None:
            _watch.register(self._server, self._accept)

    def _accept(self) -> None:
        assert self._server is not None
        with contextlib.suppress(OSError):
            connection, _ = self._server.accept()
            link = PeerLink(connection, None)
            _watch.register(connection, lambda: self._read(link))

    def _read(self, link: PeerLink) -> None:
        try:
            for message in link.receive():
                if self.rank != 0:
                    self._from_first(message)
                elif link.rank is None:
                    self._greet(link, message)
                else:
                    link.sure = True
                    self._from_other(link.rank, message)
        except (EOFError, KeyError, TypeError, ValueError, IndexError) as error:
            _watch.unregister(link.socket)
            if link.rank is None:
                return
            if self._links.get(link.rank) is link:
                del self._links[link.rank]
            if link.sure or self.rank != 0:
                lost = f" (its connection was lost: {error})" if str(error) else ""
                self._lost(link.rank, f"its process has ended{lost}, {self._peers[link.rank].text}")

    def _greet(self, link: PeerLink, message: dict[str, Any]) -> None:
        rank = int(message["rank"])
        if not secrets.compare_digest(str(message["token"]), self._token) or not 0 < rank < self.world:
            raise EOFError("another process")
        link.rank = rank
        self._links[rank] = link
        self._from_other(rank, message)
        known = {r: p.shown() for r, p in enumerate(self._peers)}
        known[0] = self._own()
        gone = {r: self._peers[r].gone for r in self._gone}
        link.send({"ranks": known, "silent": self._silent(), "gone": gone})

    def _from_other(self, rank: int, message: dict[str, object]) -> None:
        peer = self._peers[rank]
        peer.heard = time.monotonic()
        if "text" in message:
            peer.update(message["text"], message["works"], message.get("awaits"))
            self._changed.add(rank)
        if "left" in message:
            self._lost(rank, str(message["left"]))

    def _from_first(self, message: dict[str, Any]) -> None:
        for rank, said in message.get("ranks", {}).items():
            self._peers[int(rank)].update(*said)
        for rank, gone in message.get("gone", {}).items():
            self._goes(int(rank), gone)
        if "left" in message:
            self._lost(0, str(message["left"]))
        now, silent = time.monotonic(), message.get("silent")
        self._peers[0].heard = now
        if silent is not None:
            for rank, peer in enumerate(self._peers):
                if rank not in silent:
                    peer.heard = now

    def _lost(self, rank: int, why: str) -> None:
        """A rank will say no more. On the first rank the others are told."""
        peer = self._peers[rank]
        if peer.gone is not None:
            return
        self._goes(rank, f"{peer.name} is gone: {why}")
        if self.rank == 0:
            for link in list(self._links.values()):
                link.send({"gone": {rank: peer.gone}})

    def _goes(self, rank: int, gone: str) -> None:
        if rank not in self._gone:
            self._peers[rank].gone = gone  # first: who waits reads the list meanwhile
            self._gone.append(rank)

    def _silent(self) -> list[int]:
        now, most = time.monotonic(), SILENT_S
        return [
            r
            for r, p in enumerate(self._peers)
            if r > 0 and (p.gone is not None or p.heard is None or now - p.heard > most)
        ]

    def beat(self, now: float) -> bool:
        """Say that this rank is alive, where it is time to; whether there still is a process group."""
        if now < self._next_beat:
            return True
        self._next_beat = now + self._beat_s
        pg = self._pg()
        if pg is None or not is_registered(pg):
            self._leave()
            return False
        self._look_for_collective(pg)
        own, message = self._own(), {}
        news, self._told = own[2] != self._told, own[2]
        if self.rank == 0:
            changed, self._changed = self._changed, set()
            ranks = {r: self._peers[r].shown() for r in changed} | ({0: own} if news else {})
            message = {"ranks": ranks, "silent": self._silent()}
        elif news:
            message = self._message()
        for link in list(self._links.values()):
            link.send(message)
        return True

    def tell(self) -> None:
        """Others learn at once what this rank does now; those behind the first rank soon."""
        message = {"ranks": {0: self._own()}} if self.rank == 0 else self._message()
        for link in list(self._links.values()):
            link.send(message)

    def _look_for_collective(self, pg: dist.ProcessGroup) -> None:
        """Whether this rank waits in a collective of the user's, and has since the last beat."""
        threads = (_doing.thread, _MAIN)  # the one that has made the last call of this package comes first
        within, before = (user_collectives.waited_in(pg, threads), user_collectives.entered(pg)), self._within
        self._within, self._blocked = within, None
        if within == before and within[0] is not None:
            awaits = _Awaits(f"torch.distributed.{within[0]}()", pg, within[1], collective=True)
            self._blocked = awaits.told()

    def _own(self) -> list[Any]:
        awaits = _doing.awaits
        return [_doing.text, _doing.works, self._blocked if awaits is None else awaits.told()]

    def _message(self) -> dict[str, Any]:
        return dict(zip(("text", "works", "awaits"), self._own(), strict=True))

    def _leave(self) -> None:
        """The process group was destroyed here: no peer will have an answer of this rank any more."""
        for link in list(self._links.values()):
            link.send({"left": f"it has destroyed the process group, {_doing.text}"})
        self.close()

    def sockets(self) -> list[socket.socket]:
        server = [] if self._server is None else [self._server]
        return [link.socket for link in list(self._links.values())] + server

    def close(self) -> None:
        for link in list(self._links.values()):
            _watch.unregister(link.socket)
        self._links.clear()
        if self._server is not None:
            _watch.unregister(self._server)
            self._server = None


_KEY = "peers"


_watch = PeerThread()  # the thread of all groups
_known: weakref.WeakKeyDictionary[dist.ProcessGroup, Peers] = weakref.WeakKeyDictionary()


def _forked() -> None:
    _watch.forked()
    _known.clear()


os.register_at_fork(after_in_child=_forked)


def of(group: Group) -> Peers | None:
    """What this rank knows of the others of a group, with which it is connected now if that can be; None where the
    group has no other rank.

    Raises:
        TransferError: the process group has been destroyed.
    """
    found = ready(group)
    if found is not None:
        found.join(group)
    return found


def ready(group: Group) -> Peers | None:
    """The same before this rank connects to others: all that it needs for that it has.

    Raises:
        TransferError: the process group has been destroyed, or no thread can be started.
    """
    if group.link is None or group.world == 1:
        return None
    pg = group.pg
    found = _known.get(pg)
    if found is None:
        found = _known[pg] = Peers(group)
    return found


def known(group: Group) -> Peers | None:
    """The same where there are connections already; asks nothing of the store."""
    pg = None if group.link is None or group.destroyed else group.pg
    return None if pg is None else _known.get(pg)
