"""Reads, computes and writes back one job after another, with all three overlapped and a fixed number of buffers."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from .aio import Engine, Request, buffer
from .stores import Checked, Span, merged, settle
from .turns import Turns


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


class Stream(Turns[Job, _Turn]):
    """Runs jobs in the order in which they are fed, through ``count`` buffers of ``nbytes`` each.

    Not for two threads at once. After an error or Ctrl-C, which may come between any two lines, nothing is under way
    any more, and what was fed is forgotten.
    """

    def __init__(self, nbytes: int, count: int) -> None:
        super().__init__()
        self.nbytes = nbytes
        self._buffers = [buffer(nbytes) for _ in range(count if nbytes else 0)]
        self._free = deque(self._buffers)
        self._engines: weakref.WeakSet[Engine] = weakref.WeakSet()  # that move what was fed
        weakref.finalize(self, _end, self._engines).atexit = False
        self._torn = False  # a call broke off, and what it began may be under way

    def feed(self, job: Job) -> None:
        def take() -> None:
            for span in (*job.reads, *job.writes):
                self._engines.add(span.store.engine)
            fed(job)

        fed = super().feed
        self._guarded(take)

    def admit(self) -> None:
        self._guarded(super().admit)

    def drain(self) -> None:
        self._guarded(super().drain)

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

    def _has_buffer(self, job: Job) -> bool:
        return not job.nbytes or bool(self._free)

    def _read(self, job: Job) -> None:
        turn = _Turn(job, self._free.popleft() if job.nbytes else None)
        self._reading.append(turn)
        for s in merged(job.reads):
            assert turn.buffer is not None
            turn.requests.append(s.store.read(s, turn.buffer))

    def _compute(self, turn: _Turn) -> None:
        assert turn.job is not None
        turn.job.run(turn.buffer)
        writes, turn.job = merged(turn.job.writes), None
        for s in writes:
            assert turn.buffer is not None
            turn.requests.append(s.store.write(s, turn.buffer))

    def _give_back(self, turn: _Turn) -> None:
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
