"""A limit on the memory of one process, page cache included, and what the process took of it."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


@dataclass
class Group:
    """A memory cgroup below this process's own; ``why`` says why there is none."""

    path: Path | None = None
    why: str = ""

    def enter(self, pid: int) -> None:
        """Put a process into it: what that process takes from here on counts."""
        if self.path is not None:
            (self.path / "cgroup.procs").write_text(str(pid))

    def peak_bytes(self) -> int | None:
        """The most that its processes and their page cache took at once; None where nobody counted."""
        for name in ("memory.max_usage_in_bytes", "memory.peak"):
            if self.path is not None and (self.path / name).exists():
                return int((self.path / name).read_text())
        return None


@contextlib.contextmanager
def cgroup(limit_bytes: int) -> Iterator[Group]:
    """A memory cgroup with a limit, where one can be made; swap does not stretch it. Removed at the end."""
    group = Group()
    try:
        group.path, version = _make()
        names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes") if version == 1 else ("memory.max",)
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a kernel that does not count swap
                (group.path / name).write_text(str(limit_bytes))
        if version == 2:
            with contextlib.suppress(FileNotFoundError):
                (group.path / "memory.swap.max").write_text("0")
    except OSError as error:
        group.why = f"no memory cgroup can be made here: {error.strerror} ({error.filename})"
        if group.path is not None:
            group.path.rmdir()
            group.path = None
    try:
        yield group
    finally:
        if group.path is not None:
            _remove(group.path)


def _make() -> tuple[Path, int]:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _child(_ROOT / "memory" / own.lstrip("/")), 1
        if controllers == "":
            unified = _ROOT / own.lstrip("/")
    path = _child(unified)
    if not (path / "memory.max").exists():
        path.rmdir()
        raise OSError(0, "the memory controller is not given to this cgroup", str(unified))
    return path, 2


def _child(own: Path) -> Path:
    path = own / f"zero-limit-{os.getpid()}-{time.monotonic_ns()}"
    path.mkdir()
    return path


def _remove(path: Path) -> None:
    for _ in range(100):  # a process that has ended leaves a moment later
        try:
            return path.rmdir()
        except OSError:
            time.sleep(0.05)
    print(f"could not remove {path}")


@dataclass
class Watch:
    """Samples what a process has resident, of anonymous, shared and file pages together, while it runs."""

    pid: int
    every_s: float = 0.02
    peak_bytes: int = 0
    parts: dict[str, int] = field(default_factory=dict)  # at the peak

    def __enter__(self) -> Watch:
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(self.every_s):
            parts = resident(self.pid)
            if sum(parts.values()) > self.peak_bytes:
                self.peak_bytes, self.parts = sum(parts.values()), parts


def resident(pid: int) -> dict[str, int]:
    """RssAnon, RssShmem and RssFile of a process in bytes; nothing of one that has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    return {k: int(v) * 1024 for k, v in re.findall(r"^(Rss\w+):\s+(\d+) kB", text, re.M)}


def moved(pid: int) -> tuple[int, int]:
    """Bytes that a process has read from disks and written to them, by the kernel's account."""
    found = dict(re.findall(r"^(\w+): (\d+)", Path(f"/proc/{pid}/io").read_text(), re.M))
    return int(found["read_bytes"]), int(found["write_bytes"])
