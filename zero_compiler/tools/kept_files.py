"""Files that runs have left in an ``nvme_dir`` (``Config.nvme_keep``): whose they are, and whether they still run."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

# As `zero_compiler/storage/stores.py` names them: the process that made it, eight random digits, and what it holds.
_NAME = re.compile(r"zero-(\d+)-[0-9a-f]{8}-.+")


@dataclass(frozen=True)
class Kept:
    """A file of a run: its path, bytes on the disk, the process that made it, and whether that, or another one, may
    still use it."""

    path: str
    nbytes: int
    pid: int
    in_use: bool


def kept_files(directory: str) -> Iterator[Kept]:
    """Those in ``directory``, by name.

    Raises:
        OSError: it cannot be listed.
    """
    for name in sorted(os.listdir(directory)):
        found, path = _NAME.fullmatch(name), os.path.join(directory, name)
        if found is None or os.path.islink(path) or not os.path.isfile(path):
            continue
        pid = int(found[1])
        try:
            status = os.stat(path)
            in_use = _held(path) or _made_by(pid, status)
        except FileNotFoundError:  # removed since
            continue
        yield Kept(path, status.st_blocks * 512, pid, in_use)


def _held(path: str) -> bool:
    """Whether a process holds it open: a run locks what it keeps for as long as it may use it, also in another
    container. What may not be looked at counts as held."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(fd)


def _made_by(pid: int, status: os.stat_result) -> bool:
    """Whether the process that made the file still runs: one that has the number of an ended one began later than the
    file was last changed."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            began = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        with open("/proc/stat") as file:
            booted = next(int(line.split()[1]) for line in file if line.startswith("btime"))
    except (OSError, ValueError, StopIteration):
        return False
    return booted + began <= status.st_mtime + 2.0  # the kernel rounds both
