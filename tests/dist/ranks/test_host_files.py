"""Files in memory that the first process of a host gives to the others, also where one is killed, fails or never comes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from dist.spawn import run_ranks

from zero_compiler.ranks.host_files import Giver, first_or_files, make_file

pytestmark = pytest.mark.dist
TITLE = "zero-test-files"


def made(rank: int) -> list[int]:
    return [make_file(TITLE, [b"first", memoryview(b" file")]), make_file(TITLE, [b"of rank %d" % rank])]


def read(files: list[int]) -> list[bytes]:
    found = [os.pread(fd, 100, 0) for fd in files]
    for fd in files:
        os.close(fd)
    return found


def open_here() -> int:
    """How many of the files this process has open."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself is gone
            found += TITLE in os.readlink(f"/proc/self/fd/{fd}")
    return found


def wait_until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "what was waited for has not come"
        time.sleep(0.01)


def gives(rank, world, folder, name, files=True):
    """Rank 0 is first; the others have asked before it gives, and one more comes afterwards."""
    mark = Path(folder)
    if rank == 0:
        with first_or_files(name, world) as giver:
            (mark / "begun").touch()
            wait_until(lambda: all((mark / f"asks {r}").exists() for r in range(1, world - 1)))
            giver.give(made(rank) if files else [], world - 1, lambda: True)
            given = time.monotonic()
        (mark / "given").touch()
        taken = first_or_files(name, world)  # this process itself does not count
        assert time.monotonic() - given < 10.0
        (mark / "taken").touch()
        found = read(taken)
    else:
        wait_until((mark / ("taken" if rank == world - 1 else "begun")).exists)
        (mark / f"asks {rank}").touch()
        found = read(first_or_files(name, world))
        (mark / f"has {rank}").touch()
    wait_until(lambda: all((mark / f"has {r}").exists() for r in range(1, world)))
    wait_until(lambda: not open_here())
    return found


@pytest.fixture
def name(tmp_path):
    """One that no other run of the tests has."""
    return f"{os.getpid()}-{tmp_path.name}"


def test_the_first_gives_its_files_to_each_of_the_others(name, tmp_path):
    found = run_ranks(gives, 4, str(tmp_path), name, group=False)
    assert found == [[b"first file", b"of rank 0"]] * 4


def test_the_first_has_nothing_to_give(name, tmp_path):
    assert run_ranks(gives, 3, str(tmp_path), name, False, group=False) == [[]] * 3


def ends(rank, world, folder, name, how):
    """The first ends before it has given anything: another one is the first then."""
    mark = Path(folder)
    if rank == 0:
        giver = first_or_files(name, world)
        (mark / "begun").touch()
        wait_until(lambda: all((mark / f"asks {r}").exists() for r in range(1, world)))
        time.sleep(0.5)
        if how == "killed":
            os._exit(1)
        with contextlib.suppress(ValueError), giver:
            raise ValueError
        return None
    wait_until((mark / "begun").exists)
    (mark / f"asks {rank}").touch()
    met = first_or_files(name, world)
    if isinstance(met, Giver):
        with met:
            met.give(made(rank), world - 2, lambda: True)
        return rank
    return read(met)


@pytest.mark.parametrize("how", ["killed", "failed"])
def test_another_is_first_where_the_first_ends(how, name, tmp_path):
    _, *found = run_ranks(ends, 3, str(tmp_path), name, how, group=False, may_die=(0,))
    first = next(f for f in found if isinstance(f, int))
    assert [f for f in found if f != first] == [[b"first file", b"of rank %d" % first]]


def forks(rank, world, folder, name):
    """The first has forked a process, which has its socket open, when it ends."""
    mark = Path(folder)
    if rank == 0:
        with first_or_files(name, world):
            child = os.fork()
            if not child:
                time.sleep(60.0)
                os._exit(0)
        (mark / "ended").touch()
        wait_until((mark / "has").exists)
        os.kill(child, signal.SIGKILL)
        return os.waitpid(child, 0)[0] == child
    wait_until((mark / "ended").exists)
    begun = time.monotonic()
    found = first_or_files(name, world)
    (mark / "has").touch()
    return found == [] and time.monotonic() - begun < 20.0


def test_a_process_that_the_first_has_forked_lets_nobody_wait(name, tmp_path):
    assert run_ranks(forks, 2, str(tmp_path), name, group=False) == [True, True]


def test_files_that_are_not_wanted_any_more_are_closed(name):
    wanted = [True]
    with first_or_files(name, 2) as giver:
        giver.give(made(0), 1, lambda: wanted[0])
    time.sleep(0.2)
    assert open_here() == 2
    wanted.clear()
    wanted.append(False)
    wait_until(lambda: not open_here(), 10.0)


def test_whoever_ends_before_it_was_given_anything_leaves_the_name(name):
    for _ in range(2):
        with first_or_files(name, 2) as giver:
            assert isinstance(giver, Giver)


def test_a_file_for_which_there_is_no_room(monkeypatch):
    def write(fd: int, part: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space left"):
        make_file(TITLE, [b"x"])
    monkeypatch.undo()
    assert not open_here()
