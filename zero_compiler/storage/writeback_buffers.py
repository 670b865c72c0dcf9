"""Memory from which results go to files, a limited number of bytes at a time.

A result that is made in a block of :meth:`Landing.take` is written from where it lies; any other is copied to such
blocks, part by part. A block is used again when nothing holds what was made in it: fresh memory costs a fault of every
page, which for a gradient takes longer than its product.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..alignment import block_aligned
from .aio import ALIGN, buffer
from .interruptible_io import Guarded, Requests
from .stores import Region

# What one write of a gradient takes at a time. Of the largest gradient twice as many are under way, so that what lands
# together is written while backward goes on, up to a limit; and one is copied.
_WRITE_BYTES = 8 << 20
_WRITES = 16
# Of a memory budget the buffers of one purpose take at most one part in so many.
OF_BUDGET = 8


def write_buffers(largest_bytes: int, budget_bytes: int | None) -> tuple[int, int]:
    """Bytes of one write of gradients at most, and how many are under way or in the making, where the largest gradient
    of a model takes ``largest_bytes`` in its file."""
    size = min(_WRITE_BYTES, block_aligned(largest_bytes))
    if budget_bytes is not None:
        size = min(size, block_aligned(budget_bytes // (OF_BUDGET * (1 + _WRITES))))
    return size, 1 + min(_WRITES, 2 * -(-largest_bytes // max(size, 1)))


@dataclass
class _PendingWrite(Requests):
    memory: torch.Tensor


class Landing(Guarded):
    """Blocks of memory that are written to files.

    The end of what was made in a block may come in any thread, and between any two lines.

    Args:
        limit: bytes that are under way to files, or idle, at most, where nothing larger is made here.
        part: bytes of a block for what is copied.
    """

    def __init__(self, limit: int, part: int) -> None:
        super().__init__()
        self.limit, self.part = limit, part
        # Blocks by their address: those that wait, oldest first, and those that something lies in, which holds them.
        self._idle: dict[int, torch.Tensor] = {}
        self._out: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self._writes: deque[_PendingWrite] = deque()

    def take(self, nbytes: int) -> torch.Tensor:
        """Memory of ``nbytes``, with undefined contents, at the beginning of a block of whole ``ALIGN`` bytes."""
        self._guarded(self._reap)
        return self._taken(nbytes)

    def _taken(self, nbytes: int) -> torch.Tensor:
        size, block = block_aligned(nbytes), None
        # Keys alone: to make tuples of items may end what lies in a block.
        for at in reversed(list(self._idle)):
            if self._idle[at].numel() == size:
                block = self._idle.pop(at)
                break
        if block is None:
            block = buffer(size)
        # What it is the memory of holds this and not the block, so that its end is seen.
        lease = (ctypes.c_char * size).from_address(block.data_ptr())
        weakref.finalize(lease, _back, weakref.ref(self), block).atexit = False
        self._out[block.data_ptr()] = block
        return torch.frombuffer(lease, dtype=torch.uint8)[:nbytes]

    def made_here(self, result: torch.Tensor) -> bool:
        """Whether a contiguous tensor begins where a block does, and ends in its last ``ALIGN`` bytes."""
        block = self._out.get(result.data_ptr())
        return block is not None and result.is_contiguous() and block_aligned(result.nbytes) == block.numel()

    def write(self, region: Region, result: torch.Tensor, begin: int = 0) -> None:
        """Start to write a result to ``region``, from byte ``begin`` on. What was made here must not change before
        :meth:`drain`.

        Raises:
            StorageError: this write, or one before it, failed.
        """
        raw = result.detach().contiguous().view(-1).view(torch.uint8)

        def one() -> None:
            self._engines.add(region.store.engine)
            if self.made_here(raw):
                self._make_room(block_aligned(raw.numel()))
                self._start(region, begin, self._out[raw.data_ptr()], raw)
                return
            for at in range(0, raw.numel(), self.part):
                part = raw[at : at + self.part]
                self._make_room(block_aligned(part.numel()))
                memory = self._taken(part.numel())
                memory.copy_(part)
                self._start(region, begin + at, self._out[memory.data_ptr()], memory)

        self._guarded(one)

    def drain(self) -> None:
        """Wait until everything is written."""
        self._guarded(lambda: self._wait_until(lambda: not self._writes))

    def _start(self, region: Region, begin: int, block: torch.Tensor, memory: torch.Tensor) -> None:
        write = _PendingWrite(memory)
        self._writes.append(write)
        span = region.span(begin, memory.numel(), 0)
        write.requests.append(region.store.write(span, block))

    def _make_room(self, nbytes: int) -> None:
        """Until so many bytes more may be under way."""
        self._reap()
        self._wait_until(lambda: not self._writes or self._under_way() + nbytes <= self.limit)
        for at in list(self._idle):
            if self._under_way() + self._idle_bytes() + nbytes > self.limit:
                del self._idle[at]

    def _reap(self) -> None:
        while self._writes and self._writes[0].done():
            self._finish()

    def _wait_until(self, enough: Callable[[], bool]) -> None:
        while not enough():
            self._finish()

    def _finish(self) -> None:
        self._writes[0].wait()
        self._writes.popleft()

    def _under_way(self) -> int:
        return sum(block_aligned(w.memory.numel()) for w in list(self._writes))

    def _idle_bytes(self) -> int:
        return sum(b.numel() for b in list(self._idle.values()))

    def _drop(self) -> None:
        self._writes.clear()

    def _returned(self, block: torch.Tensor) -> None:
        self._out.pop(block.data_ptr(), None)
        if self._under_way() + self._idle_bytes() + block.numel() <= self.limit:
            self._idle[block.data_ptr()] = block


def _back(landing: weakref.ref[Landing], block: torch.Tensor) -> None:
    """Nothing holds what was made in a block any more."""
    owner = landing()
    if owner is not None:
        owner._returned(block)


assert ALIGN == block_aligned(1)  # what a store calls a block
