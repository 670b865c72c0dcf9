"""What others' libraries would do to a sharded model, refused in one sentence each before they begin.

A library reaches a sharded model by a method of it, by an attribute that the library sets on it, by a hook, or by
making it a part of a wrapper. Those are the places where the refusals stand; nothing of torch or of the library is
changed. Each is a :class:`~zero_compiler.errors.ShardError` that says what to write. Nothing has been done by then, so
that a caller who catches it goes on. A rank that saves, for which its peers may wait, lets them end at their next call
with the same reason.
"""

from __future__ import annotations

import functools
import inspect
import logging
import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from ..errors import ShardError
from ..ranks.failure_broadcast import fail_later
from ..sharded.write_detector import code_may_write

log = logging.getLogger("zero_compiler")

_SAVE = (
    "the parameters of a sharded model are rows of this rank: write `with zero.gathered(model):` around {call}, which "
    "all ranks enter, and call it there (on one rank or on all); torch.distributed.checkpoint saves the shards as they "
    "are"
)
_MERGE = (
    "a merge computes with whole weights, and the parameters of a sharded model are rows of this rank: write `with "
    "zero.gathered(model, write=True):` around {call}, which all ranks enter"
)
_SHAPES = "the shape of a sharded parameter cannot change: call {call} before zero.shard, and make the optimizer behind"
# Methods of models and layers of libraries that read or write whole parameters. Inside zero.gathered they work.
METHODS = {
    "save_pretrained": _SAVE,
    "push_to_hub": _SAVE,
    "merge": _MERGE,
    "unmerge": _MERGE,
    "merge_adapter": _MERGE,
    "unmerge_adapter": _MERGE,
    "merge_and_unload": _MERGE,
    "resize_token_embeddings": _SHAPES,
}
# How all ranks together do what one alone cannot, by method: called with the module, the method of its class, and the
# arguments. It returns whether that was done; where not, the call is refused. `save_pretrained.py` puts it here.
together: dict[str, Callable[[Any, Callable[..., object], tuple[object, ...], dict[str, object]], bool]] = {}
# Of these other classes have methods of another meaning: only those of adapters are meant.
_OF_ADAPTERS = frozenset({"merge", "unmerge"})


def refuse(module: Any, call: str, reason: str) -> NoReturn:
    """Raise, and let the next call of every other rank end with this: it may be that this rank alone is here."""
    error = _refusal(module, call, reason)
    fail_later(module._zero.sharded_model.group, error, f"go on behind {call}")
    raise error


def _refusal(module: object, call: str, reason: str) -> ShardError:
    return ShardError(f"{call} of a sharded {type(module).__name__}: {reason.format(call=call)}")


def refusing(base: type) -> dict[str, object]:
    """Members of the class of a sharded module whose class was ``base``: they stand before those of ``base``."""
    body: dict[str, object] = {name: _hook_registration(name) for name in _HOOKS}
    body["_is_fsdp_managed_module"] = _RefusedAttribute("_is_fsdp_managed_module", _refuse_fsdp)
    body |= _passed_over()
    body["qconfig"] = _RefusedAttribute("qconfig", _refuse_quantization)
    body["__prepare_scriptable__"] = _refuse_scripting
    for name, reason in METHODS.items():
        method = getattr(base, name, None)
        if method is None or (name in _OF_ADAPTERS and not hasattr(base, "get_delta_weight")):
            continue
        body[name] = _refused_method(name, method, reason)
    return body


def _refused_method(name: str, method: Callable[..., object], reason: str) -> Callable[..., object]:
    @functools.wraps(method)
    def call(self: Any, *args: object, **kwargs: object) -> object:
        if self._zero.sharded_model.opened or _changes_nothing(self, name, args, kwargs):
            return method(self, *args, **kwargs)
        if reason is not _SAVE:
            raise _refusal(self, name + "()", reason)
        if name not in together or not together[name](self, method, args, kwargs):
            refuse(self, name + "()", reason)
        return None

    return call


def _changes_nothing(module: Any, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Whether token embeddings are asked for with the number of rows that they have, or values are given that are to be
    saved in the place of the model's own."""
    if name in ("save_pretrained", "push_to_hub"):
        return kwargs.get("state_dict") is not None
    if name != "resize_token_embeddings" or len(args) > 1 or kwargs.get("pad_to_multiple_of") is not None:
        return False
    wanted = args[0] if args else kwargs.get("new_num_tokens")
    return wanted is None or wanted == module.get_input_embeddings().weight.shape[0]


# Attributes by which a library says that it takes a module ------------------------------------------------------


class _RefusedAttribute:
    """An attribute that a module does not have, and that nobody may set."""

    def __init__(self, name: str, refuse_it: Callable[[Any], NoReturn]) -> None:
        self.name = name
        self.refuse_it = refuse_it

    def __get__(self, module: object, owner: type | None = None) -> object:
        if module is None:
            return self
        # The integration with a library may have put it there. Dynamo compiles no module as a whole that it takes for
        # one of FSDP.
        if self.name in module.__dict__ and torch._guards.TracingContext.try_get() is None:
            return module.__dict__[self.name]
        raise AttributeError(f"{type(module).__name__!r} object has no attribute {self.name!r}")

    def __set__(self, module: object, value: object) -> None:
        self.refuse_it(module)

    def __bool__(self) -> bool:
        return (
            False  # Dynamo of torch 2.14 finds this in the class, and takes what is true for the mark of FSDP
        )


def wrapped(by: str) -> str:
    """What is wrong with another way to train in parallel, around a sharded model."""
    return (
        f"{by} around a sharded model: zero.shard has partitioned its parameters and reduces its gradients already; "
        f"leave {by} out and train the model itself, or leave zero.shard out"
    )


def _passed_over() -> dict[str, object]:
    """By what fully_shard passes over a module within the one that it is given, as it does over those of replicate():
    the parameters of a sharded model are not its own."""
    return {REGISTRY_KEY: {"replicate": None}}


def _refuse_fsdp(module: nn.Module) -> NoReturn:
    raise ShardError(wrapped("FullyShardedDataParallel (or fully_shard)"))


def _refuse_quantization(module: nn.Module) -> NoReturn:
    raise ShardError(
        f"quantization of a sharded {type(module).__name__} (torch.ao.quantization sets qconfig): it replaces modules "
        "by others that hold whole weights; quantize before zero.shard, or a copy of the model that is made from "
        "zero.gathered(model)"
    )


def _refuse_scripting(self: Any) -> object:
    if self._zero.sharded_model.opened:
        return self
    raise ShardError(
        f"torch.jit.script of a sharded {type(self).__name__}: TorchScript has no parameters that are gathered; script "
        "a plain model that has loaded its values, for instance a state_dict that was taken in zero.gathered(model)"
    )


def refuse_tracers(name: str) -> None:
    """A weight is read by code that a tracer follows: it would take the gathered copy for a constant, and what it makes
    of the model would neither train nor follow the weight.

    Raises:
        ShardError: on every rank that traces; nothing is sent.
    """
    if torch._C._get_tracing_state() is not None:
        by = "torch.jit.trace (or torch.onnx.export(dynamo=False))"
    elif is_fx_symbolic_tracing():
        if _linearizes():
            return
        by = "torch.fx (symbolic_trace or make_fx)"
    else:
        return
    raise ShardError(
        f"{by} follows a forward that reads the sharded parameter {name!r}, and would keep its values as constants: "
        "trace in `with zero.gathered(model):`, which all ranks enter, or the plain model before zero.shard"
    )


def _linearizes() -> bool:
    """Whether what traces is ``torch.func.linearize``, whose result is to keep the weights that it was made with."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not torch.func.linearize.__code__:
        frame = frame.f_back
    return frame is not None


# Wrappers -----------------------------------------------------------------------------------------------------------


def refuse_wrappers(is_sharded: Callable[[nn.Module], bool]) -> None:
    """From now on, refuse that DDP, DataParallel or FSDP takes a module that is sharded or contains one that is.

    Args:
        is_sharded: whether a module is one of a sharded model.
    """

    def registered(wrapper: nn.Module, name: str, module: nn.Module) -> None:
        if torch.compiler.is_compiling():  # a module that a forward makes; Dynamo follows this function
            return
        if isinstance(wrapper, _wrappers()) and isinstance(module, nn.Module):
            if any(is_sharded(m) for m in module.modules()):
                raise ShardError(wrapped(type(wrapper).__name__))

    nn.modules.module.register_module_module_registration_hook(registered)


@functools.cache
def _wrappers() -> tuple[type, ...]:
    found: list[type] = [nn.DataParallel]
    if torch.distributed.is_available():
        from torch.distributed.fsdp import FullyShardedDataParallel

        found += [nn.parallel.DistributedDataParallel, FullyShardedDataParallel]
    return tuple(found)


# Hooks ----------------------------------------------------------------------------------------------------------

_HOOKS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_backward_hook",
)
_PROCESS_WIDE = "register_module_forward_hook"
_said_late: set[str] = set()


def _hook_registration(name: str) -> Callable[..., object]:
    register: Any = getattr(nn.Module, name)

    @functools.wraps(register)
    def call(self: Any, hook: object, *args: object, **kwargs: object) -> object:
        _check_hook(hook)
        if "forward" in name and code_may_write(hook):  # as the code of the module may
            self._zero.sharded_model.writes = True
        if name not in _said_late and any(
            sharded_model.frames for sharded_model in self._zero.sharded_model.scope.members
        ):
            _say_late(name, f"{name} on a {type(self).__name__}")
        return register(self, hook, *args, **kwargs)

    return call


def _say_late(name: str, registered: str) -> None:
    _said_late.add(name)
    log.warning(
        "%s of a model that was compiled and called already: torch.compile does not look for new hooks, and compiled "
        "calls may leave this one out; register hooks before the first call, or call torch._dynamo.reset() behind the "
        "registration, which compiles the model anew",
        registered,
    )


def process_wide_hooks() -> set[int]:
    """Hooks that are called for all modules (``torch.nn.modules.module.register_module_forward_hook``), by their
    numbers."""
    of = nn.modules.module
    return {
        *of._global_forward_hooks,
        *of._global_forward_pre_hooks,
        *of._global_backward_hooks,
        *of._global_backward_pre_hooks,
    }


def look_for_late_hooks(known: set[int]) -> None:
    """A compiled frame is called: say it once where a hook for all modules is not among those that are ``known`` since
    the frame was compiled. Nothing of ours is asked when one is registered."""
    if _PROCESS_WIDE not in _said_late and not process_wide_hooks() <= known:
        _say_late(
            _PROCESS_WIDE, "a hook for all modules (register_module_forward_hook or the like) on the modules"
        )


def _check_hook(hook: object) -> None:
    """Raise where a hook is how a library takes the module over."""
    from torch.nn.utils.prune import BasePruningMethod
    from torch.nn.utils.spectral_norm import SpectralNorm
    from torch.nn.utils.weight_norm import WeightNorm

    if isinstance(hook, (BasePruningMethod, SpectralNorm, WeightNorm)):
        raise ShardError(
            f"{type(hook).__name__} of torch.nn.utils on a sharded module computes its weight from shards: apply it "
            "before zero.shard"
        )
    owner = getattr(hook, "__self__", None)
    if isinstance(hook, types.MethodType) and type(owner).__module__.startswith("torch.distributed."):
        by = {"FSDPState": "fully_shard", "_ReplicateState": "replicate"}.get(type(owner).__name__)
        if by is not None:
            raise ShardError(wrapped(by))
