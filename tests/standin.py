"""A CPU in an accelerator's place: tensors "on the device" and "on the host" count apart and pass through pools of their
own, as they would there. Copies between the two are real; they are done at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from zero_compiler.policy import Policy


@contextlib.contextmanager
def accelerator() -> Iterator[None]:
    """Models that are sharded and run inside are on an accelerator."""
    with mock.patch.object(Policy, "apart", True):
        yield
