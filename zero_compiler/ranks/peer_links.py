"""Connections between the processes of a group: their messages, and the thread that serves them. What they are for is
said in `peer_connections.py`."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

from ..errors import TransferError

BEAT_S = 1.0  # how often a rank says that it is alive
_MOST_BYTES = 1 << 20  # of a message, and of what waits to be sent


class PeerLink:
    """A connection to one other process, with messages of a line of JSON each."""

    def __init__(self, connection: socket.socket, rank: int | None) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.rank = connection, rank
        self.sure = False  # the other process knows of it too
        self._out, self._in = bytearray(), bytearray()
        self._lock = threading.Lock()

    def send(self, message: Mapping[str, object]) -> None:
        """Send it, or keep what does not go now for the next time. What a process that is stopped does not read is
        dropped after a while."""
        with self._lock:
            if len(self._out) < _MOST_BYTES:
                self._out += json.dumps(message).encode() + b"\n"
            with contextlib.suppress(OSError):  # a connection that is closed is noticed where it is read
                while self._out:
                    del self._out[: self.socket.send(self._out)]

    def receive(self) -> list[dict[str, object]]:
        """The messages that have come.

        Raises:
            EOFError: and no more will. The messages that came before the connection ended are returned first, also
                where it was reset: the last of them may say why.
        """
        end: EOFError | None = None
        try:
            while data := self.socket.recv(1 << 16):
                self._in += data
                if len(self._in) > _MOST_BYTES:
                    raise EOFError("no message of ours is so long")
            end = EOFError()
        except BlockingIOError:
            pass
        except (ConnectionResetError, BrokenPipeError):
            end = EOFError()
        except OSError as error:
            end = EOFError(error.strerror or str(error))
        *lines, rest = self._in.split(b"\n")
        self._in = bytearray(rest)
        if end is not None and not lines:
            raise end
        try:
            return [message for line in lines if isinstance(message := json.loads(line), dict)]
        except ValueError:
            raise EOFError("no message of ours") from None


def own_addresses(store: object) -> list[str]:
    """Where other hosts may reach this one, best first."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    served = getattr(store, "host", None)  # of a TCPStore, which all ranks have reached
    found = [served] if served else []
    for name in (served, socket.gethostname()):
        with contextlib.suppress(OSError):
            for family, kind, _, _, address in socket.getaddrinfo(name, 1, type=socket.SOCK_DGRAM):
                with contextlib.suppress(OSError), socket.socket(family, kind) as route:
                    route.connect(address)  # sends nothing, and chooses the interface
                    found.append(route.getsockname()[0])
    return list(dict.fromkeys(found))


def host_name() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            return f.read().strip()
    except OSError:
        return socket.gethostname()


class Served(Protocol):
    """What the thread serves: one process group."""

    def attach(self) -> None:
        """Register the connections that there are."""

    def beat(self, now: float) -> bool:
        """Say that this rank is alive, where it is time to; whether there still is a process group."""

    def tell(self) -> None:
        """Say what this rank does now."""

    def sockets(self) -> list[socket.socket]:
        """Which a forked child is to close."""


class PeerThread:
    """The thread that serves the connections of all groups. It ends when there are none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[Served] = []
        self._selector: Any = None
        self._thread: threading.Thread | None = None

    def add(self, peers: Served) -> None:
        """Serve these from here on.

        Raises:
            TransferError: the process cannot start a thread.
        """
        with self._lock:
            if self._selector is None:
                self._selector = selectors.DefaultSelector()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="zero-peers", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    raise TransferError(
                        f"no thread can be started that looks after other ranks ({error}); the process, or its user, "
                        "may have reached its limit of threads or of memory"
                    ) from error
                self._thread = thread
            self._all.append(peers)
            peers.attach()

    def register(self, connection: socket.socket, read: object) -> None:
        self._selector.register(connection, selectors.EVENT_READ, read)

    def unregister(self, connection: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        connection.close()

    def tell_all(self) -> None:
        for peers in list(self._all):
            peers.tell()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select(BEAT_S):
                key.data()
            now = time.monotonic()
            for peers in list(self._all):
                if not peers.beat(now):
                    with self._lock:
                        self._all.remove(peers)
            with self._lock:
                if not self._all:
                    self._thread = None
                    return

    def forked(self) -> None:
        """In a forked child: a connection that it held would outlive the rank."""
        for peers in self._all:
            for connection in peers.sockets():
                connection.close()
        if self._selector is not None:
            self._selector.close()
        self.__init__()  # type: ignore[misc]  # no thread of the parent's runs here
