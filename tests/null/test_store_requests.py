"""The store of a process group that does not answer: a request ends with the timeout, and those behind it at once."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from zero_compiler.store_requests import Requests, StoreTimeoutError


class Stopped:
    """A client as torch's: each request waits for the one before it, and that for a process that is stopped."""

    def __init__(self) -> None:
        self._lock, self.goes_on = threading.Lock(), threading.Event()

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self.goes_on.wait()

    def check(self, keys: list[str]) -> bool:
        self.set("", "")
        return True


def test_a_store_that_does_not_answer_is_asked_nothing_more():
    store = Stopped()
    try:
        with pytest.raises(StoreTimeoutError, match="did not answer within 0 s, the timeout of the group"):
            Requests(store, 0.2).check(["a"])
        start = time.monotonic()
        with pytest.raises(StoreTimeoutError):
            Requests(store, 60.0).set("a", "b")
        assert time.monotonic() - start < 5.0
    finally:
        store.goes_on.set()


def test_what_a_store_answers_is_handed_on():
    store = Requests(dist.HashStore(), 60.0)
    assert not store.check(["a"])
    store.set("a", "text")
    assert store.check(["a"])
    assert store.get("a") == b"text"
    assert store.delete_key("a")
    with pytest.raises((RuntimeError, dist.DistStoreError)):
        store.wait(["b"], timedelta(seconds=0.1))
