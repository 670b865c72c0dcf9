"""Marks that parametrized tests share."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """Values that only ``make test`` tries, not ``make check``. A tuple is one set of arguments."""
    return _marked(pytest.mark.slow, values)


def thorough(*values: Any) -> list[Any]:
    """Values that only ``make test-all`` tries."""
    return _marked(pytest.mark.thorough, values)


def _marked(mark: pytest.MarkDecorator, values: tuple[Any, ...]) -> list[Any]:
    each = (v if isinstance(v, tuple) else (v,) for v in values)
    return [pytest.param(*v, marks=mark) for v in each]
