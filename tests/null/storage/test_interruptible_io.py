"""Transfers in several calls: after one that broke off, what was begun is forgotten before anything else happens."""

from __future__ import annotations

import pytest

from zero_compiler.storage.interruptible_io import Guarded, Requests


class Recorded(Guarded):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def _drop(self) -> None:
        self.seen.append("dropped")


def test_a_call_that_breaks_off_drops_what_was_begun_and_the_next_one_goes_on():
    guarded = Recorded()

    def fails():
        guarded.seen.append("began")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guarded._guarded(fails)
    guarded._guarded(lambda: guarded.seen.append("next"))
    assert guarded.seen == ["began", "dropped", "next"]


class Request:
    def __init__(self, fails: bool = False) -> None:
        self.fails, self.ended = fails, False

    def done(self) -> bool:
        return self.ended

    def wait(self) -> None:
        if self.fails:
            raise OSError("disk")
        self.ended = True


def test_a_wait_that_fails_leaves_the_rest_to_be_waited_for():
    one, bad, last = Request(), Request(fails=True), Request()
    requests = Requests(requests=[one, bad, last])
    with pytest.raises(OSError, match="disk"):
        requests.wait()
    assert requests.requests == [bad, last]
    bad.fails = False
    requests.wait()
    assert requests.done()
