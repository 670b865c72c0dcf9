"""Fewer guards on sharded parameters: what Dynamo would ask in Python, of each at every call, is looked at once.

Before every call of a compiled frame Dynamo evaluates its guards. Some kinds are Python, or ask a tensor for
attributes that it does not have, or say nothing that another one does not; there is one of them for each parameter or
module, so that in a model of many small layers they take longer than the arithmetic:

- that the spec of a DTensor equals the one that was compiled for, and that its local tensor is like the one of then.
  The frame's entry compares them by identity, for all parameters in one pass (:class:`KnownParameters`).
- that one object is meant by two attributes (``a.device_mesh is b.device_mesh``, and the same of the sharded model of
  two modules). The mesh is a part of the spec. Of which sharded model a module is a part follows from its class, which
  no other module has (`params/modules.py`), and the classes are guarded.
- that the property which reads a parameter has the code and the defaults that it had. It stands in that class, which
  the module keeps; whatever puts another property there takes the parameter out of the module, where its guards look
  for it.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource, DefaultsSource, DictGetItemSource, TypeSource

from ..errors import ShardError
from ..ir import ops
from ..params.weight_op import managed
from ..ranks.failure_broadcast import cannot_begin
from ..sharded import parameter_errors

_spec_of = operator.attrgetter("_spec")
_local_of = operator.attrgetter("_local_tensor")


def drop_guards(sources: Iterable[object]) -> None:
    """Take these guards out of those of the frame that Dynamo compiles.

    Args:
        sources: where Dynamo finds the sharded parameters that are inputs of the frame. What the guards would find is
            from here on for :class:`KnownParameters` to find.
    """
    context = torch._guards.TracingContext.try_get()
    if context is None:
        return
    parameters, guards = set(sources) - {None}, context.guards_context.dynamo_guards
    typed = {g.originating_source for g in guards if g.inner_create_fn() is GuardBuilder.TYPE_MATCH}
    entries = [
        (_attribute_of(p.base, "_parameters"), p.index) for p in parameters if type(p) is DictGetItemSource
    ]
    read = {entry for entry in entries if entry[0] in typed}
    left = [guard for guard in guards if not (_is_dropped(guard, parameters) or _getter_in(guard, read))]
    if len(left) < len(guards):
        context.guards_context.dynamo_guards = type(guards)(type(guards.inner)(left))


def _is_dropped(guard: Any, parameters: set[object]) -> bool:
    source, kind = guard.originating_source, guard.inner_create_fn()
    if kind is getattr(GuardBuilder, "DTENSOR_SPEC_MATCH", None):
        return _attribute_of(source, "_spec") in parameters
    if kind is GuardBuilder.TENSOR_MATCH:
        return _attribute_of(source, "_local_tensor") in parameters
    if kind is not GuardBuilder.DUPLICATE_INPUT:
        return False
    both = source, guard.create_fn.keywords["source_b"]
    if all(_attribute_of(one, "device_mesh") in parameters for one in both):
        return True
    states = [_attribute_of(one, "sharded_model") for one in both]
    return all(_is_state(one) for one in states)


def _getter_in(guard: Any, read: set[tuple[object, str]]) -> bool:
    """Whether a guard is that of the property which reads one of these parameters, each (module, attribute).

    The class of the module, which has it, is made for this module alone and is guarded. Code that was compiled does not
    notice who sets another property on that class by hand and leaves the parameter where it is.
    """
    source = guard.originating_source
    of_defaults = source.base if type(source) is DefaultsSource else _attribute_of(source, "__defaults__")
    prop = _attribute_of(of_defaults or source, "fget")
    if type(prop) is not DictGetItemSource:
        return False
    if of_defaults is None and guard.inner_create_fn() is not GuardBuilder.CLOSURE_MATCH:
        return False
    cls = getattr(prop.base, "base", None)  # prop.base is its dictionary
    return type(cls) is TypeSource and (cls.base, prop.index) in read


def _attribute_of(source: object, name: str) -> object:
    """The source of the object whose attribute ``name`` a source is; None of any other source."""
    return source.base if isinstance(source, AttrSource) and source.member == name else None


def _is_state(source: object) -> bool:
    """Whether a source is the state that :func:`~zero_compiler.params.modules.swap_classes` gives a module."""
    return "_zero" in (getattr(source, "member", None), getattr(source, "index", None))


class KnownParameters:
    """How the sharded parameters of a frame lie, as they did when it was compiled.

    Args:
        params: the parameters.
        refs: owner and name of each, in the same order.
    """

    def __init__(self, params: Sequence[Any], refs: Sequence[Any]) -> None:
        self._refs = refs
        self._specs = list(map(_spec_of, params))
        # Weak: the memory of a model goes with it, and compiled frames may outlive that.
        self._locals = [weakref.ref(local) for local in map(_local_of, params)]

    def check(self, params: Sequence[Any]) -> None:
        """What Dynamo and the compiler would do where something else stands in the place of a parameter.

        Raises:
            ShardError: it is not what was sharded.
        """
        same = all(map(operator.is_, map(_spec_of, params), self._specs))
        if same and all(map(operator.is_, map(_local_of, params), [local() for local in self._locals])):
            return
        for at, (param, ref) in enumerate(zip(params, self._refs, strict=True)):
            local = param._local_tensor
            if param._spec is not self._specs[at] or local is not self._locals[at]():
                _check(param, ref)
                self._specs[at], self._locals[at] = param._spec, weakref.ref(local)


def _check(param: Any, ref: Any) -> None:
    sharded_model, local = ops.owner_of(ref.owner), param._local_tensor
    group, device = sharded_model.group, sharded_model.tiers.rests_on(ref.name)
    try:
        info = managed(param, ref.name, sharded_model)
        found = local.dtype, local.device.type, tuple(local.shape)
        if found != (info.layout.dtype, device.type, tuple(info.layout.local_shape(group.rank))):
            parameter_errors.moved(ref.name, info, local, device)
    except ShardError as error:
        cannot_begin(group, error)  # peers whose parameters stand begin this call
        raise
