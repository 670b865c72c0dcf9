"""Steps of torch's fused Adam and AdamW on shards: one call of the kernel for the rows of a parameter group.

The class of an optimizer asks each parameter for its gradient and its states, and DTensor is then asked what a kernel
does to each. Here the rows of a group are known from the step before, and one look finds whether anything stands
elsewhere. Then the kernel is called with them, as the class would do, and the class is given the other groups alone. A
step that this does not know in every respect is left to the class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

from ..torch_cpp import OptimizerRows, count_steps
from .foreach import MANAGED

_CLASSES = (torch.optim.Adam, torch.optim.AdamW)
_STATES = ("exp_avg", "exp_avg_sq")
_KNOWN = "_zero_rows"  # of an optimizer: by number of a group, its rows in the step before


def step_rows(optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Before a step: update the groups that the kernel may be called for at once. What is left of the step has only the
    others."""
    # Dynamo traces this, with the step of an optimizer that is compiled.
    if torch.compiler.is_compiling() or not _is_plain(optimizer, args, kwargs):
        return None
    groups = optimizer.param_groups
    rest = [group for at, group in enumerate(groups) if not _updated(optimizer, at, group)]
    if len(rest) == len(groups):
        return None
    # The same optimizer with fewer groups. Where the step ends with an error nothing is to be put back.
    left = object.__new__(type(optimizer))
    left.__dict__ = optimizer.__dict__ | {"param_groups": rest}
    return (left, *args[1:]), kwargs


def _is_plain(optimizer: Any, args: Sequence[object], kwargs: dict[str, object] | None) -> bool:
    """Whether the step is what the class says, with the gradients that there are now: no closure makes others, no hook
    behind this one sees to them, and no loss scaler has a say."""
    return (
        type(optimizer) in _CLASSES
        and len(args) == 1
        and not kwargs
        and not optimizer._optimizer_step_pre_hooks
        and next(reversed(_global_optimizer_pre_hooks.values())) is step_rows
        and getattr(optimizer, "grad_scale", None) is None
        and getattr(optimizer, "found_inf", None) is None
    )


def _updated(optimizer: Any, at: int, group: dict[str, Any]) -> bool:
    """Update a group, where that may be done at once."""
    params = group["params"]
    if not params or MANAGED not in getattr(params[0], "__dict__", ()) or not _is_usual(group):
        return False
    known: dict[int, OptimizerRows] = optimizer.__dict__.setdefault(_KNOWN, {})
    rows = known.get(at)
    if rows is None or not rows.hold(params, optimizer.state):
        known.pop(at, None)
        rows = _rows(params, optimizer.state)
        if rows is None:
            return False
        known[at] = rows
    grads = rows.gradients()
    if grads is None:
        return False
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    first, second, steps = rows.states
    beta1, beta2 = group["betas"]
    with torch.no_grad():
        if steps[0].device.type == "cpu":
            count_steps(steps)
        else:
            torch._foreach_add_(steps, 1)
        rows.count_written()
        kernel(
            rows.rows,
            grads,
            first,
            second,
            [],
            steps,
            amsgrad=False,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            grad_scale=None,
            found_inf=None,
        )
    return True


def _is_usual(group: dict[str, Any]) -> bool:
    numbers = [group["lr"], *group["betas"], group["weight_decay"], group["eps"]]
    unusual = group["amsgrad"] or group["capturable"] or group["differentiable"]
    return bool(group["fused"]) and not unusual and not any(isinstance(n, torch.Tensor) for n in numbers)


def _rows(params: list[Any], states: Any) -> OptimizerRows | None:
    """The rows of a group; None where the tensors of a parameter do not lie alike, or the kernel has to be called more
    than once."""
    found = [states.get(param) for param in params]
    like = getattr(params[0], "_local_tensor", None)
    if not all(_lie_alike(param, state, like) for param, state in zip(params, found, strict=True)):
        return None
    return OptimizerRows(params, found, (*_STATES, "step"))


def _lie_alike(param: Any, state: Any, like: Any) -> bool:
    if type(param) is not DTensor or MANAGED not in param.__dict__ or not state:
        return False
    rows, step = param._local_tensor, state.get("step")
    if not isinstance(step, torch.Tensor) or step.dim() or step.dtype != torch.float32:
        return False
    if (rows.dtype, rows.device, step.device) != (like.dtype, like.device, like.device):
        return False
    for key in _STATES:
        value = state.get(key)
        if type(value) is not DTensor:
            return False
        there, spec, own = value._local_tensor, value._spec, param._spec
        if spec.mesh != own.mesh or spec.placements != own.placements:
            return False
        if (there.shape, there.dtype, there.device) != (rows.shape, rows.dtype, rows.device):
            return False
        if not (type(there) is type(rows) is torch.Tensor and there.is_contiguous() and rows.is_contiguous()):
            return False
    return True
