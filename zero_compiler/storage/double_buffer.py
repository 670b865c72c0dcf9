"""A pipeline of reading, computing and writing back jobs (updates of an optimizer) through a fixed number of buffers.

`streaming.py` does so with memory and files, and the plan (`simulate.py`) with times: what is counted is what runs.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

# One is read, one is updated and one is written; one more so that a slow transfer stops neither of the others.
BUFFERS = 4


class Turn(Protocol):
    """A job that has its buffer, and the transfers of it that are under way."""

    def done(self) -> bool: ...

    def wait(self) -> None: ...


J = TypeVar("J")
T = TypeVar("T", bound=Turn)


class Turns(Generic[J, T]):
    """Jobs in the order in which they are fed."""

    def __init__(self) -> None:
        self._waiting: deque[J] = deque()
        self._reading: deque[T] = deque()
        self._writing: deque[T] = deque()

    def feed(self, job: J) -> None:
        """Take on a job; go on with what needs no waiting."""
        self._waiting.append(job)
        self._start()
        while self._reading and self._reading[0].done():
            self._turn()

    def admit(self) -> None:
        """Wait until all that was fed has a buffer: what waits for one holds memory of its own."""
        while self._waiting:
            self._start()
            if self._reading:
                self._turn()
            elif self._waiting:
                self._recycle()

    def drain(self) -> None:
        """Run all that was fed, to the last write."""
        while self._waiting or self._reading:
            self._start()
            if self._reading:
                self._turn()
            else:
                self._recycle()
        while self._writing:
            self._recycle()

    def _start(self) -> None:
        """Start reads for as many jobs as there are free buffers."""
        while self._writing and self._writing[0].done():
            self._recycle()
        while self._waiting and self._has_buffer(self._waiting[0]):
            self._read(self._waiting.popleft())

    def _turn(self) -> None:
        """Finish the oldest read, compute, and start its writes."""
        turn = self._reading[0]
        turn.wait()
        self._compute(turn)
        self._writing.append(self._reading.popleft())
        self._start()

    def _recycle(self) -> None:
        turn = self._writing[0]
        turn.wait()
        self._writing.popleft()
        self._give_back(turn)

    # What differs ------------------------------------------------------------------------------------------

    def _has_buffer(self, job: J) -> bool:
        """Whether there is one for a job, or it needs none."""
        raise NotImplementedError

    def _read(self, job: J) -> None:
        """Have a job join those that are being read, then begin that."""
        raise NotImplementedError

    def _compute(self, turn: T) -> None:
        """Compute with what was read, and begin to write."""
        raise NotImplementedError

    def _give_back(self, turn: T) -> None:
        """Its buffer is free."""
        raise NotImplementedError
