"""The C library's heap: large tensors that come and go stay out of it, and what tensors have left is given back.

glibc takes a block from the system, and gives it back when it is freed, only above a threshold, which rises to 32 MiB
with the blocks that are freed. Blocks below it come out of the heap. torch asks for them aligned, so what such a block
leaves is smaller than what the next one of the same size asks for, alignment included. Where anything that lives on
lies in between, each takes fresh memory: tensors that are made and dropped one after the other, each with some small
ones that stay, take as much as all of them together. (glibc manual, "Malloc Tunable Parameters"; seen with 2.36.) Once
a plan runs on the CPU, torch's allocator is one that asks for what such a block leaves
(csrc/include/zero/cpu_allocator.h); where another one stays, or before, only what is below here helps.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_APART_BYTES = 1 << 20
# Where glibc's own threshold ends; it frees the end of the heap from twice that on.
_HIGHEST_BYTES = 32 << 20
_inside = 0  # how many are in `apart`: the threshold is one for the whole process


@functools.cache
def _libc() -> ctypes.CDLL | None:
    """glibc; None with another C library, or where the user has set how this one allocates."""
    libc = ctypes.CDLL(None)
    told = any(f"MALLOC_{what}_THRESHOLD_" in os.environ for what in ("MMAP", "TRIM"))
    told = told or "_threshold" in os.environ.get("GLIBC_TUNABLES", "")
    return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") and not told else None


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Inside, blocks of 1 MiB and more are given back to the system when they are freed, now or later.

    For tensors that are made once and dropped: each touches its pages for the first time. In all threads. Afterwards
    the threshold is as high as glibc itself would raise it.
    """
    global _inside
    libc = _libc()
    if libc is None:
        yield
        return
    _inside += 1
    libc.mallopt(_M_MMAP_THRESHOLD, _APART_BYTES)
    try:
        yield
    finally:
        _inside -= 1
        if not _inside:
            libc.mallopt(_M_MMAP_THRESHOLD, _HIGHEST_BYTES)
            libc.mallopt(_M_TRIM_THRESHOLD, 2 * _HIGHEST_BYTES)


def may_be_tuned() -> bool:
    """Whether the heap is glibc's, and the user has left its settings alone."""
    return _libc() is not None


def give_back() -> None:
    """Free pages of the heap go back to the system, also those below its end."""
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(0)
