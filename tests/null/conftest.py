"""What tests of several files begin with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from null.io_common import BACKENDS
from null.offloaded import fields_in
from standin import accelerator
from torch import nn

import zero_compiler.compile.backend  # noqa: F401 (registers a hook of torch's, see no_trace_left)
from zero_compiler.storage import aio


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


@pytest.fixture
def no_trace_left() -> Iterator[None]:
    """Of partitioned construction, once its scope has ended."""
    hooks = nn.modules.module
    # The backend has one of each, for what torch.compile is given, and what that is given later.
    kinds = hooks._global_module_registration_hooks, hooks._global_parameter_registration_hooks
    before = [dict(kind) for kind in kinds]
    yield
    assert torch.overrides._len_torch_function_stack() == 0
    assert list(kinds) == before
    assert not dist.is_initialized()


@pytest.fixture(params=["threads", "uring"])
def backend(request: pytest.FixtureRequest) -> str:
    """Of file I/O."""
    if request.param not in BACKENDS:
        pytest.skip(f"no io_uring here: {aio.uring_refusal()}")
    return request.param


@pytest.fixture
def io(backend: str) -> Iterator[aio.Engine]:
    with aio.Engine(backend=backend, block_bytes=64 << 10, depth=4) as engine:
        yield engine
