"""Ranges of torch's profiler, and transfers as rows of their own."""

import itertools
import threading

import pytest
import torch
from null.profiles import lane_of, names, profiled, threads_of_lanes, what_of

from zero_compiler import ranges
from zero_compiler.storage import aio


def test_there_is_nothing_without_a_profiler():
    assert ranges.ranged("one") is ranges.ranged("two")
    with ranges.ranged("one"):
        assert ranges.started_here() == ""
    assert ranges.Lanes().begin("nvme-read", "bytes") is None


def test_ranges_lie_in_each_other(tmp_path):
    def step():
        with ranges.ranged("outer", "states"):
            with ranges.ranged("inner"):
                assert ranges.started_here() == ""
            assert ranges.started_here() == "states"
        assert ranges.started_here() == ""

    inner, outer = sorted(profiled(step, tmp_path / "trace.json"), key=lambda e: e["dur"])
    assert (inner["name"], outer["name"]) == ("zero compute: inner", "zero compute: outer")
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    assert inner["tid"] == outer["tid"]


MOVED = {
    "zero compute: start of the states": 1,
    "zero nvme-write: file of the states": 3,
    "zero nvme-read: states": 1,
}


def moved(io, file, block):
    with ranges.ranged("start of the states", "file of the states"):
        requests = [io.write(file, block, label="states") for _ in range(3)]
    for request in requests:
        request.wait()
    io.read(file, block, label="states").wait()


def test_transfers_of_files_have_rows_of_their_own(tmp_path):
    with aio.Engine(block_bytes=4096) as io:
        block = aio.buffer(1 << 16)
        file = io.open(str(tmp_path / "file"), nbytes=1 << 16, create=True)
        events = profiled(lambda: moved(io, file, block), tmp_path / "trace.json")
        here = next(e["tid"] for e in events if lane_of(e) == "compute")
        own = {lane: [e for e in events if lane_of(e) == lane] for lane in ("nvme-write", "nvme-read")}
        # A transfer is called as the range says in which it began, or as what it is.
        assert [what_of(e) for e in own["nvme-write"]] == 3 * ["file of the states"]
        assert [what_of(e) for e in own["nvme-read"]] == ["states"]
        for row in own.values():
            assert here not in {e["tid"] for e in row}
            assert len({e["tid"] for e in row}) == 1
            row.sort(key=lambda e: e["ts"])
            assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in itertools.pairwise(row))
        assert names(events) == MOVED


@pytest.mark.slow
def test_engines_that_follow_each_other_share_threads(tmp_path):
    threads = []
    for k in range(3):
        with aio.Engine(block_bytes=4096) as io:
            block = aio.buffer(1 << 16)
            file = io.open(str(tmp_path / f"file{k}"), nbytes=1 << 16, create=True)
            events = profiled(lambda: moved(io, file, block), tmp_path / "trace.json")  # noqa: B023
            assert names(events) == MOVED
            threads.append(threads_of_lanes())
            moved(io, file, block)  # without a profiler the rows are let go of
    # The next engine has threads that another one had before it.
    assert threads == threads[:1] * 3


def test_two_engines_have_rows_of_their_own(tmp_path):
    with aio.Engine() as one, aio.Engine() as two:
        block = aio.buffer(4096)
        files = [
            io.open(str(tmp_path / f"file{k}"), nbytes=4096, create=True) for k, io in enumerate((one, two))
        ]

        def step():
            for io, file in zip((one, two), files, strict=True):
                moved(io, file, block)

        events = profiled(step, tmp_path / "trace.json")
        assert len({e["tid"] for e in events if lane_of(e) == "nvme-write"}) == 2


def test_a_profile_of_all_threads_has_each_transfer_once(tmp_path):
    with aio.Engine() as io:
        block = aio.buffer(4096)
        file = io.open(str(tmp_path / "file"), nbytes=4096, create=True)
        everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)

        def step():
            thread = threading.Thread(target=moved, args=(io, file, block))
            thread.start()
            thread.join()

        events = profiled(step, tmp_path / "trace.json", experimental_config=everywhere)
        assert names(events) == MOVED
        # A thread that no profiler knows records nothing.
        assert names(profiled(step, tmp_path / "other.json")) == {}
