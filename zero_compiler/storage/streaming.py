"""Reads, computes and writes back one job after another, with all three overlapped and a fixed number of buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..ir.transfers import file_of, start_of, wait_for
from ..ranges import ranged
from .aio import buffer
from .double_buffer import Turns
from .interruptible_io import Guarded, Requests
from .stores import FileSpan, merged


@dataclass(frozen=True)
class Job:
    """One turn of a buffer: ``reads`` fill it, ``run`` gets it, ``writes`` take it back to the files.

    ``nbytes`` is what it needs of a buffer. A job that needs none runs as soon as it is its turn. ``label``: what it
    is, for profiles.
    """

    nbytes: int
    reads: Sequence[FileSpan]
    writes: Sequence[FileSpan]
    run: Callable[[torch.Tensor | None], None]
    label: str = "job"


@dataclass
class _StreamedTurn(Requests):
    job: Job | None  # None: it has run, and what it holds is gone
    buffer: torch.Tensor | None
    label: str

    def wait(self) -> None:
        if self.requests:
            with ranged(wait_for(file_of(self.label))):
                super().wait()


class Stream(Guarded, Turns[Job, _StreamedTurn]):
    """Runs jobs in the order in which they are fed, through ``count`` buffers of ``nbytes`` each."""

    def __init__(self, nbytes: int, count: int) -> None:
        super().__init__()
        self.nbytes = nbytes
        self._buffers = [buffer(nbytes) for _ in range(count if nbytes else 0)]
        self._free = deque(self._buffers)

    def feed(self, job: Job) -> None:
        def feed_job() -> None:
            for span in (*job.reads, *job.writes):
                self._engines.add(span.store.engine)
            fed(job)

        fed = super().feed
        self._guarded(feed_job)

    def admit(self) -> None:
        self._guarded(super().admit)

    def drain(self) -> None:
        self._guarded(super().drain)

    def _has_buffer(self, job: Job) -> bool:
        return not job.nbytes or bool(self._free)

    def _read(self, job: Job) -> None:
        turn = _StreamedTurn(job, self._free.popleft() if job.nbytes else None, job.label)
        self._reading.append(turn)
        if job.reads:
            self._move(turn, job.reads, write=False)

    def _compute(self, turn: _StreamedTurn) -> None:
        assert turn.job is not None
        with ranged(turn.label):
            turn.job.run(turn.buffer)
        writes, turn.job = turn.job.writes, None
        if writes:
            self._move(turn, writes, write=True)

    def _move(self, turn: _StreamedTurn, spans: Sequence[FileSpan], write: bool) -> None:
        assert turn.buffer is not None
        file = file_of(turn.label)
        with ranged(start_of(file), file):
            for s in merged(spans):
                move = s.store.write if write else s.store.read
                turn.requests.append(move(s, turn.buffer))

    def _give_back(self, turn: _StreamedTurn) -> None:
        if turn.buffer is not None:
            self._free.append(turn.buffer)

    def _drop(self) -> None:
        for turns in (self._waiting, self._reading, self._writing):
            turns.clear()
        self._free = deque(self._buffers)
