"""Runs several calls of file I/O so that one that fails, or is interrupted, leaves no request under way."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from .aio import Engine, Request
from .stores import Checked, settle


@dataclass
class Requests:
    """Transfers of one piece of memory, which must not be touched before they are done."""

    requests: list[Request | Checked] = field(default_factory=list, kw_only=True)

    def done(self) -> bool:
        return all(r.done() for r in self.requests)

    def wait(self) -> None:
        """Wait for every request. What breaks this off may leave some under way."""
        while self.requests:
            self.requests[0].wait()
            del self.requests[0]


class Guarded:
    """Not for two threads at once. After an error or Ctrl-C, which may come between any two lines, nothing is under way
    any more, and what was begun is forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self._engines: weakref.WeakSet[Engine] = weakref.WeakSet()  # that move what was begun
        weakref.finalize(self, _end, self._engines).atexit = False
        self._torn = False  # a call broke off, and what it began may be under way

    def _guarded(self, step: Callable[[], None]) -> None:
        if self._torn:
            self.forget()
        self._torn = True
        try:
            step()
        except BaseException:
            self.forget()  # where this is broken off too, the next call does it
            raise
        self._torn = False

    def forget(self) -> None:
        """Give up what was begun and has not ended, where it is. Nothing touches memory or a file after this; not by
        the requests that are known here: Ctrl-C may have come before one of them was."""
        self._torn = True
        settle(list(self._engines))
        self._drop()
        self._torn = False

    def _drop(self) -> None:
        """Forget what was begun; nothing of it is under way."""
        raise NotImplementedError


def _end(engines: weakref.WeakSet[Engine]) -> None:
    """What is dropped before it was drained leaves nothing under way either."""
    settle(list(engines))
