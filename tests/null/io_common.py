"""Tests of file I/O: which back ends there are, buffers with content, and what a process holds."""

from __future__ import annotations

import os
import time

import torch

from zero_compiler.storage import aio

BACKENDS = ["threads", *(["uring"] if aio.uring_refusal() is None else [])]


def filled(nbytes: int, seed: int = 0) -> torch.Tensor:
    block = aio.buffer(nbytes)
    generator = torch.Generator().manual_seed(seed)
    block.copy_(torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8))
    return block


def threads_now() -> int:
    return len(os.listdir("/proc/self/task"))


def descriptors_now() -> int:
    return len(os.listdir("/proc/self/fd"))


def settles(now, want, seconds=10.0) -> bool:
    """The kernel ends a ring's own threads a moment after it is closed."""
    end = time.monotonic() + seconds
    while now() > want and time.monotonic() < end:
        time.sleep(0.02)
    return now() <= want
