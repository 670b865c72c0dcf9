"""What tests of several files begin with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from null.offloaded import fields_in
from standin import accelerator


@pytest.fixture
def on_accelerator() -> Iterator[None]:
    """Models of the test are on an accelerator, in whose place a CPU stands."""
    with accelerator():
        yield


@pytest.fixture
def with_files(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Placement fields for activations in files, for a disk and a way to the host that it is given."""
    return fields_in(tmp_path)


@pytest.fixture(params=["cpu", "accelerator"])
def with_files_anywhere(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[..., dict[str, Any]]]:
    """The same where compute is on the CPU, and where it is on an accelerator: files are behind its host."""
    with accelerator() if request.param == "accelerator" else contextlib.nullcontext():
        yield fields_in(tmp_path)
