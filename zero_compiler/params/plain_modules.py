"""Which parameters that are not sharded are averaged (`ddp_fallback.py`): those of modules that are compiled, or that
compiled code calls.

A module that is given to ``torch.compile`` is known as a whole. Of a function, or a method, the backend is given
graphs: the modules that these read are found when the function is called.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..ranks.group import Group
from .ddp_fallback import (
    PlainModel,
    forget,
    is_plain,
    known_of,
    plain_parameter,
    plain_parameters,
    several_ranks,
)
from .held import at_rest

log = logging.getLogger("zero_compiler")
_model_of = WeakIdKeyDictionary()  # a module that is averaged, and every module in it: its PlainModel


def watched(
    compiled: Callable[..., Any],
    example_inputs: Sequence[Any],
    sources: Sequence[object],
    groups: Sequence[Group],
    interrupted: bool,
) -> Callable[..., object]:
    """``compiled``, a frame that may read plain parameters, for whichever model calls it.

    Dynamo runs a frame for every module of a class that passes its guards, and asks the backend once.

    Args:
        sources: where Dynamo finds each of the inputs.
        groups: of ranks that train what the frame reads of sharded models.
        interrupted: eager code follows the frame, and then the rest of the function.
    """
    at = [
        i for i, p in enumerate(example_inputs) if is_plain(p) and (p.is_floating_point() or p.is_complex())
    ]
    if not at:
        return compiled
    in_modules = {i for i in at if _in_module(sources[i])}
    read: weakref.WeakValueDictionary[tuple[int, ...], PlainModel] = weakref.WeakValueDictionary()

    def look(args: Sequence[Any]) -> None:
        """What these parameters are averaged with is what this call reads, whoever has read them since."""
        ids = tuple(id(args[i]) for i in at)
        model = read.get(ids)
        known = [] if model is None else [model.members.get(i) for i in ids]
        if model is not None and all(k and k.param is args[i] for k, i in zip(known, at, strict=True)):
            if any(k and k.models[-1] is not model for k in known):
                model.take()
            return
        model = watch([args[i] for i in at], found=[args[i] for i in at if i in in_modules])
        if model is not None:
            read[ids] = model
            for group in groups:
                model.over(group)
            if interrupted:
                _say_interrupted(sys._getframe(2))

    @torch._dynamo.disable(reason="entry of a compiled frame")
    def call(*args: Any) -> Any:
        if torch.is_grad_enabled():  # an evaluation changes nothing of what is trained
            look(args)
            return compiled(*args)
        out = compiled(*args)
        if any(t.requires_grad for t in out if isinstance(t, torch.Tensor)):  # by torch.enable_grad within it
            look(args)
        return out

    return call


def _in_module(source: Any) -> bool:
    """Whether Dynamo finds a parameter in a module, and not as an argument or a local variable."""
    while source is not None:
        if getattr(source, "member", None) == "_parameters":
            return True
        source = getattr(source, "base", None)
    return False


def watch_compiled(is_ours: Callable[[object], bool]) -> None:
    """From now on, see to it that a model given to ``torch.compile`` is averaged also where Dynamo captures nothing of
    it (an RNN, a graph break within a loop): then nobody asks the backend. So is what such a module is given later.

    Args:
        is_ours: whether a backend, as ``torch.compile`` holds it, is this one.
    """
    from torch._dynamo.eval_frame import OptimizedModule, innermost_backend

    def module_registered(parent: nn.Module, name: str, module: object) -> None:
        if torch.compiler.is_compiling() or not isinstance(module, nn.Module):
            return
        if (model := _model_of.get(parent)) is not None:
            replaced = parent._modules.get(name)
            for param in () if replaced is None else plain_parameters(replaced).values():
                forget(param)
            for part in module.modules():
                _model_of[part] = model
            for param in plain_parameters(module).values():
                _add(model, param)
        # torch says of every module what it is registered in, and Dynamo's wrapper registers the model.
        if name != "_orig_mod" or not isinstance(parent, OptimizedModule):
            return
        made = sys._getframe(1)
        while made is not None and made.f_code is not OptimizedModule.__init__.__code__:
            made = made.f_back  # type: ignore[assignment]
        callback = getattr(made.f_locals.get("dynamo_ctx"), "callback", None) if made is not None else None
        if callable(callback) and is_ours(innermost_backend(callback)):
            _model([module])

    def parameter_registered(parent: nn.Module, name: str, param: object) -> None:
        if torch.compiler.is_compiling() or (model := _model_of.get(parent)) is None:
            return
        replaced = parent._parameters.get(name)
        if replaced is not None and replaced is not param:
            forget(replaced)
        if isinstance(param, nn.Parameter) and is_plain(param):
            _add(model, param)

    torch.nn.modules.module.register_module_module_registration_hook(module_registered)
    torch.nn.modules.module.register_module_parameter_registration_hook(parameter_registered)


def _add(model: PlainModel, param: nn.Parameter) -> None:
    if (known := plain_parameter(param)) is not None:
        model.add(known)


def _model(roots: Sequence[nn.Module], found: Sequence[nn.Parameter] = ()) -> PlainModel:
    """What averages the plain parameters of ``roots``, and those that were ``found``, from now on."""
    model: PlainModel | None = _model_of.get(roots[0]) if roots else None
    if model is None or found or model.roots != list(roots):
        model = PlainModel(roots, found)
    for root in roots:
        model.over(_ranks_of(root))
        for part in root.modules():
            _model_of[part] = model
    model.take()
    return model


def watch(params: Sequence[nn.Parameter], found: Sequence[nn.Parameter] = ()) -> PlainModel | None:
    """See to it that plain parameters which a frame reads, and all others of its models, are averaged.

    A parameter that is of no module is the caller's own (an argument, or made for this call): its gradient stays that
    of this rank, as that of any other tensor.

    Args:
        params: plain parameters, as the frame is given them.
        found: those of them that Dynamo found in a module, whichever that is.
    """
    models = _models_of(params)
    averaged = {id(p) for one in models for p in plain_parameters(one).values()}
    others = [p for p in found if id(p) not in averaged]
    averaged |= set(map(id, others))
    own = [p for p in params if p.requires_grad and id(p) not in averaged and known_of(p) is None]
    if own and several_ranks(None):
        _say_own(tuple(own[0].shape))
    if not averaged:
        return None
    model = _model(models, others)
    if not model.said:
        model.said = True
        _say_averaged(models, others)
    return model


def watch_beside(model: nn.Module) -> None:
    """:func:`watch` for a sharded model that runs without compile and was given plain parameters since."""
    if torch.is_grad_enabled() and several_ranks(None):
        left = [p for _, p in at_rest(model) if is_plain(p) and p.requires_grad and known_of(p) is None]
        if left:
            watch(left)


def _ranks_of(model: nn.Module) -> Group | None:
    """The ranks that train the sharded parts of a model: its plain parts are theirs too.

    None, for all ranks, where nothing is sharded. Of parts on several meshes the largest counts.
    """
    parts = (
        m.__dict__["_zero"].sharded_model.group.everyone for m in model.modules() if "_zero" in m.__dict__
    )
    return max(parts, key=lambda group: group.world, default=None)


def _say_averaged(models: Sequence[nn.Module], others: Sequence[nn.Parameter]) -> None:
    members = {id(p): p for one in models for p in plain_parameters(one).values()} | {
        id(p): p for p in others
    }
    trained = sum(p.requires_grad for p in members.values())
    if not trained:
        return
    if sum(1 for one in models for _ in at_rest(one)) > len(members):
        what = f"{trained} parameters of this model are not sharded, so they train as stage 0"
    else:
        what = "nothing in this model is sharded, so it trains as stage 0"
    log.warning(
        'backend "zero": %s; call zero.shard(model, stage=3) before torch.compile to partition it', what
    )


@functools.cache
def _say_own(shape: tuple[int, ...]) -> None:
    """Once for each shape: such parameters may be made anew for every call."""
    log.warning(
        'backend "zero": a compiled call is given a parameter of shape %s that is of no module; its gradient stays '
        "that of this rank",
        list(shape),
    )


def _say_interrupted(frame: Any) -> None:
    """Of a function, nobody knows which modules its eager parts call; what a module calls is a part of it."""
    while frame is not None and "/torch/_dynamo/" in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is not None and not isinstance(frame.f_locals.get("self"), nn.Module):
        _say_interrupted_once(frame.f_code.co_name)


@functools.cache
def _say_interrupted_once(function: str) -> None:
    log.warning(
        'backend "zero": the compiled function %s has a graph break; parameters of modules that only its eager parts '
        "call keep the gradient of this rank: compile one module that has them all, or zero.shard(module, stage=0)",
        function,
    )


def _models_of(params: Sequence[nn.Parameter]) -> list[nn.Module]:
    """Of each of ``params`` the outermost module on the call stack that owns it, of several in one frame the largest: a
    function may call several.

    A backend is given a frame and not the model, whose other frames may run eagerly; the caller of the frame
    is the model.
    """
    wanted = {id(p) for p in params}
    owner: dict[int, nn.Module] = {}
    frame = sys._getframe(1)
    while frame is not None:
        values = [v for v in frame.f_locals.values() if isinstance(v, nn.Module)]
        modules = [v for v in values if not isinstance(v, torch.fx.GraphModule)]
        held = [(module, [id(p) for _, p in at_rest(module)]) for module in modules]
        for module, ids in sorted(held, key=lambda each: len(each[1])):
            owner |= {i: module for i in ids if i in wanted}
        frame = frame.f_back  # type: ignore[assignment]
    return list({id(m): m for p in params if (m := owner.get(id(p))) is not None}.values())
