"""Reads, computes and writes back one job after another, with all three overlapped and a fixed number of buffers."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from .aio import Engine, Request, buffer
from .stores import Checked, Span, merged, settle

# One is read, one is updated and one is written; one more so that a slow transfer stops neither of the others.
BUFFERS = 4


@dataclass(frozen=True)
class Job:
    """One turn of a buffer: ``reads`` fill it, ``run`` gets it, ``writes`` take it back to the files.

    ``nbytes`` is what it needs of a buffer. A job that needs none runs as soon as it is its turn.
    """

    nbytes: int
    reads: Sequence[Span]
    writes: Sequence[Span]
    run: Callable[[torch.Tensor | None], None]


@dataclass
class _Turn:
    job: Job | None  # None: it has run, and what it holds is gone
    buffer: torch.Tensor | None
    requests: list[Request | Checked] = field(default_factory=list)

    def done(self) -> bool:
        return all(r.done() for r in self.requests)

    def wait(self) -> None:
        """Wait for every request. What breaks this off may leave some under way."""
        while self.requests:
            self.requests[0].wait()
            del self.requests[0]


class Stream:
    """Runs jobs in the order in which they are fed, through ``count`` buffers of ``nbytes`` each.

    Not for two threads at once. After an error or Ctrl-C, which may come between any two lines, nothing is under way
    any more, and what was fed is forgotten.
    """

    def __init__(self, nbytes: int, count: int) -> None:
        self.nbytes = nbytes
        self._buffers = [buffer(nbytes) for _ in range(count if nbytes else 0)]
        self._free = deque(self._buffers)
        self._engines: weakref.WeakSet[Engine] = weakref.WeakSet()  # that move what was fed
        weakref.finalize(self, _end, self._engines).atexit = False
        self._torn = False  # a call broke off, and what it began may be under way
        self._waiting: deque[Job] = deque()
        self._reading: deque[_Turn] = deque()
        self._writing: deque[_Turn] = deque()

    def feed(self, job: Job) -> None:
        """Take on a job; go on with what needs no waiting."""

        def take() -> None:
            for span in (*job.reads, *job.writes):
                self._engines.add(span.store.engine)
            self._waiting.append(job)
            self._advance()

        self._guarded(take)

    def admit(self) -> None:
        """Wait until all that was fed has a buffer: what waits for one holds memory of its own."""
        self._guarded(self._admit)

    def drain(self) -> None:
        """Run all that was fed, to the last write."""
        self._guarded(self._drain)

    def _guarded(self, step: Callable[[], None]) -> None:
        if self._torn:
            self._forget()
        self._torn = True
        try:
            step()
        except BaseException:
            self._forget()  # where this is broken off too, the next call does it
            raise
        self._torn = False

    def _advance(self) -> None:
        self._start()
        while self._reading and self._reading[0].done():
            self._turn()

    def _admit(self) -> None:
        while self._waiting:
            self._start()
            if self._reading:
                self._turn()
            elif self._waiting:
                self._recycle()

    def _drain(self) -> None:
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
        while self._waiting and (not self._waiting[0].nbytes or self._free):
            job = self._waiting.popleft()
            turn = _Turn(job, self._free.popleft() if job.nbytes else None)
            self._reading.append(turn)
            for s in merged(job.reads):
                assert turn.buffer is not None
                turn.requests.append(s.store.read(s, turn.buffer))

    def _turn(self) -> None:
        """Finish the oldest read, compute, and start its writes."""
        turn = self._reading[0]
        turn.wait()
        assert turn.job is not None
        turn.job.run(turn.buffer)
        writes, turn.job = merged(turn.job.writes), None
        for s in writes:
            assert turn.buffer is not None
            turn.requests.append(s.store.write(s, turn.buffer))
        self._writing.append(self._reading.popleft())
        self._start()

    def _recycle(self) -> None:
        turn = self._writing[0]
        turn.wait()
        self._writing.popleft()
        if turn.buffer is not None:
            self._free.append(turn.buffer)

    def forget(self) -> None:
        """Give up what was fed and has not ended, where it is."""
        self._torn = True
        self._forget()

    def _forget(self) -> None:
        """Nothing touches a buffer or a file after this. Not by the requests that are known here: Ctrl-C may have come
        before one of them was."""
        settle(list(self._engines))
        for turns in (self._waiting, self._reading, self._writing):
            turns.clear()
        self._free = deque(self._buffers)
        self._torn = False


def _end(engines: weakref.WeakSet[Engine]) -> None:
    """A stream that was dropped before it was drained leaves nothing under way either."""
    settle(list(engines))
