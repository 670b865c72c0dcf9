"""What stands between an optimizer and sharded parameters: checks before its steps, and help for Adafactor."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..errors import ShardError
from ..ir import ops
from ..replicated.averaged_modules import check_all_known
from ..replicated.parameters import ATTRIBUTE, check_averaged, stepped
from ..sharded.grads import HOOKS, check_reduced
from ..sharded.parameter_errors import any_was_dropped, dropped, was_dropped
from ..storage import heap
from ..tensors.anomaly import register_anomaly_checks
from ..tensors.foreach import MANAGED, count_writes
from ..tensors.fused import register_kernels
from ..tensors.partial_numbers import watch_numbers
from ..tensors.random_rows import watch_draws
from ..tensors.unscale import register_unscaling
from ..torch_cpp import some_have
from .mixed_operands import sharded_rule, watch_operands
from .penalties import watch_terms

_CHECKED = "_zero_checked"
_FIRST = "_zero_first"  # of an optimizer in its first steps: how many are still to come
_FIRST_STEPS = 3
# How many steps of an optimizer, also of other models, have looked for parameters that nobody averages.
_looked: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
_LOOKS = 2
# Of a parameter that was replaced: its name and the call that did it, for an optimizer that still holds it.
STALE = "_zero_stale"
_installed = False


def guard_optimizers() -> None:
    """Have torch call :func:`check` before steps, fused kernels and loss scalers take shards, kernels over lists count
    as writes, and losses and numbers be watched; once a process. Optimizers of other models cost one look."""
    global _installed
    if not _installed:
        _installed = True
        register_kernels()
        register_unscaling()
        count_writes(sharded_rule)
        watch_draws()
        watch_numbers()
        watch_terms()
        watch_operands()
        register_anomaly_checks()
        register_optimizer_step_pre_hook(check)
        register_optimizer_step_pre_hook(_lend_norms)
        register_optimizer_step_post_hook(_withdraw_norms)
        register_optimizer_step_post_hook(_give_back)


def held_elsewhere(
    name: str, by: str, where: str = "a list, a dictionary, a closure or a global"
) -> ShardError:
    """The error of a model that keeps a parameter past the attributes of its modules."""
    return ShardError(
        f"the model keeps parameter {name!r} in {where}, and {by} puts another tensor in its place: the one that is "
        "kept would not be trained; keep its name there, and read it as an attribute of its module"
    )


def mark_stale(old: torch.Tensor, name: str, by: str) -> None:
    """The call ``by`` has put another parameter in place of ``old``: an optimizer that holds that says so at its next
    step, and a backward in which it is given a gradient at once."""
    guard_optimizers()
    old.__dict__[STALE] = name, by
    if old.requires_grad and not isinstance(old, DTensor):
        kept = weakref.ref(old)

        def refuse(grad: torch.Tensor) -> None:
            param = kept()
            if param is not None and STALE in param.__dict__:
                raise held_elsewhere(*param.__dict__[STALE])

        old.__dict__.setdefault(HOOKS, set()).add(old.register_hook(refuse).id)


def check(optimizer: torch.optim.Optimizer, args: Sequence[object], kwargs: dict[str, object] | None) -> None:
    """Raise at a step whose gradients wait for their reduction, and at one of an optimizer whose parameters are not
    those of the sharded model. An optimizer is judged by its parameters of sharded models alone.

    Raises:
        ShardError: naming the first stale parameter.
        GradientError: before anything was written; also of a parameter that nobody averages, in the first steps.
    """
    closure = kwargs.get("closure") if kwargs else None
    closure = args[1] if closure is None and len(args) > 1 else closure
    for group in optimizer.param_groups:
        # A closure runs the backward that reduces them; one that it leaves waiting refuses the step's arithmetic.
        if closure is None:
            check_reduced(group["params"])
        # At every step: a model may be sharded between two steps of an optimizer.
        _check_params(optimizer, group["params"])
    if not torch.compiler.is_compiling():
        groups = [group["params"] for group in optimizer.param_groups]
        stepped(param for params in groups if some_have(params, (ATTRIBUTE,)) for param in params)
        if (steps := _looked.get(optimizer, 0)) < _LOOKS:
            _looked[optimizer] = steps + 1
            check_all_known(optimizer)
    # Dynamo traces this, with the step of an optimizer that is compiled.
    if not any(hasattr(param, MANAGED) for group in optimizer.param_groups for param in group["params"]):
        return
    count = sum(len(g["params"]) for g in optimizer.param_groups)
    if optimizer.__dict__.get(_CHECKED) == count:
        return
    _check_kind(optimizer)
    _check_managed(optimizer)
    optimizer.__dict__[_CHECKED] = count
    if any(hasattr(p, MANAGED) for g in optimizer.param_groups for p in g["params"]):
        optimizer.__dict__[_FIRST] = _FIRST_STEPS


def _check_params(optimizer: torch.optim.Optimizer, params: Sequence[Any]) -> None:
    compiling = torch.compiler.is_compiling()  # Dynamo follows no call of C++
    if compiling or some_have(params, (STALE, ATTRIBUTE)):
        check_averaged(params)
        for param in params:
            stale = getattr(param, STALE, None)
            if stale is not None:
                name, by = stale
                raise ShardError(
                    f"{type(optimizer).__name__} was made before {by} and holds the parameter {name!r} that it "
                    f"replaced; make the optimizer after {by}, from model.parameters()"
                )
    if compiling or any_was_dropped(params):
        for param in params:
            if was_dropped(param) and (name := _name_of(param)) is not None:
                dropped(name)


def _give_back(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Behind the first steps of sharded parameters give the free pages of the heap back.

    They are what compiling, the model as it was made, and activations and gradients before there were states have
    touched. Once states are made and gradients have their storages, a step touches the same pages as the one before.
    """
    steps = optimizer.__dict__.get(_FIRST, 0)
    if steps:
        optimizer.__dict__[_FIRST] = steps - 1
        heap.give_back()


def _name_of(param: torch.Tensor) -> str | None:
    """What a parameter of a sharded model is called there; None of those of others."""
    return next(
        (n for sharded_model in ops.owners() for n in sharded_model.places if sharded_model.find(n) is param),
        None,
    )


def _check_kind(optimizer: torch.optim.Optimizer) -> None:
    """Optimizers whose arithmetic torch cannot do on rows of a parameter, or on a DTensor at all."""
    if not isinstance(optimizer, (torch.optim.LBFGS, torch.optim.Rprop)):
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if hasattr(param, MANAGED) and param.device_mesh.size() > 1 and not _whole(param):
                raise ShardError(
                    f"{type(optimizer).__name__} needs parameters that are whole on every rank: use stage 0 or another "
                    "optimizer"
                )


def _whole(param: DTensor) -> bool:
    return all(p.is_replicate() for p in param.placements)


def _check_managed(optimizer: torch.optim.Optimizer) -> None:
    """States of parameters of sharded models rest where they were to rest, which is beside the parameters where a plain
    optimizer makes them."""
    streams = getattr(optimizer, "streams", False)
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for sharded_model in ops.owners():
        for name in sharded_model.places:
            param = sharded_model.find(name)
            if param is None or id(param) not in given:
                continue
            tier = sharded_model.tiers.placed.tier("optimizer", name)
            beside = tier == "host" and sharded_model.tiers.path("params", name)
            frozen = sharded_model.tiers.placed.was_frozen(name) and not param.requires_grad
            if tier != "none" and not beside and not streams and not frozen:
                cls = type(optimizer).__name__
                raise ShardError(
                    f"{cls} would keep the states of {name!r} on the device of the parameter, and by the options of "
                    f"zero.shard they rest on {tier!r}; make it as zero.optimizer({cls}, model, ...)"
                )


class _WholeNorms(DTensor):
    """A DTensor whose norms are summed over the ranks at once, as those of what is computed from it.

    Adafactor squares a norm in place, and reads others with ``.item()``. DTensor refuses the first where the sum is
    still in parts, and gives each rank its own part for the second (torch 2.13). That of transformers makes its states
    as plain tensors, ``torch.zeros(shape).to(grad)``: here these become whole on every rank, as all that it computes of
    rows and columns together is.
    """

    __slots__: list[str] = []

    @classmethod
    def __torch_function__(
        cls, func: Any, types: object, args: Sequence[object] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            like = args[1] if func is torch.Tensor.to and len(args) > 1 else None
            if isinstance(like, DTensor) and not isinstance(args[0], DTensor):
                mesh = like.device_mesh
                out = DTensor.from_local(out, mesh, [Replicate()] * mesh.ndim, run_check=False)
            if type(out) is DTensor:
                if getattr(func, "__name__", "") == "norm" and any(p.is_partial() for p in out.placements):
                    out = out.redistribute(placements=[Replicate()] * len(out.placements))
                out.__class__ = cls
            return out


def _is_adafactor(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is torch's, or that of transformers."""
    return isinstance(optimizer, torch.optim.Adafactor) or any(
        cls.__name__ == "Adafactor" and cls.__module__ == "transformers.optimization"
        for cls in type(optimizer).__mro__
    )


def _adafactor_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    if _is_adafactor(optimizer):
        for group in optimizer.param_groups:
            for param in (p for p in group["params"] if hasattr(p, MANAGED)):
                for tensor in (param, param.grad, *optimizer.state.get(param, {}).values()):
                    if isinstance(tensor, DTensor):
                        yield tensor


def _lend_norms(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    for tensor in list(_adafactor_tensors(optimizer)):
        if type(tensor) is DTensor:
            tensor.__class__ = _WholeNorms


def _withdraw_norms(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    for tensor in list(_adafactor_tensors(optimizer)):
        if type(tensor) is _WholeNorms:
            tensor.__class__ = DTensor  # type: ignore[assignment]
