"""What tests of several files begin with."""

from __future__ import annotations

import pytest
from dist.streamed import MODULE


@pytest.fixture
def small_sub_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers update the larger weights of ``streamed.Net`` in pieces."""
    monkeypatch.setattr(MODULE, "SUB_GROUP_BYTES", 16 << 10)
