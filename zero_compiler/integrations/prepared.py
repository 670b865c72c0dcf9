"""Models and optimizers that a library has made, before it trains them: sharded and compiled in place."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from ..config import Config
from ..errors import IntegrationError
from ..optim.optimizer import StreamedOptimizer
from ..optim.optimizer import optimizer as zero_optimizer
from ..params.modules import is_root, sharded_models_of
from ..params.shard import shard

log = logging.getLogger("zero_compiler")

_TIERS = ("offload_params", "offload_grads", "offload_optimizer")
_sharded: WeakIdKeyDictionary = (
    WeakIdKeyDictionary()
)  # the parameter that stands in the place of each old one


def shard_and_compile(
    model: nn.Module,
    config: Config,
    *,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    mesh: DeviceMesh | None = None,
    device: torch.device | str | None = None,
    compile_options: dict[str, Any] | None = None,
) -> nn.Module:
    """Shard a model in place and let its calls be compiled by zero; ``optimizers`` go on with its new parameters.

    A model that is sharded already is left as it is.
    """
    if is_root(model):
        return model
    inside = model._orig_mod if isinstance(model, torch._dynamo.OptimizedModule) else model
    if inside is not model:
        raise IntegrationError(
            f"the model was compiled by torch.compile before it was sharded, and zero compiles it: give the plain "
            f"{type(inside).__name__}"
        )
    names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
    places = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for index, param in enumerate(group["params"]):
                if id(param) in names:
                    _check_fresh(optimizer, param, names[id(param)])
                    places.append((group["params"], index, names[id(param)]))
                    # The whole parameter is freed when it is cut, and not when the last one was.
                    group["params"][index] = None
    before = {name: weakref.ref(p) for name, p in model.named_parameters(remove_duplicate=False)}
    shard(model, config=config, mesh=mesh, device=device)
    after = dict(model.named_parameters(remove_duplicate=False))
    for params, index, name in places:
        params[index] = after[name]
    for name, ref in before.items():
        if (old := ref()) is not None and old is not after[name]:
            _sharded[old] = weakref.ref(after[name])
    for sharded_model in sharded_models_of(model):
        sharded_model.may_reduce_each = True
    model.compile(backend="zero", **(compile_options or {}))
    # Where ranks generate together, transformers lets each go on until the last has ended.
    model.__dict__["_is_fsdp_managed_module"] = True
    return model


def follow(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer that was made before its model was sharded go on with the sharded parameters."""
    for group in optimizer.param_groups:
        for index, param in enumerate(group["params"]):
            ref = _sharded.get(param)
            new = None if ref is None else ref()
            if new is not None:
                _check_fresh(optimizer, param, "a parameter")
                group["params"][index] = new


def streamed(optimizer: torch.optim.Optimizer, config: Config) -> torch.optim.Optimizer:
    """The optimizer itself, or, where states, gradients or parameters may rest on another tier, a ``zero.optimizer`` of
    the same class over the same groups."""
    if isinstance(optimizer, StreamedOptimizer) or not moves(config):
        return optimizer
    cls = type(optimizer)
    taken = inspect.signature(cls.__init__).parameters
    kw = {k: v for k, v in optimizer.defaults.items() if k in taken}
    return zero_optimizer(cls, optimizer.param_groups, **kw)


def moves(config: Config) -> bool:
    """Whether anything that a step of an optimizer reads or writes may rest elsewhere than on the compute device."""
    return config.device_rest_bytes is not None or any(
        getattr(config, name) not in (None, "none") for name in _TIERS
    )


def _check_fresh(optimizer: torch.optim.Optimizer, param: torch.Tensor, name: str) -> None:
    if optimizer.state.get(param):
        raise IntegrationError(
            f"the {type(optimizer).__name__} has states of the whole {name} already, and zero cuts that one: load "
            "states of an optimizer, and step it, after its model was prepared"
        )


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


# What `zero-compiler run` hears of models that are sharded: called with who trains them and how.
listeners: list[Callable[[str, Config], None]] = []


def tell(who: str, config: Config) -> None:
    for listener in listeners:
        listener(who, config)
