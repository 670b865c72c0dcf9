"""Modules of a sharded model: the subclass whose properties turn a shard into a weight inside a forward.

Each module gets a subclass of its own class with one property per managed parameter; nothing else of the
module changes, and nothing of torch.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ..errors import GradientError, ShardError, ZeroError
from ..ranks.group import Group
from ..replicated import averaged_modules
from ..sharded import grads, kept_weights, parameter_errors
from ..sharded.gather_wire import wire_of
from ..sharded.sharded_model import ShardedModel
from ..sharded.write_detector import Copies, may_write, own_code_may_write
from ..tensors import transforms
from ..tensors.dispatch_modes import never_cached
from ..tensors.full_weight import FULL, forget, known, remember
from ..tensors.whole_parameters import stays_whole
from . import eager, parameter_memory, recompile_limit
from .held import inside, named_members
from .optimizer_guards import STALE, mark_stale
from .penalties import watch_outputs
from .refusals import refuse_tracers, refuse_wrappers, refusing
from .sharded_state import state_dict_of
from .weight_op import managed, placed, weight


@dataclass
class ModuleState:
    """What a module of a sharded model knows: that model and the qualified names of its own parameters.

    ``full``: Dynamo has compiled something that it calls for the last time (see `recompile_limit.py`).
    """

    sharded_model: ShardedModel
    names: dict[str, str]
    root: bool
    full: bool = False

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"full": False}  # a copy has code of its own


class _Sharded(nn.Module):
    """For types alone: a module whose class :func:`swap_classes` has swapped."""

    _zero: ModuleState
    _zero_base: type[nn.Module]
    _zero_outermost: Callable[..., object]
    _zero_entered: Callable[..., object]


def is_root(module: nn.Module) -> bool:
    state = state_of(module)
    return state is not None and state.root


def state_of(module: nn.Module) -> ModuleState | None:
    return module.__dict__.get("_zero")


refuse_wrappers(lambda module: state_of(module) is not None)


def sharded_models_of(model: nn.Module) -> list[ShardedModel]:
    """Sharded models of a plain, sharded or compiled module, outermost first, without repeats."""
    model = getattr(model, "_orig_mod", model)
    out: dict[int, ShardedModel] = {}
    for module in model.modules():
        state = state_of(module)
        if state is not None:
            out.setdefault(id(state.sharded_model), state.sharded_model)
    return list(out.values())


def swap_classes(model: nn.Module, sharded_model: ShardedModel) -> None:
    """Give every module of the model its subclass; inner shards join the outer model's scope."""
    owned: dict[int, dict[str, str]] = {}
    names_by_id = {id(sharded_model.param(name)): name for name in sharded_model.places}
    classes: set[object] = {type(module) for module in model.modules()}
    sharded_model.writes = any(may_write(cls) for cls in classes) or any(
        map(own_code_may_write, model.modules())
    )
    for module in model.modules():
        state = state_of(module)
        if state is not None:
            state.sharded_model.belong(sharded_model.scope)
            continue
        own = module._parameters.items()
        names = {a: names_by_id[id(p)] for a, p in own if p is not None and not stays_whole(p)}
        owned[id(module)] = names
        module.__dict__["_zero"] = ModuleState(sharded_model, names, module is model)
        if isinstance(module, nn.RNNBase):
            module.__dict__.pop("_flat_weights", None)  # a list of the whole weights; see sharded_class
        if names:
            module.register_load_state_dict_pre_hook(_lay_out)
        # A property is found before nn.Module.__getattr__, so the instance keeps its parameters where they were.
        module.__class__ = sharded_class(type(module), names, isinstance(module, nn.RNNBase))


def _lay_out(module: nn.Module, state_dict: dict[str, object], prefix: str, *rest: object) -> None:
    """Before ``load_state_dict``: of a whole value for a sharded parameter, as a plain checkpoint has it, take this
    rank's rows. What has another shape is left for torch to refuse."""
    state = state_of(module)
    assert state is not None
    for attribute, name in state.names.items():
        value, param = state_dict.get(prefix + attribute), module._parameters.get(attribute)
        if (
            not isinstance(param, DTensor)
            or not isinstance(value, torch.Tensor)
            or isinstance(value, DTensor)
        ):
            continue
        info, rank = state.sharded_model.params[name], state.sharded_model.group.rank
        layout = info.layout
        if value.shape != info.shape:
            continue
        rows = value.detach() if info.part is None else info.part.local_view(value.detach(), layout.shape)
        if layout.sharded:
            rows = rows[layout.start(rank) : layout.start(rank) + layout.rows(rank)]
            # What becomes the shard may not hold the whole value, of which it would be a view.
            assigned = rest[0].get("assign_to_params_buffers", False)
            rows = rows.clone(memory_format=torch.contiguous_format) if assigned else rows.contiguous()
        state_dict[prefix + attribute] = grads.as_dtensor(param, rows)


def sharded_class(base: type, names: dict[str, str], recurrent: bool = False) -> type:
    """A subclass of ``base``, for one module, whose ``names`` are full weights inside a forward.

    Args:
        names: qualified name of the parameter at each attribute.
    """
    body: dict[str, object] = refusing(base)
    body |= {attribute: _weight_property(attribute, name) for attribute, name in names.items()}
    if recurrent:
        # nn.RNNBase keeps its own list of weights; read it anew, through the properties.
        body["_flat_weights"] = property(_flat_weights, lambda self, value: None)
    body |= {
        "__call__": _own_code(_call(base)),
        "_zero_outermost": _own_code(_outermost),
        "_zero_entered": _own_code(_entered),
        "compile": _compile,
        "_apply": _apply(base),
        "_load_from_state_dict": _load(base),
        "register_parameter": _register_parameter,
        "set_requires_gradient_sync": _set_requires_gradient_sync,
        "_named_members": named_members,
        "state_dict": state_dict_of(base),
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": _reduce_ex,
        "__deepcopy__": _deepcopy(base),
        "__init_subclass__": classmethod(_derived),
        "_zero_base": base,
        "_zero": None,  # of what a method of the module makes by its class, as slices and copies of containers are
    }
    for name in ("forward", "_call_impl"):
        method = inspect.getattr_static(base, name)
        if isinstance(method, types.FunctionType):
            body[name] = _own_code(method)
    return type(base.__name__, (base,), body)


def _derived(cls: type, **_: object) -> None:
    """Called where a class is derived from that of a sharded module: by who swaps the module's class once more."""
    raise ShardError(
        f"the class of a sharded {cls.__mro__[1].__name__} cannot be swapped again, as {cls.__name__} would: call "
        "torch.nn.utils.parametrize.register_parametrization and the like before zero.shard"
    )


def _own_code(fn: Any) -> types.FunctionType:
    """``fn`` with a code object of its own.

    Dynamo compiles the code of a frame anew for values that its guards have not met, a few times at most
    (``torch._dynamo.config.recompile_limit``), and runs it eagerly then. Getters of weights are such values: layers
    that share the code of their class would use up what one of them may need.
    """
    own = types.FunctionType(
        fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
    )
    for attribute in ("__kwdefaults__", "__annotations__", "__doc__", "__module__", "__qualname__"):
        setattr(own, attribute, getattr(fn, attribute))
    own.__dict__.update(fn.__dict__)
    return own


def _apply(base: type[nn.Module]) -> Callable[..., object]:
    """What ``.to()``, ``.half()``, ``.to_empty()`` and the like call: a sharded parameter stays the object that it is,
    whoever refers to it, and is given other memory where that changes its dtype or device."""

    def apply(self: _Sharded, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        whole = self._parameters
        self._parameters = {name: param for name, param in whole.items() if not isinstance(param, DTensor)}
        try:
            base._apply(self, fn, recurse)
        finally:
            self._parameters = {name: self._parameters.get(name, param) for name, param in whole.items()}
        for attribute, param in whole.items():
            if isinstance(param, DTensor) and _changes(param._local_tensor, fn):
                name, grad = self._zero.names.get(attribute, attribute), param.grad
                with torch.no_grad():
                    made, made_grad = fn(param), None if grad is None else fn(grad)
                parameter_memory.give(param, made, name)
                param.grad = made_grad
        return self

    return apply


def _load(base: type[nn.Module]) -> Callable[..., None]:
    """What ``load_state_dict`` calls: with ``assign=True`` it puts other parameters in place of those that stand there.
    A sharded one stays the object that it is, with the other's memory: what was tied stays tied, and an optimizer goes
    on with it."""

    def load(self: _Sharded, *args: object) -> None:
        before = dict(self._parameters)
        base._load_from_state_dict(self, *args)
        names = self._zero.names
        for attribute, old in before.items():
            now: Any = self._parameters.get(attribute)
            if old is None or now is None or now is old:
                continue
            name = names.get(attribute, attribute)
            if isinstance(old, DTensor) and isinstance(now, DTensor):
                rows: Any = now.detach()
                if rows.placements != old.placements:
                    rows = rows.redistribute(placements=old.placements)
                parameter_memory.give(old, rows, name)
                self._parameters[attribute] = old
            else:
                now.__dict__.pop(STALE, None)  # one that an earlier call has replaced may stand here again
                mark_stale(old, name, "load_state_dict(assign=True)")

    return load


def _register_parameter(self: _Sharded, name: str, param: nn.Parameter | None) -> None:
    """What assigning a parameter to an attribute calls."""
    if self._zero is None:
        type(self)._zero_base.register_parameter(self, name, param)
    else:
        _register(self, name, param)


@torch._dynamo.disable(reason="a parameter is assigned to a sharded module")
def _register(module: _Sharded, name: str, param: Any) -> None:
    """A forward that gives a weight a second name finds it there until it ends: the parameters of the model stay those
    that were sharded.

    Raises:
        ShardError: another sharded parameter stands there.
    """
    state = module._zero
    if state.sharded_model.opened or not hasattr(param, FULL):
        type(module)._zero_base.register_parameter(module, name, param)
    elif name in state.names:
        raise ShardError(
            f"this forward assigns a full weight to parameter {state.names[name]!r}: tie parameters before zero.shard, "
            "or give the weight to torch.func.functional_call"
        )
    else:
        object.__setattr__(module, name, param)


def _set_requires_gradient_sync(
    self: _Sharded, requires_gradient_sync: bool, *, recurse: bool = True
) -> None:
    """Whether backwards reduce the gradients of this sharded model over the ranks, as FSDP2's method of this name.

    With False, backwards accumulate full gradients locally until it is called with True, as in ``zero.no_sync``.

    Args:
        recurse: also for parts of the model that were sharded by themselves.

    Raises:
        ShardError: the module is a part of a model that was sharded as a whole.
        GradientError: a ``zero.optimizer(overlap=True)`` uses its gradients up.
    """
    state = self._zero
    if state is None or not state.root:
        raise ShardError(
            f"set_requires_gradient_sync of {type(self).__name__}: gradients of a sharded model wait, or are reduced, "
            "together; call it on the module that was given to zero.shard"
        )
    sharded_models = sharded_models_of(self) if recurse else [state.sharded_model]
    if not requires_gradient_sync:
        check_accumulates(sharded_models, "set_requires_gradient_sync(False)")
    for sharded_model in sharded_models:
        sharded_model.sync = bool(requires_gradient_sync)


def check_accumulates(states: Iterable[object], what: str) -> None:
    """
    Raises:
        GradientError: an optimizer uses up the gradients that ``what`` is to accumulate.
    """
    if any(sink.uses_up for s in states for sink in getattr(s, "sinks", {}).values()):
        raise GradientError(
            f"{what} accumulates gradients, which zero.optimizer(overlap=True) uses up in every backward; leave "
            "overlap out"
        )


def _changes(local: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    with torch.no_grad():
        made = fn(local.new_empty(0))
    return (made.dtype, made.device) != (local.dtype, local.device)


@torch._dynamo.disable(reason="a sharded module is copied")
def _rebuild(base: type, names: dict[str, str], recurrent: bool, group: Group) -> nn.Module:
    cls = sharded_class(base, names, recurrent)
    made: nn.Module = object.__new__(cls)
    return made


@torch._dynamo.disable(reason="a sharded module is copied")
def _reduce_ex(self: _Sharded, protocol: int) -> str | tuple[object, ...]:
    cls: Any = type(self)
    state = self._zero
    reduced: Any = object.__reduce_ex__(self, max(protocol, 2))
    # The group comes first: where it is not found again, nothing else is worth reading.
    made = (cls._zero_base, dict(state.names), "_flat_weights" in cls.__dict__, state.sharded_model.group)
    return (_rebuild, made, *reduced[2:])


def _deepcopy(base: type) -> Callable[..., object]:
    """``__deepcopy__`` of a module whose class was ``base``: with parameters that have no gradients, as
    ``nn.Parameter`` copies itself. A DTensor is copied with its gradient, to which the first backward of the copy would
    add."""
    own: Callable[..., object] | None = getattr(base, "__deepcopy__", None)
    reconstruct: Callable[..., object] = copy._reconstruct  # type: ignore[attr-defined]

    @torch._dynamo.disable(reason="a sharded module is copied")
    def deepcopy(self: _Sharded, memo: dict[int, object]) -> object:
        for param in self._parameters.values():
            if isinstance(param, DTensor) and param.grad is not None and id(param) not in memo:
                grad, param.grad = param.grad, None
                try:
                    copy.deepcopy(param, memo)
                finally:
                    param.grad = grad
        if own is not None:
            return own(self, memo)
        # As copy.deepcopy goes on where there is no such method.
        return reconstruct(self, memo, *self.__reduce_ex__(4))

    return deepcopy


def _flat_weights(self: Any) -> list[torch.Tensor]:
    return [getattr(self, name) for name in self._flat_weights_names]


def _call(base: type) -> object:
    """``__call__`` of a module whose class was ``base``."""
    call: Callable[..., object] = base.__call__
    if call is nn.Module.__call__:
        return _call_module
    if isinstance(call, types.FunctionType):
        call = _own_code(call)

    def __call__(self: _Sharded, *args: object, **kwargs: object) -> object:
        return _called(self, call, args, kwargs)

    return __call__


def _call_module(self: _Sharded, *args: object, **kwargs: object) -> object:
    # That of nearly all modules. By its global name, which Dynamo guards once for a model; what a function closes over
    # it guards for each.
    return _called(self, nn.Module.__call__, args, kwargs)


def _called(
    self: _Sharded, call: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> Any:
    state = self._zero
    if state is None:
        return call(self, *args, **kwargs)
    scope = state.sharded_model.scope
    # Inside zero.gathered weights are whole in their own dtype, and so is what is computed with them. Dynamo guards the
    # options once for a model, and `root` for each module.
    if state.sharded_model.config.param_dtype is not None and state.root and not state.sharded_model.opened:
        args, kwargs = _cast_inputs(args, kwargs, state.sharded_model.config.param_dtype)
    if not torch.compiler.is_compiling() and recompile_limit.passed() and not scope.eager:
        return _past_limit(self, call, args, kwargs)
    if scope.calls:
        if torch.compiler.is_compiling():
            return call(self, *args, **kwargs)
        kept = len(scope.read)
        try:
            return call(self, *args, **kwargs)
        finally:
            if len(scope.read) > kept:
                scope.refuse_lost_hooks()
                scope.compare_copies(kept)
                forget(scope.read, kept)
    return self._zero_outermost(call, args, kwargs)


# Inlined, and where a frame breaks no frame of its own: its code is that of all modules, see `_own_code`.
torch._dynamo.eval_frame.skip_code(_called.__code__)


@torch._dynamo.disable(reason="compiled once more, past recompile_limit")
def _again(
    self: _Sharded, call: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    return recompile_limit.compiled_again(self, call, args, kwargs, lambda: _own_code(_outermost))


def _past_limit(
    self: _Sharded, call: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """A call from code that Dynamo does not compile for new values any more."""
    scope = self._zero.sharded_model.scope
    if scope.compile is not None:
        return _again(self, call, args, kwargs)
    with recompile_limit.eagerly(self, args, kwargs):
        return call(self, *args, **kwargs) if scope.calls else self._zero_outermost(call, args, kwargs)


def _compile(self: Any, *args: object, **kwargs: Any) -> None:
    """``nn.Module.compile``: what it compiles begins where a call past Dynamo's limit is noticed."""
    self._compiled_call_impl = torch.compile(self._zero_entered, *args, **kwargs)


def _entered(self: Any, *args: object, **kwargs: object) -> object:
    """``_call_impl`` of a module for itself compiled."""
    state = self._zero
    scope = state.sharded_model.scope
    if not torch.compiler.is_compiling() and recompile_limit.passed() and not scope.eager:
        return _past_limit(self, type(self)._call_impl, args, kwargs)
    if state.full:
        return _again(self, type(self)._call_impl, args, kwargs)
    scope.entered = state
    return self._call_impl(*args, **kwargs)


def _outermost(
    self: Any,
    call: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    again: bool = False,
) -> object:
    """A call that comes from outside of the model: its weights are whole until it returns.

    Args:
        again: it is compiled once more, past Dynamo's limit; also for a part of the model.
    """
    state = self._zero
    scope = state.sharded_model.scope
    if again:
        if not torch.compiler.is_compiling() and recompile_limit.passed() and not scope.eager:
            with recompile_limit.eagerly(self, args, kwargs):
                return _outermost(self, call, args, kwargs, again)
        if scope.calls:
            return call(self, *args, **kwargs)
    elif state.full:
        return _again(self, call, args, kwargs)
    scope.entered = state if torch.compiler.is_compiling() or recompile_limit.compiling() else None
    if not torch.compiler.is_compiling():
        scope.begun = state, getattr(type(self).forward, "__code__", None)
        averaged_modules.watch_beside(self)
        kept_weights.look(scope)
        scope.copies = Copies()
    scope.calls.append(state)
    scope.read = {}
    try:
        out = call(self, *args, **kwargs)
        if not torch.compiler.is_compiling():
            scope.refuse_lost_hooks()
            scope.compare_copies(0)
            scope.copies.check()
    except RuntimeError as error:
        if parameter_errors.mixes(error):
            raise parameter_errors.computes_with_shards() from error
        if not torch.compiler.is_compiling() and not isinstance(error, ZeroError):
            scope.copies.check()  # autograd may have refused what was written to, in words of its own
        raise
    finally:
        scope.calls.clear()
        scope.read = {}
        scope.entered = None
        if not torch.compiler.is_compiling():
            scope.copies = None
            scope.begun = None, None
            scope.compiled_reads.clear()
    if not torch.compiler.is_compiling():
        _check_plain(out, state.sharded_model.group)
    return out


def call_as_forward(module: nn.Module, fn: Callable[..., object], *args: object, **kwargs: object) -> object:
    """``fn(module, ...)`` with full weights, as if it were the forward of a sharded module; modules that are compiled
    in place run compiled within it."""
    state = state_of(module)
    if state is None or state.sharded_model.scope.calls:
        return fn(module, *args, **kwargs)
    return _outermost(module, fn, args, kwargs)


@torch._dynamo.disable(reason="a forward that runs in parts has ended")
def _check_plain(out: object, group: Group) -> None:
    """A loss that is a DTensor has a shard among its terms, and its backward would fail at the first plain one.

    One over the tensor-parallel ranks alone is what tensor parallelism makes.
    """
    leaves = pytree.tree_leaves(out)
    if torch.is_grad_enabled():
        watch_outputs(leaves, group)
    for leaf in leaves:
        if isinstance(leaf, DTensor) and leaf.grad_fn is not None and leaf.device_mesh == group.mesh:
            raise parameter_errors.computes_with_shards()


def _cast_inputs(args: object, kwargs: object, dtype: torch.dtype) -> Any:
    def cast(x: object) -> object:
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    return pytree.tree_map(cast, (args, kwargs))


def _get(self: _Sharded, attribute: str, name: str) -> object:
    """What ``module.attribute``, the parameter ``name``, is; of each attribute with its own names, see
    :func:`_getter`."""
    if attribute in self.__dict__:  # it hides the parameter, as from nn.Module.__getattr__
        return self.__dict__[attribute]
    try:
        param = self._parameters[attribute]
    except KeyError:
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {attribute!r}") from None
    state = self._zero
    if state is None:
        return param
    sharded_model = state.sharded_model
    if torch.compiler.is_compiling():
        if param is None or not sharded_model.scope.calls:
            return param
        if sharded_model.opened:
            return param
        if not isinstance(param, DTensor):
            return lent(param, name, sharded_model)  # what is to stay there is refused by the backend
        full = weight(param, sharded_model.key, name)
        if sharded_model.group.tensor is None:  # for most models Dynamo need not follow the rest
            return full
        part = sharded_model.params[name].part
        return full if part is None or full is param else placed(part.of(full), full)
    if recompile_limit.passed() and sharded_model.scope.calls and not sharded_model.scope.eager:
        recompile_limit.runs_eagerly(sharded_model, f"code that reads {name}")
    return read_eager(param, name, sharded_model)


# Inlined where a frame reads a weight, and never a frame of its own, which would be compiled per parameter.
torch._dynamo.eval_frame.skip_code(_get.__code__)


def _getter(attribute: str, name: str) -> types.FunctionType:
    """:func:`_get` for one attribute, with its names as defaults.

    So all weights are read by one code, which Dynamo takes apart once. `parameter_guards.py` drops its guards on the
    defaults.
    """
    return types.FunctionType(_get.__code__, _get.__globals__, "get", (attribute, name))


def _weight_property(attribute: str, name: str) -> property:
    def set_(self: nn.Module, value: object) -> None:
        # nn.Module.__setattr__ has taken parameters and None already; this is a plain value after `del`.
        self.__dict__[attribute] = value

    def del_(self: nn.Module) -> None:
        # nn.Module.__delattr__ has taken parameters already.
        if self.__dict__.pop(attribute, self) is self:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {attribute!r}")

    return property(_getter(attribute, name), set_, del_)


@torch._dynamo.disable(reason="weights that are read between compiled frames are gathered eagerly")
def read_eager(param: DTensor, name: str, sharded_model: ShardedModel) -> Any:
    """What ``module.attribute``, the parameter ``name``, is outside a compiled region."""
    if isinstance(param, DTensor) and not sharded_model.opened:
        refuse_tracers(name)
    if param is None or sharded_model.opened or not inside(sharded_model):
        return param
    if not isinstance(param, DTensor):
        if isinstance(param, nn.Parameter) and not hasattr(param, FULL):
            parameter_errors.replaced(name)
        return lent(param, name, sharded_model)
    sharded_model.group.check_still_valid()
    recompile_limit.outside_budget(sharded_model, name)
    info = managed(param, name, sharded_model)
    parameter_memory.check_closed(param, name)
    scope = sharded_model.scope
    with never_cached(), transforms.below():
        full = known(scope.read, param) if scope.calls else None
        if full is None:
            full = eager.read(param, sharded_model, name)
            if scope.copies is not None:
                local = full._local_tensor if isinstance(full, DTensor) else full
                rank, wire = sharded_model.group.rank, wire_of(sharded_model, name)
                scope.copies.add(info, param, local, rank, sharded_model.writes, wire)
            kept_weights.add(scope, name, param, full, whole=False)
            if scope.calls:
                remember(scope.read, param, full)
        return full


def lent(value: object, name: str, sharded_model: ShardedModel) -> object:
    """A plain tensor where a sharded parameter was, for one call, by ``torch.func.functional_call``: one of the
    parameter's dtype is cast as that is. (A plain parameter, which ``nn.Module`` asks of what is to stay, is refused.)
    """
    # Dynamo, which would end its graph at the question, asks it of nothing that it was given itself.
    if not torch.compiler.is_compiling() and transforms.follows(value):
        raise transforms.of_shards(name)
    info = sharded_model.params[name]
    if isinstance(value, torch.Tensor) and value.dtype == info.layout.dtype:
        return value.to(info.gather_dtype)
    return value
