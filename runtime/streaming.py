"""Reads, computes and writes back one job after another, with all three overlapped and a fixed number of buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from .aio import Request, buffer
from .stores import Checked, Span, merged


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
    job: Job
    buffer: torch.Tensor | None
    requests: list[Request | Checked] = field(default_factory=list)

    def done(self) -> bool:
        return all(r.done() for r in self.requests)

    def wait(self) -> None:
        """Wait for every request, whatever becomes of one: none may touch the buffer after this."""
        first: BaseException | None = None
        for request in self.requests:
            try:
                request.wait()
            except BaseException as error:
                first = first or error
        self.requests.clear()
        if first is not None:
            raise first


class Stream:
    """Runs jobs in the order in which they are fed, through ``count`` buffers of ``nbytes`` each.

    Not for two threads at once. After an error nothing is under way any more, and what was fed is forgotten.
    """

    def __init__(self, nbytes: int, count: int) -> None:
        self.nbytes = nbytes
        self._free: deque[torch.Tensor] = deque(buffer(nbytes) for _ in range(count if nbytes else 0))
        self._waiting: deque[Job] = deque()
        self._reading: deque[_Turn] = deque()
        self._writing: deque[_Turn] = deque()

    def feed(self, job: Job) -> None:
        """Take on a job; go on with what needs no waiting."""
        self._waiting.append(job)
        self._guarded(self._advance)

    def admit(self) -> None:
        """Wait until all that was fed has a buffer: what waits for one holds memory of its own."""
        self._guarded(self._admit)

    def drain(self) -> None:
        """Run all that was fed, to the last write."""
        self._guarded(self._drain)

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except BaseException:
            self._forget()
            raise

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
        turn.job.run(turn.buffer)
        for s in merged(turn.job.writes):
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

    def _forget(self) -> None:
        self._waiting.clear()
        for turn in (*self._reading, *self._writing):
            try:
                turn.wait()
            except BaseException:  # the first error is on its way to the user
                pass
            if turn.buffer is not None:
                self._free.append(turn.buffer)
        self._reading.clear()
        self._writing.clear()
