"""Calls for which Dynamo compiles nothing more: past its ``recompile_limit`` it runs a function eagerly.

Eager code keeps none of what was planned: it is outside of a memory budget, and issues other collectives than the
Programs that peers are in. So such a call is compiled after all, once for all sizes (symbolic, where ``dynamic=False``
made a graph for each), as code that Dynamo has not met: one Program more, of the collectives of the others, in their
order. Only what even that does not compile runs eagerly, and says so; under a memory budget it is refused.
"""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.utils import _pytree as pytree

from ..errors import MemoryBudgetError
from ..ranks.failure_broadcast import cannot_begin
from ..sharded.sharded_model import Scope, ShardedModel

log = logging.getLogger("zero_compiler")
ENTERED = "_entered"  # name of the code at which a module begins that is compiled by its own method
_BEGINS = ("__call__", "_zero_entered")  # where what is compiled of a module begins
_OWN_CODE = (*_BEGINS, "_zero_outermost", "forward", "_call_impl")


def compiling() -> bool:
    """Whether what runs now was called from code that Dynamo compiles, and is compiled itself if it can be."""
    callback = get_eval_frame_callback()
    return callback is not None and callback is not False


def passed() -> bool:
    """Whether what runs now was called from code that Dynamo is to compile, and does not at values that it has not met:
    such code uses what is compiled already, and so does all that it calls."""
    return get_eval_frame_callback() is False


def _stance() -> str:
    return str(torch._dynamo.eval_frame._stance.stance)


def _why(scope: Scope) -> str:
    """Why Dynamo compiles no more, in words."""
    if _stance() != "default":
        return f"torch.compiler.set_stance({_stance()!r}) is in force"
    limit = scope.limit or torch._dynamo.config.recompile_limit
    return f"torch._dynamo.config.recompile_limit ({limit}) was met"


def _advice(scope: Scope) -> str:
    if _stance() != "default":
        return "call it under the default stance"
    if scope.compile is None:
        return (
            "nothing of this model was compiled, since Dynamo has compiled the same function for others too often: "
            "call torch._dynamo.reset() before, or derive a class of your own from the model's, if that is torch's"
        )
    return (
        "leave dynamic=False out of torch.compile, or give it dynamic=True (or torch._dynamo.mark_dynamic the "
        "dimensions that change); or set torch._dynamo.config.recompile_limit to as many graphs as there are to be"
    )


def sizes_of(args: object, kwargs: object) -> str:
    """The inputs of a call that Dynamo compiles for, in words: sizes of tensors, and numbers."""
    found = []
    for path, leaf in pytree.tree_flatten_with_path((args, kwargs))[0]:
        name = pytree.keystr(path[1:]).strip("[]'")
        where = f"argument {name}" if path[0] == pytree.SequenceKey(0) else name
        if isinstance(leaf, torch.Tensor):
            found.append(f"{where} of {list(leaf.shape)}")
        elif isinstance(leaf, (bool, int, float)):
            found.append(f"{where} = {leaf}")
    return ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")


def _call(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> str:
    base = getattr(type(module), "_zero_base", type(module))
    given = sizes_of(args, kwargs)
    return f"a call of {base.__name__}" + (f" with {given}" if given else "")


def compiled_again(
    module: Any,
    call: object,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    outermost: Callable[[], types.FunctionType],
) -> object:
    """Make a call past Dynamo's limit, compiled once more.

    Args:
        call: what ``__call__`` of the module was before it was sharded.
        outermost: makes what calls it, as code that Dynamo has not met.
    """
    sharded_model = module._zero.sharded_model
    scope: Scope = sharded_model.scope
    compiled = scope.again.get(module)
    if compiled is None:
        assert scope.compile is not None
        if not scope.said:
            log.warning(
                "%s: %s, past which calls at other sizes would run eagerly; from here on one more graph, for sizes "
                "that may change, takes their place; %s",
                _call(module, args, kwargs),
                _why(scope),
                _advice(scope),
            )
        scope.said = f"since {_why(scope)}, compiled once more for sizes that may change; {_advice(scope)}"
        renew(module)
        compiled = scope.again[module] = scope.compile(outermost())
    with _as_many_again(scope):
        return compiled(module, call, args, kwargs, True)


@contextlib.contextmanager
def _as_many_again(scope: Scope) -> Iterator[None]:
    """Functions that are no methods of the model's modules, and that a forward calls, have met the limit too, or are
    about to where it has a graph break: their code is the user's, and compiled for further values."""
    if scope.limit is not None:
        yield
        return
    scope.limit = torch._dynamo.config.recompile_limit
    try:
        with torch._dynamo.config.patch(recompile_limit=2 * scope.limit):
            yield
    finally:
        scope.limit = None


def renew(module: nn.Module) -> None:
    """Give what a call of a module calls code that Dynamo has not met, and compiles. Where the call itself begins,
    Dynamo has met its limit for good."""
    for part in module.modules():
        for name in _OWN_CODE if "_zero" in part.__dict__ else ():
            fn = type(part).__dict__.get(name)
            if isinstance(fn, types.FunctionType) and not (part is module and name in _BEGINS):
                fn.__code__ = fn.__code__.replace()


@contextlib.contextmanager
def eagerly(module: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Iterator[None]:
    """A call that is not compiled, though it was to be.

    Raises:
        MemoryBudgetError: under a memory budget, on all ranks.
    """
    scope: Scope = module._zero.sharded_model.scope
    runs_eagerly(module._zero.sharded_model, _call(module, args, kwargs))
    scope.eager = True
    try:
        yield
    finally:
        scope.eager = False


def runs_eagerly(sharded_model: ShardedModel, what: str) -> None:
    """``what`` runs eagerly, since Dynamo compiles it for no further values: say so, once.

    Raises:
        MemoryBudgetError: under a memory budget, on all ranks.
    """
    scope = sharded_model.scope
    said, advice = f"{what} runs eagerly, since {_why(scope)}", _advice(scope)
    if any(_budgeted(p) for p in scope.members):
        error = MemoryBudgetError(
            f"{said}, and memory_budget_bytes holds for what is compiled alone: {advice}"
        )
        if not sharded_model.group.one_rank:
            cannot_begin(sharded_model.group, error)
        raise error
    if not scope.eager_said:
        scope.eager_said = True
        log.warning("%s: slower, and with more memory than its plan says; %s", said, advice)
    scope.said = f"{said}: {advice}"


def outside_budget(sharded_model: ShardedModel, name: str) -> None:
    """The weight ``name`` is gathered by code that runs eagerly: say, once, that a memory budget does not count it."""
    scope = sharded_model.scope
    if scope.outside_said or sharded_model.group.rank != 0 or not any(_budgeted(p) for p in scope.members):
        return
    scope.outside_said = True
    log.warning(
        "weight %s is read by code that runs eagerly, since it is not compiled or stands where a graph breaks "
        "(TORCH_LOGS=graph_breaks says where): memory_budget_bytes does not count what such code allocates",
        name,
    )


def _budgeted(sharded_model: ShardedModel) -> bool:
    configs = [sharded_model.config, *(frame.config for frame in sharded_model.frames)]
    return any(config.memory_budget_bytes is not None for config in configs)


def _of_dynamo(code: types.CodeType) -> bool:
    """Whether this is what Dynamo puts around a method of torch's own classes that it is to compile."""
    return code.co_filename == torch._dynamo.external_utils.__file__


def watch(codes: Sequence[types.CodeType] | None, scope: Scope) -> None:
    """Look whether Dynamo has compiled a function of the model for the last time, where that is called behind a graph
    break: its next call could not be compiled once more as a whole. The next call of the model is, therefore.

    Args:
        codes: that a frame was compiled of, its own first; None where Dynamo does not say.
        scope: of the model.
    """
    if not (codes and scope.calls):
        return
    state, forward = scope.begun
    if scope.entered is not None:
        state = (
            scope.entered if codes[0].co_name != ENTERED else None
        )  # which is noticed when it is past the limit
    elif codes[0] is not forward and not (_of_dynamo(codes[0]) and forward in codes):
        state = None  # a block that is compiled alone
    if state is None:
        return
    entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(codes[0])
    if len(entries) + 1 >= torch._dynamo.config.recompile_limit:
        state.full = True
