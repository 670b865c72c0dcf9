"""Models and optimizers that a library has made, before it trains them: sharded and compiled in place."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from ..config import PLACED_FIELDS, Config
from ..errors import ConfigError, IntegrationError, TransferError
from ..optim.optimizer import StreamedOptimizer
from ..optim.optimizer import optimizer as zero_optimizer
from ..params.modules import is_root, sharded_models_of, state_of
from ..params.refusals import refuse
from ..params.shard import shard
from ..ranks.attendance import all_come
from ..ranks.call_handshake import begin
from ..ranks.group import group_of, group_timeout_s

log = logging.getLogger("zero_compiler")

_DROPPED = "_zero_dropped"  # of an optimizer that is to make its first states again
_sharded: WeakIdKeyDictionary = (
    WeakIdKeyDictionary()
)  # the parameter that stands in the place of each old one


def shard_and_compile(
    model: nn.Module,
    config: Config,
    *,
    optimizers: Collection[torch.optim.Optimizer] = (),
    mesh: DeviceMesh | None = None,
    device: torch.device | str | None = None,
    compile_options: dict[str, object] | None = None,
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
                    _drop_fresh(optimizer, param, names[id(param)])
                    places.append((group["params"], index, names[id(param)]))
                    # The whole parameter is freed when it is cut, and not when the last one was.
                    group["params"][index] = None
    before = {name: weakref.ref(p) for name, p in model.named_parameters(remove_duplicate=False)}
    shard(model, config=config, mesh=mesh, device=device)
    after = dict(model.named_parameters(remove_duplicate=False))
    for params, index, name in places:
        params[index] = after[name]
    for optimizer in optimizers:
        _make_again(optimizer)
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
                _drop_fresh(optimizer, param, "a parameter")
                group["params"][index] = new
    _make_again(optimizer)


def streamed(optimizer: torch.optim.Optimizer, config: Config) -> torch.optim.Optimizer:
    """The optimizer itself, or, where states, gradients or parameters may rest on another tier, a ``zero.optimizer`` of
    the same class over the same groups.

    The two share the list of these groups from then on, also when states are loaded. So a scheduler of the old
    optimizer sets the rates of the new one, whoever holds it: another scheduler, or the user alone.
    """
    if isinstance(optimizer, StreamedOptimizer) or not moves(config):
        return optimizer
    made = zero_optimizer(type(optimizer), optimizer.param_groups, **_arguments(optimizer))
    optimizer.param_groups = made.param_groups
    # A scheduler warns where its optimizer has made no step before it.
    made.register_step_post_hook(lambda *_: optimizer.__dict__.update(_opt_called=True))
    optimizer.register_state_dict_pre_hook(_refuse_states)
    optimizer.register_load_state_dict_pre_hook(_refuse_states)
    return made


def _refuse_states(replaced: torch.optim.Optimizer, *_: object) -> None:
    """
    Raises:
        IntegrationError: always. An optimizer that was replaced would save no states, and load them for nobody.
    """
    raise IntegrationError(
        f"this {type(replaced).__name__} was replaced by a zero.optimizer when it was prepared, and has no states of "
        "its own: save and load those of the optimizer that prepare() or setup() returned"
    )


def _arguments(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """By name, those with which an optimizer can be made again."""
    taken = inspect.signature(type(optimizer).__init__).parameters
    return {k: v for k, v in optimizer.defaults.items() if k in taken}


def moves(config: Config) -> bool:
    """Whether anything that a step of an optimizer reads or writes may rest elsewhere than on the compute device."""
    return config.device_rest_bytes is not None or any(
        getattr(config, name) not in (None, "none") for name in PLACED_FIELDS
    )


def _drop_fresh(optimizer: torch.optim.Optimizer, param: torch.Tensor, name: str) -> None:
    """States of a whole parameter that is about to be cut are dropped where no step has been made, as those that
    Adagrad makes at its construction: :func:`_make_again` makes them of the rows."""
    state = optimizer.state.get(param)
    if not state:
        return
    if "step" not in state or float(state["step"]) != 0:
        raise IntegrationError(
            f"the {type(optimizer).__name__} has states of the whole {name} already, and zero cuts that one: load "
            "states of an optimizer, and step it, after its model was prepared"
        )
    del optimizer.state[param]
    optimizer.__dict__[_DROPPED] = True


def _make_again(optimizer: torch.optim.Optimizer) -> None:
    if optimizer.__dict__.pop(_DROPPED, False):
        made = type(optimizer)([dict(group) for group in optimizer.param_groups], **_arguments(optimizer))
        for param, state in made.state.items():
            if param not in optimizer.state:
                optimizer.state[param] = state


def come_together(objects: Iterable[object], call: str, also: str = "") -> None:
    """A ``call`` of a library begins that reads the rows of all ranks of the models among these objects.

    Args:
        also: which other calls make it, for the message.

    Raises:
        ShardError: not all ranks have come. This one alone would wait until the process group gives up.
        TransferError: the same, of ranks that have ended.
        ZeroError: another rank has failed, or is in another call.
    """
    for model in objects:
        if not isinstance(model, nn.Module):
            continue
        sharded = sharded_models_of(model)
        group = group_of(sharded)
        if group is None or all(m.opened for m in sharded):  # inside zero.gathered each rank has all of it
            continue
        reason = _ALL.format(also=also)
        try:
            # A rank may compute or upload alone for long before: only the process group's timeout says that it is late.
            came = all_come(group, call, group_timeout_s(group))
        except TransferError as error:  # of a rank that has ended, maybe rightly
            raise TransferError(f"{error}; {reason}") from error
        if not came:
            refuse(next(m for m in model.modules() if state_of(m) is not None), call, reason)
        begin(group, call)


_ALL = (
    "it reads the rows of all ranks, and not all ranks have come to it; let all of them call it{also}, with no "
    "condition on the rank around it: where one file is written, the first rank alone writes it"
)


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


# Of `zero-compiler run`, in a process that it has started: what its flags and its --config say.
flags: Config | None = None


def configured(who: str, base: Config | None = None, fields: Mapping[str, object] | None = None) -> Config:
    """How a script trains: what it says itself (``fields`` over ``base``), and what ``zero-compiler run`` was given. As
    everywhere, a field that is given twice must agree.

    Args:
        who: what of the script has said it, for the message.

    Raises:
        ConfigError: unknown or contradictory fields, or two values for one field.
    """
    of_script = {} if fields is None else dict(fields)
    of_run = {} if flags is None else {name: getattr(flags, name) for name in flags._given}
    if isinstance(base, Config):
        _refuse_contradiction(who, base, base._given, of_run)
    made = Config.make(base, {**of_run, **of_script})
    _refuse_contradiction(who, made, of_script, of_run)
    return made


def _refuse_contradiction(
    who: str, config: Config, said: Collection[str], of_run: Mapping[str, object]
) -> None:
    for name, value in of_run.items():
        if name in said and getattr(config, name) != value:
            raise ConfigError(
                f"{name} was given twice: zero-compiler run says {value!r}, and {who} in the script says "
                f"{getattr(config, name)!r}; give it once"
            )


# What `zero-compiler run` hears of models that are sharded: called with who trains them and how.
listeners: list[Callable[[str, Config], None]] = []


def tell(who: str, config: Config) -> None:
    for listener in listeners:
        listener(who, config)
