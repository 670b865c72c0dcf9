"""What to do where the operating system gives no more open files."""

from __future__ import annotations

import errno
import resource


def of_open_files(number: int | None) -> str | None:
    """What to do about an error of the operating system by its ``number`` (errno), naming the limit that it met; None
    where that is not the number of open files."""
    if number == errno.EMFILE:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"this process may have {soft} files open at a time: raise that limit (ulimit -n) and start it again"
    if number == errno.ENFILE:
        return "the machine has as many files open as it may: close some, or raise its limit (sysctl fs.file-max)"
    return None
