"""Sums of the blocks of a file: any change of a word and any exchange of two is seen."""

from __future__ import annotations

import torch

from zero_compiler.alignment import BLOCK_BYTES
from zero_compiler.storage.checksums import Checksums, sums


def written(blocks: int = 4) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(0, 256, (blocks * BLOCK_BYTES,), dtype=torch.uint8)


def test_a_changed_byte_is_in_its_block():
    raw = written()
    found = Checksums(raw.numel())
    found.record(0, raw)
    assert found.differs(0, raw) is None
    raw[2 * BLOCK_BYTES + 17] ^= 1
    assert found.differs(0, raw) == 2 * BLOCK_BYTES
    assert found.differs(0, raw[:BLOCK_BYTES]) is None


def test_words_that_change_places_are_seen():
    raw = written(1)
    swapped = raw.view(torch.int64).clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert not torch.equal(sums(raw), sums(swapped.view(torch.uint8)))


def test_nothing_is_known_of_what_was_written_in_another_way():
    raw = written()
    found = Checksums(raw.numel())
    assert found.differs(0, raw) is None  # never written
    found.record(0, raw)
    found.forget(BLOCK_BYTES, BLOCK_BYTES)
    raw[BLOCK_BYTES] ^= 1
    assert found.differs(0, raw) is None
    raw[0] ^= 1
    assert found.differs(0, raw) == 0
