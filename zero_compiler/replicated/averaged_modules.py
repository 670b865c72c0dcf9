"""Which replicated parameters are averaged (`gradient_average.py`): those of modules that are compiled, or that
compiled code calls.

A module that is given to ``torch.compile`` is known as a whole, and one whose forward calls what was compiled. Of a
function, or a method, the backend is given graphs: the modules that these read are found when the function is called.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..call_stack import locals_of
from ..errors import GradientError
from ..ranks.group import Group
from .end_of_backward import replicated_parameter
from .parameters import at_rest, is_averaged, is_replicated, known_of, replicated_parameters, several_ranks

log = logging.getLogger("zero_compiler")
# A module that is averaged, and every module in it: its _Place.
_watched = WeakIdKeyDictionary()
_CALL_MODULE = nn.Module._call_impl.__code__
_said = WeakIdKeyDictionary()  # modules of which a warning has said that they train as stage 0


@dataclass(frozen=True)
class _Place:
    """Where a module that is averaged stands.

    Args:
        prefix: of the names of its parameters in the outermost module.
        group: the ranks; None: all.
        root: stands for the outermost module.
    """

    prefix: str
    group: Group | None
    root: object


def watched(
    compiled: Callable[..., Any],
    example_inputs: Sequence[Any],
    sources: Sequence[object],
    groups: Sequence[Group],
    interrupted: bool,
) -> Callable[..., object]:
    """``compiled``, a frame that may read replicated parameters, for whichever model calls it.

    Dynamo runs a frame for every module of a class that passes its guards, and asks the backend once.

    Args:
        sources: where Dynamo finds each of the inputs.
        groups: of ranks that train what the frame reads of sharded models.
        interrupted: eager code follows the frame, and then the rest of the function.
    """
    at = [
        i
        for i, p in enumerate(example_inputs)
        if is_replicated(p) and (p.is_floating_point() or p.is_complex())
    ]
    if not at:
        return compiled
    names = {i: name for i in at if (name := _name_in_module(sources[i])) is not None}

    def look(args: Sequence[Any]) -> None:
        """Whether it reads parameters that nobody knows of, as it does at its first call, and for another model; or
        is called by a module that nobody knows of."""
        around = _outermost_module()
        if around is not None and around not in _watched:
            _watch_module(around, "", _largest([*groups, *_groups_of(around)]))
        if all(is_averaged(args[i]) for i in at) and (around is None or around in _said):
            return
        found = watch([args[i] for i in at], {id(args[i]): name for i, name in names.items()}, groups)
        if found and interrupted:
            _say_interrupted(sys._getframe(2))
        if around is not None:
            _said[around] = True

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


def _outermost_module() -> nn.Module | None:
    """The module whose forward the rest runs in."""
    frame, outermost = sys._getframe(1), None
    while frame is not None:
        if frame.f_code is _CALL_MODULE:
            outermost = frame
        frame = frame.f_back  # type: ignore[assignment]
    module = None if outermost is None else locals_of(outermost)["self"]
    return getattr(module, "_orig_mod", module)


def _name_in_module(source: Any) -> str | None:
    """What a parameter is called that Dynamo finds in a module; None of an argument or a local variable."""
    parts: list[str] = []
    found = False
    while source is not None:
        member = getattr(source, "member", getattr(source, "index", getattr(source, "local_name", None)))
        found |= member == "_parameters"
        if isinstance(member, (str, int)) and member not in ("_parameters", "_modules", "_buffers"):
            parts.append(str(member))
        source = getattr(source, "base", None)
    return ".".join(reversed(parts)) if found else None


def watch_compiled(is_ours: Callable[[object], bool], found: Callable[[], None]) -> None:
    """From now on, see to it that a model given to ``torch.compile`` is averaged also where Dynamo captures nothing of
    it (an RNN, a graph break within a loop): then nobody asks the backend. So is what such a module is given later.

    Args:
        is_ours: whether a backend, as ``torch.compile`` holds it, is this one.
        found: is called when there is such a model.
    """
    from torch._dynamo.eval_frame import OptimizedModule, innermost_backend

    def module_registered(parent: nn.Module, name: str, module: object) -> None:
        if torch.compiler.is_compiling() or not isinstance(module, nn.Module):
            return
        if (place := _watched.get(parent)) is not None:
            _watch_module(module, f"{place.prefix}{name}.", place.group, place.root)
        # torch says of every module what it is registered in, and Dynamo's wrapper registers the model.
        if name != "_orig_mod" or not isinstance(parent, OptimizedModule):
            return
        made = sys._getframe(1)
        while made is not None and made.f_code is not OptimizedModule.__init__.__code__:
            made = made.f_back  # type: ignore[assignment]
        callback = getattr(locals_of(made).get("dynamo_ctx"), "callback", None) if made is not None else None
        if callable(callback) and is_ours(innermost_backend(callback)):
            found()
            _watch_module(module, "", _largest(_groups_of(module)))

    def parameter_registered(parent: nn.Module, name: str, param: object) -> None:
        if torch.compiler.is_compiling() or (place := _watched.get(parent)) is None:
            return
        if isinstance(param, nn.Parameter) and is_replicated(param):
            _average(param, f"{place.prefix}{name}", place.root, place.group)

    torch.nn.modules.module.register_module_module_registration_hook(module_registered)
    torch.nn.modules.module.register_module_parameter_registration_hook(parameter_registered)


def _average(param: nn.Parameter, name: str, root: object, group: Group | None) -> None:
    if (known := replicated_parameter(param)) is not None:
        known.average(name, root, group)


def _watch_module(module: nn.Module, prefix: str, group: Group | None, root: object = None) -> None:
    """Average the replicated parameters of ``module``, and those that it is given later, over ``group``."""
    if root is None:
        before = _watched.get(module)
        root = object() if before is None or before.prefix else before.root
    for name, part in module.named_modules(prefix=prefix.rstrip(".")):
        _watched[part] = _Place(f"{name}." if name else "", group, root)
    for name, param in replicated_parameters(module).items():
        _average(param, f"{prefix}{name}", root, group)


def watch(
    params: Sequence[nn.Parameter], names: dict[int, str] | None = None, groups: Sequence[Group] = ()
) -> bool:
    """See to it that replicated parameters which a frame reads, and all others of its models, are averaged. Whether
    there are any.

    A parameter that is of no module is the caller's own (an argument, or made for this call): its gradient stays that
    of this rank, as that of any other tensor.

    Args:
        params: replicated parameters, as the frame is given them.
        names: by their identity, of those that Dynamo found in a module, whichever that is.
        groups: of ranks that train what the frame reads of sharded models.
    """
    models, names = _models_of(params), names or {}
    in_models = {id(p) for one in models for p in replicated_parameters(one).values()}
    others = [p for p in params if id(p) in names and id(p) not in in_models]
    averaged = in_models | set(map(id, others))
    own = [p for p in params if p.requires_grad and id(p) not in averaged and known_of(p) is None]
    if own and several_ranks(None):
        _say_own(tuple(own[0].shape))
    if not averaged:
        return False
    new = [p for p in others if known_of(p) is None]
    for one in models:
        _watch_module(one, "", _largest([*groups, *_groups_of(one)]))
    for param in others:
        _average(param, names[id(param)], None, _largest(groups))
    if new or any(one not in _said for one in models):
        _say_averaged(models, others)
    for one in models:
        _said[one] = True
    return True


def watch_beside(model: nn.Module) -> None:
    """:func:`watch` for a sharded model that runs without compile and was given replicated parameters since."""
    if torch.is_grad_enabled() and several_ranks(None):
        left = [p for _, p in at_rest(model) if is_replicated(p) and p.requires_grad and known_of(p) is None]
        if left:
            watch(left)


def check_all_known(optimizer: torch.optim.Optimizer) -> None:
    """Of what an optimizer steps, see to it that nothing is trained by each rank alone that seems to be averaged.

    A warning, once for each kind of optimizer, is of a parameter beside averaged or sharded ones; it may be averaged by
    the user's own code.

    Raises:
        GradientError: a module that is averaged has a parameter of which torch has told nobody.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    left = [p for p in params if is_replicated(p) and p.grad is not None and not is_averaged(p)]
    if not left or not several_ranks(None):
        return
    inside = {id(p): f"{place.prefix}{name}" for m, place in _watched.items() for name, p in at_rest(m)}
    for p in left:
        if id(p) in inside:
            raise GradientError(
                f"the gradient of parameter {inside[id(p)]!r} is that of this rank alone: it came into a module that "
                "was compiled before by a way of which torch tells nobody (to_empty, a lazy module, "
                "Sequential.insert); do that before torch.compile, or call zero.shard(model, stage=0)"
            )
    if any(is_averaged(p) or not is_replicated(p) for p in params):
        _say_left(type(optimizer).__name__, tuple(left[0].shape), len(left))


@functools.cache
def _say_left(optimizer: str, shape: tuple[int, ...], count: int) -> None:
    log.warning(
        "%s steps %d parameters, the first of shape %s, with the gradient of this rank alone, beside others whose "
        "gradients are averaged over ranks: compile one module that has them all, or call zero.shard on theirs",
        optimizer,
        count,
        list(shape),
    )


def _groups_of(model: nn.Module) -> list[Group]:
    """The ranks that train the sharded parts of a model: its plain parts are theirs too."""
    return [
        m.__dict__["_zero"].sharded_model.group.everyone for m in model.modules() if "_zero" in m.__dict__
    ]


def _largest(groups: Sequence[Group]) -> Group | None:
    """None, for all ranks, where nothing is sharded."""
    return max(groups, key=lambda group: group.world, default=None)


def _say_averaged(models: Sequence[nn.Module], others: Sequence[nn.Parameter]) -> None:
    members = {id(p): p for one in models for p in replicated_parameters(one).values()} | {
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
    if frame is not None and not isinstance(locals_of(frame).get("self"), nn.Module):
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
        values = [v for v in locals_of(frame).values() if isinstance(v, nn.Module)]
        modules = [getattr(v, "_orig_mod", v) for v in values if not isinstance(v, torch.fx.GraphModule)]
        held = [(module, [id(p) for _, p in at_rest(module)]) for module in modules]
        for module, ids in sorted(held, key=lambda each: len(each[1])):
            owner |= {i: module for i in ids if i in wanted}
        frame = frame.f_back  # type: ignore[assignment]
    return list({id(m): m for p in params if (m := owner.get(id(p))) is not None}.values())
