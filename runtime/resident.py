"""What the kernel counts of this process, and what of that no plan has: libraries, Python, what compiling leaves."""

from __future__ import annotations

import contextlib
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import heap

_KIB = 1024


@dataclass(frozen=True)
class Resident:
    """Resident bytes of this process: its own pages, those that it shares, pages of files (libraries, mostly), and the
    tables of all of these. All 0 where the system does not say."""

    own: int = 0
    shared: int = 0
    files: int = 0
    tables: int = 0

    @classmethod
    def now(cls) -> Resident:
        try:
            text = Path("/proc/self/status").read_text()
        except OSError:
            return cls()
        found = {k: int(v) * _KIB for k, v in re.findall(r"^(Rss\w+|VmPTE):\s+(\d+) kB", text, re.M)}
        return cls(*(found.get(k, 0) for k in ("RssAnon", "RssShmem", "RssFile", "VmPTE")))


@dataclass
class Footprint:
    """What the process of a sharded model has beside the plan of the model, in bytes, as measured.

    ``had``: when the model was sharded, without its shards: Python, libraries, other models and data. ``pages``:
    resident pages of files beside that, which the system takes back when memory is short. ``compiled``: what compiling
    has left, of all frames. ``compiling``: the most that compiling a frame took beyond what it left, with the largest
    compiler that it started.
    """

    had: int = 0
    pages: int = 0
    compiled: int = 0
    compiling: int = 0
    frames: int = 0

    @classmethod
    def beside(cls, shards: int) -> Footprint | None:
        """Now, of a model whose shards take so many bytes of memory; None where the system does not say."""
        heap.give_back()
        now = Resident.now()
        if not now.own:
            return None
        return cls(max(0, now.own + now.shared + now.tables - shards), now.files)

    @contextlib.contextmanager
    def compiles(self) -> Iterator[None]:
        """Count what compiling a frame inside takes and leaves. Free pages of the heap are given back at the end."""
        heap.give_back()
        before, child_s = Resident.now(), _children_s()
        try:
            yield
        finally:
            most = Resident.now()
            heap.give_back()
            after = Resident.now()
            left = max(0, after.own - before.own)
            # A compiler that ran is one of the children waited for; of these the system knows the largest.
            child = _largest_child() if _children_s() > child_s else 0
            self.compiled += left
            self.compiling = max(self.compiling, most.own - before.own - left + child)
            self.pages = max(self.pages, after.files)
            self.frames += 1


def _children_s() -> float:
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime


def _largest_child() -> int:
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * _KIB
