"""Waiting for a collective in slices of time."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from zero_compiler.ranks import peer_waits

GROUP = SimpleNamespace(device=torch.device("cpu"))


class Late:
    """Ends between the end of the first slice and the look whether it has."""

    def __init__(self, error: str = "") -> None:
        self.error, self.ended = error, False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.ended:
            self.ended = True
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        return self.ended


def test_a_collective_that_ends_with_its_slice_has_not_failed():
    peer_waits.wait(Late(), GROUP)


def test_one_that_has_failed_says_its_own_reason():
    with pytest.raises(RuntimeError, match="the peer is gone"):
        peer_waits.wait(Late("the peer is gone"), GROUP)
