"""Marks that parametrized tests share."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """Values that only ``make test`` tries, not ``make check``. A tuple is one set of arguments."""
    each = (v if isinstance(v, tuple) else (v,) for v in values)
    return [pytest.param(*v, marks=pytest.mark.slow) for v in each]
