"""Checksums of what was written to a file: a disk that gives other bytes back is an error, and not a wrong loss."""

from __future__ import annotations

import torch

from ..alignment import BLOCK_BYTES

_WORDS = BLOCK_BYTES // 8
_PART_BYTES = 1 << 20  # small enough for the cache
# Odd, so that no change of a single word goes unseen, and different, so that words cannot change places.
_WEIGHTS = torch.arange(1, 2 * _WORDS, 2, dtype=torch.int64) * 0x9E3779B97F4A7C1


def sums(raw: torch.Tensor) -> torch.Tensor:
    """One 64-bit sum of every block of ``raw``, uint8 of whole blocks: its words, weighted, modulo 2**64."""
    blocks = raw.view(torch.int64).view(-1, _WORDS)
    step = _PART_BYTES // BLOCK_BYTES
    return torch.cat([(blocks[at : at + step] * _WEIGHTS).sum(1) for at in range(0, len(blocks), step)])


class Checksums:
    """Sums of the blocks of one file; nothing is known of a block before its first direct write."""

    def __init__(self, nbytes: int) -> None:
        count = nbytes // BLOCK_BYTES
        self._sums = torch.zeros(count, dtype=torch.int64)
        self._known = torch.zeros(count, dtype=torch.bool)

    def record(self, offset: int, raw: torch.Tensor) -> None:
        """``raw`` is about to be written at ``offset``."""
        here = _range(offset, raw.numel())
        self._sums[here] = sums(raw)
        self._known[here] = True

    def forget(self, offset: int, nbytes: int) -> None:
        """These bytes were written in another way."""
        self._known[_range(offset, nbytes)] = False

    def differs(self, offset: int, raw: torch.Tensor) -> int | None:
        """Where in the file the first block begins that ``raw``, read at ``offset``, has wrong; None: nowhere."""
        here = _range(offset, raw.numel())
        wrong = self._known[here] & (self._sums[here] != sums(raw))
        return offset + int(wrong.nonzero()[0]) * BLOCK_BYTES if wrong.any() else None


def _range(offset: int, nbytes: int) -> slice:
    return slice(offset // BLOCK_BYTES, (offset + nbytes) // BLOCK_BYTES)
