"""Requests to the store of a process group, which end although the process that serves it does not answer.

A request over the connection of a TCPStore waits without a limit for one that is stopped (SIGSTOP, a host that does not
answer), and any other thread's request waits behind it. So one thread makes all requests of ours, and those who ask
wait for it as long as they may.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Unanswered(RuntimeError):
    """The store has not answered for ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the store of the process group has not answered for {seconds:.0f} s")
        self.seconds = seconds


class StoreRequests:
    """The methods of a ``torch.distributed.Store`` that are used here, each of which ends in time.

    Args:
        within_s: seconds that the store has for an answer. Those count from when it has last given one, if another
            request still waits for that: so where several ask a store that is stopped, all end at the same time, and
            who asks later ends at once.

    Each raises :class:`Unanswered` when they are over, and what the store raises.
    """

    def __init__(self, store: dist.Store, within_s: float) -> None:
        self.store, self._within_s = store, within_s

    def set(self, key: str, value: str) -> None:
        self.ask(lambda store: store.set(key, value))

    def get(self, key: str) -> bytes:
        return bytes(self.ask(lambda store: store.get(key)))

    def check(self, keys: list[str]) -> bool:
        return bool(self.ask(lambda store: store.check(keys)))

    def delete_key(self, key: str) -> None:
        self.ask(lambda store: store.delete_key(key))

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.ask(lambda store: store.wait(keys, timeout))

    def ask(self, request: Callable[[dist.Store], T]) -> T:
        """What ``request`` returns, given the store, on the thread that asks."""
        asking = _asking.get(self.store)
        if asking is None:
            try:
                with _lock:
                    asking = _asking.get(self.store) or _asking.setdefault(self.store, _Asking(self.store))
            except RuntimeError:
                # No thread can be started: peers are to be told that, and the request has no limit then.
                return request(self.store)
        return asking.ask(self.store, request, self._within_s)


class _StoreRequest:
    def __init__(self, store: dist.Store, request: Callable[[dist.Store], object]) -> None:
        self.store, self.request = store, request
        self.done = threading.Lock()
        self.done.acquire()
        self.given_up = False
        self.result: Any = None
        self.error: BaseException | None = None


class _Asking:
    """The thread that asks one store, as long as there is that store."""

    def __init__(self, store: dist.Store) -> None:
        self._queue: queue.SimpleQueue[_StoreRequest | None] = queue.SimpleQueue()
        self._since: float | None = None  # when the request was made that has no answer yet
        threading.Thread(target=self._run, name="zero-store", daemon=True).start()
        weakref.finalize(store, self._queue.put, None).atexit = False

    def ask(self, store: dist.Store, call: Callable[[dist.Store], T], within_s: float) -> T:
        now, since = time.monotonic(), self._since
        since = now if since is None else since
        left_s = since + within_s - now
        if left_s <= 0:
            raise Unanswered(now - since)
        request = _StoreRequest(store, call)
        self._queue.put(request)
        if not request.done.acquire(timeout=min(left_s, threading.TIMEOUT_MAX)):
            request.given_up = True
            raise Unanswered(time.monotonic() - since)
        if request.error is not None:
            raise request.error
        return request.result

    def _run(self) -> None:
        while (request := self._queue.get()) is not None:
            if request.given_up:
                continue
            self._since = time.monotonic()
            try:
                request.result = request.request(request.store)
            except BaseException as error:
                request.error = error
            self._since = None
            request.done.release()
            request = None  # the store may go


_lock = threading.Lock()
_asking: weakref.WeakKeyDictionary[object, _Asking] = weakref.WeakKeyDictionary()


def _forked() -> None:
    """No thread of the parent's runs in a forked child."""
    global _lock
    _lock = threading.Lock()
    _asking.clear()


os.register_at_fork(after_in_child=_forked)
