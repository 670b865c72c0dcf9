"""Jobs through buffers: in order, as many under way as there are buffers, and none left behind by one that fails."""

from __future__ import annotations

import pytest

from zero_compiler.storage.streaming import Job, Stream


def test_jobs_run_in_order_with_buffers_of_their_size():
    stream, seen = Stream(4096, 2), []
    for k in range(5):
        stream.feed(Job(4096, (), (), lambda memory, k=k: seen.append((k, memory.numel()))))
    stream.feed(Job(0, (), (), lambda memory: seen.append((5, memory))))
    stream.drain()
    assert seen == [*((k, 4096) for k in range(5)), (5, None)]
    assert len(stream._free) == 2


def test_a_job_that_fails_gives_its_buffer_back():
    stream, seen = Stream(4096, 1), []

    def fails(memory):
        raise ValueError("out of luck")

    with pytest.raises(ValueError, match="out of luck"):
        stream.feed(Job(4096, (), (), fails))
    assert len(stream._free) == 1
    stream.feed(Job(4096, (), (), seen.append))
    stream.drain()
    assert len(seen) == 1
