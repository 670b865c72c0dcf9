"""Requests to a store that does not answer: they end in time, those of other threads with them."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch.distributed as dist

from zero_compiler.ranks.store_requests import StoreRequests, Unanswered


class Stopped:
    """A store that answers nothing until it is let go."""

    def __init__(self) -> None:
        self.goes_on, self.asked = threading.Event(), []

    def get(self, key: str) -> bytes:
        self.asked.append(key)
        self.goes_on.wait()
        return key.encode()


def threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name == "zero-store"}


def test_a_request_is_answered_and_raises_what_the_store_raises():
    store = StoreRequests(dist.HashStore(), 10.0)
    store.set("a", "b")
    assert store.check(["a"])
    assert not store.check(["c"])
    assert store.get("a") == b"b"
    store.delete_key("a")
    assert not store.check(["a"])
    with pytest.raises(TypeError):
        store.ask(lambda _: len(3))  # type: ignore[arg-type]


def test_requests_of_two_threads_end_at_the_same_time_and_later_ones_at_once():
    stopped = Stopped()
    ends: list[float] = []

    def ask(key: str) -> None:
        with pytest.raises(Unanswered):
            StoreRequests(stopped, 0.4).get(key)
        ends.append(time.monotonic())

    start = time.monotonic()
    first, second = (threading.Thread(target=ask, args=(key,)) for key in "ab")
    first.start()
    time.sleep(0.2)
    second.start()
    first.join()
    second.join()
    assert all(0.35 < end - start < 5.0 for end in ends), ends
    assert abs(ends[1] - ends[0]) < 0.15, ends
    asked = time.monotonic()
    ask("c")
    assert ends[2] - asked < 0.1
    # One that goes on answers again; what nobody waits for any more was not asked.
    stopped.goes_on.set()
    assert StoreRequests(stopped, 10.0).get("d") == b"d"
    assert stopped.asked == ["a", "d"]


@pytest.mark.slow
def test_the_thread_ends_with_the_store():
    store, before = dist.HashStore(), threads()
    StoreRequests(store, 10.0).set("a", "b")
    (thread,) = threads() - before
    del store
    gc.collect()
    thread.join(10.0)
    assert not thread.is_alive()
