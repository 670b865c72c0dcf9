"""What the kernel counts of this process, and what of that no plan has: libraries, Python, what compiling leaves."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import heap

_EVERY_S = 0.1
_MUCH = 8 << 20


@dataclass(frozen=True)
class Resident:
    """Resident bytes of a process: its own pages, those that it shares, pages of files (libraries, mostly), and the
    tables of all of these. All 0 where the system does not say."""

    own: int = 0
    shared: int = 0
    files: int = 0
    tables: int = 0

    @classmethod
    def now(cls, pid: int | str = "self") -> Resident:
        try:
            text = Path(f"/proc/{pid}/status").read_text()
        except OSError:  # ended, or another system
            return cls()
        found = {k: int(v) * 1024 for k, v in re.findall(r"^(Rss\w+|VmPTE):\s+(\d+) kB", text, re.M)}
        return cls(*(found.get(k, 0) for k in ("RssAnon", "RssShmem", "RssFile", "VmPTE")))


@dataclass
class Footprint:
    """What the process of a sharded model has beside the plan of the model, in bytes, as measured.

    ``had``: when the model was sharded, without its shards: Python, libraries, other models and data. ``pages``:
    resident pages of files beside that, which the system takes back when memory is short. ``compiled``: what compiling
    has left, of all ``frames``; with what came between that and the first of them (Dynamo itself, the optimizer, a
    batch), and so with states that a checkpoint has brought before. ``compiling``: the most that compiling a frame took
    beyond what it left, with the compilers that it started.
    """

    had: int = 0
    pages: int = 0
    compiled: int = 0
    compiling: int = 0
    frames: int = 0
    own: int = 0  # of all that it had then, shards included, what it did not share

    def __post_init__(self) -> None:
        # Of a frame whose first call has not begun: own bytes before it, and what was counted since.
        self._counted: tuple[int, int] | None = None

    @classmethod
    def beside(cls, shards: int) -> Footprint | None:
        """Now, of a model whose shards take so many bytes of memory; None where the system does not say."""
        now = Resident.now()
        if not now.own:
            return None
        return cls(max(0, now.own + now.shared + now.tables - shards), now.files, own=now.own)

    @contextlib.contextmanager
    def compiles(self) -> Iterator[None]:
        """Count what compiling a frame inside takes and leaves. Free pages of the heap are given back at its end."""
        heap.give_back()
        before = Resident.now().own if self.frames else self.own
        watch = _FootprintWatch()
        try:
            yield
        finally:
            most = watch.end()
            heap.give_back()
            left = self._left_since(before)
            self._counted = before, left
            self.compiled += left
            self.compiling = max(self.compiling, most - before - left)
            self.frames += 1

    def settle(self) -> None:
        """Count again what the newest frame has left, now that its first call begins and the compiler of Python's code
        is done with it too. Where that is much, what nobody refers to any more is collected before."""
        if self._counted is None:
            return
        before, counted = self._counted
        self._counted = None
        if counted > _MUCH:
            gc.collect()  # graphs are full of cycles
        heap.give_back()
        self.compiled += self._left_since(before) - counted

    def _left_since(self, before: int) -> int:
        now = Resident.now()
        self.pages = max(self.pages, now.files)
        return max(0, now.own - before)


class _FootprintWatch:
    """The most that this process and those that it has started have for themselves, looked at now and then in a thread.

    The system's own account of children that have ended (``RUSAGE_CHILDREN``) is not that: to a child that was made by
    ``vfork`` it counts what its parent had.
    """

    def __init__(self) -> None:
        self._most = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zero-resident", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(_EVERY_S):
            self._look()

    def _look(self) -> None:
        pids: list[int | str] = ["self", *_started(os.getpid())]
        self._most = max(self._most, sum(Resident.now(pid).own for pid in pids))

    def end(self) -> int:
        self._over.set()
        self._thread.join()
        self._look()
        return self._most


def _started(pid: int) -> Iterator[int]:
    """The processes that one has started and that still run, those that they have started with them."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # ended meanwhile
            for child in map(int, path.read_text().split()):
                yield child
                yield from _started(child)
