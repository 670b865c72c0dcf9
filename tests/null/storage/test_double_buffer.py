"""Jobs through a fixed number of buffers: each is read, computed and written once, in order, and none waits for ever."""

from __future__ import annotations

import pytest

from zero_compiler.storage.double_buffer import Turns


class Transfer:
    """Of a job: under way until somebody waits for it."""

    def __init__(self, job: int) -> None:
        self.job, self.ended = job, False

    def done(self) -> bool:
        return self.ended

    def wait(self) -> None:
        self.ended = True


class Recorded(Turns[int, Transfer]):
    """What happens to each job. Odd jobs need no buffer."""

    def __init__(self, buffers: int) -> None:
        super().__init__()
        self.free, self.seen = buffers, []

    def _has_buffer(self, job):
        return job % 2 == 1 or self.free > 0

    def _read(self, job):
        self.free -= job % 2 == 0
        assert self.free >= 0
        self.seen.append(("read", job))
        self._reading.append(Transfer(job))

    def _compute(self, turn):
        self.seen.append(("compute", turn.job))
        turn.ended = False  # its writes begin

    def _give_back(self, turn):
        self.free += turn.job % 2 == 0
        self.seen.append(("written", turn.job))


@pytest.mark.parametrize("buffers", [1, 2, 4])
def test_every_job_is_read_computed_and_written_in_order(buffers):
    turns = Recorded(buffers)
    for job in range(7):
        turns.feed(job)
    turns.drain()
    for what in ("read", "compute", "written"):
        assert [job for kind, job in turns.seen if kind == what] == list(range(7))
    assert turns.free == buffers


def test_reads_of_later_jobs_begin_before_earlier_ones_are_computed():
    turns = Recorded(2)
    for job in (0, 2, 4):
        turns.feed(job)
    assert turns.seen == [("read", 0), ("read", 2)]  # the third waits for a buffer
    turns.admit()
    assert turns.seen.index(("written", 0)) < turns.seen.index(("read", 4))
    assert turns.seen.index(("compute", 2)) < turns.seen.index(("read", 4))
