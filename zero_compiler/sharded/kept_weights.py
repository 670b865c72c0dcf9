"""Full weights that outlive the forward that read them: found where a later forward may compute with them.

In plain PyTorch a weight that a forward keeps (in a list, a partial, another module) is the parameter, and follows it.
A full weight is a copy: what is kept has the values of then, and no gradient reaches the parameter from it later. Who
still holds the memory of a copy is not known: the model, a graph, or the user, to whom a forward has returned it. So
memory that is held behind a change of its parameter is only said in a warning. What a compiled frame is given is known.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..errors import ShardError
from ..tensors.full_weight import FULL
from . import parameter_errors

log = logging.getLogger("zero_compiler")


@dataclass(frozen=True)
class _HeldCopy:
    """Memory of a full weight: of which parameter, that parameter's version then, and in whose forward.

    ``copy``: it is not the memory of the parameter. ``whole``: what has it is the weight itself and no view of it.
    """

    storage: StorageWeakRef
    param: weakref.ref[DTensor]
    version: int
    name: str
    scope: weakref.ref[object]
    copy: bool
    whole: bool

    def stale(self) -> bool:
        param = self.param()
        return self.copy and param is not None and param._version != self.version

    def loses_gradient(self, given: torch.Tensor) -> bool:
        """Whether code that is ``given`` this computes a gradient of the parameter in plain PyTorch, and none here.

        A parameter that the forward has made of the weight (``nn.Parameter(w)``) has a gradient of its own in both.
        """
        param = self.param()
        trained = param is not None and param.requires_grad and torch.is_grad_enabled()
        return trained and self.whole and hasattr(given, FULL) and given.is_leaf


# By the address of torch's storage, which is no other's while a weak reference holds it.
_kept: dict[int, _HeldCopy] = {}
_said: weakref.WeakKeyDictionary[object, set[str]] = weakref.WeakKeyDictionary()  # names, by scope


def add(scope: object, name: str, param: DTensor, full: torch.Tensor, whole: bool = True) -> None:
    """A forward has read ``full``, the weight of ``param``, or a compiled part of it returns that or a view of it."""
    memory = full._local_tensor if isinstance(full, DTensor) else full
    if param.is_inference() or memory.is_meta or isinstance(memory, FakeTensor):
        return
    storage = memory.untyped_storage()
    copy = storage._cdata != param._local_tensor.untyped_storage()._cdata
    if copy or whole:
        of = weakref.ref(param), param._version, name, weakref.ref(scope)
        _kept[storage._cdata] = _HeldCopy(StorageWeakRef(storage), *of, copy, whole)


def _drop_freed() -> None:
    for key, kept in list(_kept.items()):  # a copy: other threads add to it
        if kept.storage.expired():
            _kept.pop(key, None)


def look(scope: object) -> None:
    """A forward begins outside of compiled code: say once of each weight that memory of it is held since another
    forward, and that the parameter has changed."""
    # Within a backward the graph still holds its own.
    if not _kept or torch._C._current_graph_task_id() != -1:
        return
    _drop_freed()
    for kept in list(_kept.values()):
        if kept.scope() is scope and kept.stale():
            said = _said.setdefault(scope, set())
            if kept.name not in said and _stays(kept.storage):
                said.add(kept.name)
                log.warning("%s", parameter_errors.still_held(kept.name))


def _stays(storage: StorageWeakRef) -> bool:
    """Whether memory is held for longer than a thread of the process group does, which has just filled it."""
    for _ in range(10):
        if storage.expired():
            return False
        time.sleep(0.005)
    return True


def check(args: Iterable[object]) -> None:
    """A compiled frame is called with ``args`` beside its parameters.

    Raises:
        ShardError: one of them is a weight of an earlier forward, or a view of it, that has other values than the
            parameter now or gives it no gradient.
    """
    if not _kept:
        return
    _drop_freed()
    for arg in args if _kept else ():
        if not isinstance(arg, torch.Tensor):
            continue
        memory = arg._local_tensor if isinstance(arg, DTensor) else arg
        kept = _kept.get(memory.untyped_storage()._cdata) if memory.layout is torch.strided else None
        if kept is None:
            continue
        if kept.stale() or kept.loses_gradient(arg):
            raise ShardError(parameter_errors.kept(kept.name))
