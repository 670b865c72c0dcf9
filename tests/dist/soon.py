"""Ranks whose group has a timeout far above what a call takes: an error that comes soon was told, not waited for."""

from __future__ import annotations

import time
from typing import Any

from dist.spawn import run_ranks

SOON_S, GROUP_TIMEOUT_S = 20.0, 120.0


def ranks(body: Any, world: int, *args: Any, **kw: Any) -> list[Any]:
    return run_ranks(body, world, *args, timeout=100.0, group_timeout=GROUP_TIMEOUT_S, **kw)


def raised(kind: type[BaseException], call: Any, *args: Any) -> str:
    """The text of the error of a call, which comes soon."""
    start = time.monotonic()
    try:
        call(*args)
    except kind as error:
        text = str(error)
    else:
        raise AssertionError(f"no {kind.__name__}")
    assert time.monotonic() - start < SOON_S, text
    return text
