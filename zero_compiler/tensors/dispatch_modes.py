"""Modes of torch that see every operator (a ``TorchDispatchMode`` or ``TorchFunctionMode`` that a user has entered),
and operators of this project that are no part of the model: they would count or refuse what the model does not do.

A mode that fakes what it sees (``FakeTensorMode``) is such a mode too: inside :func:`unseen` tensors are real.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

_dispatch_modes: Any = torch._C._len_torch_dispatch_stack
_function_modes: Any = torch._C._len_torch_function_stack
_SELECTIVE = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """No mode sees the operators inside."""
    with contextlib.ExitStack() as left:
        if _function_modes():
            left.enter_context(torch._C.DisableTorchFunction())
        if _dispatch_modes():
            left.enter_context(_disable_current_modes())
        yield


@contextlib.contextmanager
def never_cached() -> Iterator[None]:
    """Selective activation checkpointing keeps nothing of what runs inside, and asks no policy about it.

    A policy that saves what a gather makes would keep a whole weight until backward, and the gather writes to memory
    that was kept before. Modes that only look go on to see a gather, as they see that of FSDP2.
    """
    modes = _get_current_dispatch_mode_stack() if _dispatch_modes() else []
    cached = any(isinstance(mode, _SELECTIVE) for mode in modes)
    faked = any(isinstance(mode, FakeTensorMode) for mode in modes)
    with _disable_current_modes() if cached and not faked else contextlib.nullcontext():
        yield
