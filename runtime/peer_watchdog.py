"""Looks, while calls of this process last, whether a peer has failed in one of them, and ends what waits for it there.

A wait for a message of a process group looks nowhere else, until the group's timeout.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zero_compiler.ranks import peer_connections
from zero_compiler.ranks.group import Group
from zero_compiler.ranks.peer_waits import LOOK_S, broken_off

log = logging.getLogger("zero_compiler")


@dataclass(frozen=True, eq=False)
class WatchedCall:
    """A call that ranks of ``group`` make together, by ``engines``."""

    group: Group
    engines: Sequence[Any]

    def look(self) -> None:
        """End the waits of the call if it has ended on a peer."""
        told = broken_off(self.group)
        if told is not None:
            for engine in self.engines:
                engine.stop_waiting(str(told))
        elif self.group.device.type != "cpu":
            known = peer_connections.known(self.group.everyone)
            gone = None if known is None else known.any_gone()
            if gone is not None:
                _say_gone(gone)


@functools.cache
def _say_gone(gone: str) -> None:
    """Once: what the device waits for is not to be ended from here, and its backend may not know."""
    log.error(
        "%s; the call of the model that this rank is in ends with the timeout of the process group", gone
    )


class _Watchdog:
    """One thread, which ends when there is nothing to look at, and is started by the next call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: set[WatchedCall] = set()
        self._thread: threading.Thread | None = None
        self._leaving = threading.Event()

    def begin(self, call: WatchedCall) -> None:
        with self._lock:
            self._calls.add(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="zero-watch", daemon=True)
                self._thread.start()

    def end(self, call: WatchedCall) -> None:
        with self._lock:
            self._calls.discard(call)

    def leave(self) -> None:
        """The process ends: a thread that it found in a request to the store would bring it down."""
        self._leaving.set()
        thread = self._thread
        if thread is not None:
            thread.join(timeout=5.0)

    def _run(self) -> None:
        seen: set[WatchedCall] = set()
        while not self._leaving.wait(LOOK_S):
            with self._lock:
                calls = set(self._calls)
                if not calls:
                    self._thread = None
                    return
            for call in calls & seen:  # most end sooner
                call.look()
            seen = calls


_watch = _Watchdog()
begin, end = _watch.begin, _watch.end
atexit.register(_watch.leave)
os.register_at_fork(after_in_child=_watch.__init__)  # type: ignore[misc]  # no thread of the parent's runs there
