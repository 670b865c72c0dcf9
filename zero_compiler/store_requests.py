"""Requests to the store of the process group, whose answers are waited for no longer than the timeout of the group.

A client of torch's store waits without end where the process that serves it is stopped: neither its timeout nor Ctrl-C
ends that, and every further request of the process waits behind the first one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .errors import TransferError

_mute: list[Any] = []  # stores that have not answered in time: nothing is asked of them any more


class StoreTimeoutError(TransferError):
    """The store did not answer in time: the process that serves it may be stopped."""


class Requests:
    """The requests that this package makes to a store, as its own methods.

    Args:
        store: of torch.
        timeout_s: seconds that an answer may take.

    Raises (each of its methods):
        StoreTimeoutError: there was none in that time, now or before.
        RuntimeError: that of torch's store.
    """

    def __init__(self, store: Any, timeout_s: float) -> None:
        self.store, self._timeout_s = store, timeout_s

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self.store.set(key, value))

    def get(self, key: str) -> bytes:
        found: bytes = self._ask(lambda: self.store.get(key))
        return found

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(lambda: self.store.check(keys)))

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._ask(lambda: self.store.wait(keys, *timeout))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(lambda: self.store.delete_key(key)))

    def _ask(self, request: Callable[[], Any]) -> Any:
        answers: list[tuple[Any, BaseException | None]] = []
        answered = threading.Event()

        def ask() -> None:
            try:
                answers.append((request(), None))
            except BaseException as error:
                answers.append((None, error))
            answered.set()

        if not any(store is self.store for store in _mute):
            threading.Thread(target=ask, name="zero-store", daemon=True).start()
            if not answered.wait(self._timeout_s):
                _mute.append(self.store)
        if not answers:
            raise StoreTimeoutError(
                f"the store of the process group did not answer within {self._timeout_s:.0f} s, the timeout of the "
                "group: the process that serves it, rank 0 of the job or its launcher, may be stopped"
            )
        value, error = answers[0]
        if error is not None:
            raise error
        return value
