"""Which optimizers may be streamed: those that update each element of a parameter by itself.

Streaming gives an optimizer parts of tensors, one group after another. That changes nothing for an elementwise
class and would be another algorithm for any other. A few classes are known; all others are tried: a few steps on
small tensors, whole and split in two, must agree in every bit.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from ..errors import OptimizerError

# Known classes that couple elements, with what couples them. What torch does not have yet is left out.
_COUPLED: dict[str, str] = {
    "Adafactor": "it keeps sums over rows and columns",
    "LBFGS": "its direction and its line search use inner products over all parameters",
    "Muon": "it orthogonalises whole matrices",
    "SparseAdam": "it updates rows that a sparse gradient names",
}
_STEPS = 3


@dataclass(frozen=True)
class States:
    """What an optimizer keeps for a parameter.

    Args:
        tensors: dtype of every state tensor of the parameter's shape, by key.
        eager: whether they exist once the optimizer is made, before its first step.
    """

    tensors: Mapping[str, torch.dtype]
    eager: bool


def declared(cls: type[Optimizer]) -> None:
    """Refuse a class that is known to couple elements.

    Raises:
        OptimizerError: naming the class and what couples its elements.
    """
    for name, why in _COUPLED.items():
        known = getattr(torch.optim, name, None)
        if known is not None and issubclass(cls, known):
            raise _refusal(cls, why)


def states_of(
    cls: type[Optimizer], kw: Mapping[str, object], options: Mapping[str, object], like: torch.Tensor
) -> States:
    """Try ``cls`` on small tensors; what it keeps for a parameter like ``like`` (dtype, dimensions, device).

    Args:
        kw: keyword arguments of the class.
        options: those of the parameter group.

    Raises:
        OptimizerError: the class couples elements, or keeps what cannot be streamed.
    """
    shape = (512,) if like.dim() < 2 else (8, *([1] * (like.dim() - 2)), 64)
    draw = torch.Generator().manual_seed(0)

    def sample() -> torch.Tensor:
        x = torch.randn(shape, generator=draw, dtype=torch.float32)
        return x.to(device="cpu" if like.is_meta else like.device, dtype=like.dtype)

    start, given = sample(), [sample() for _ in range(_STEPS)]
    half = shape[0] // 2
    halves = [(start[s], [g[s] for g in given]) for s in (slice(half), slice(half, None))]
    whole = _ElementwiseTrial(cls, kw, options, [(start, given)])
    parts = [_ElementwiseTrial(cls, kw, options, [one]) for one in halves]
    if not torch.equal(whole.param, torch.cat([p.param for p in parts])):
        raise _refusal(cls, "a step on a tensor differs from steps on its two halves")
    together = _ElementwiseTrial(cls, kw, options, halves)
    if not all(torch.equal(a, b.param) for a, b in zip(together.params, parts, strict=True)):
        raise _refusal(cls, "a step on two parameters differs from steps on each of them alone")
    moved = _ElementwiseTrial(cls, kw, options, [(start, given)], moves=True)
    if not torch.equal(whole.param, moved.param):
        raise _refusal(cls, "it keeps something of a parameter elsewhere than in self.state[parameter]")
    keys: dict[str, torch.dtype] = {}
    for key, value in whole.state.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            continue
        if value.shape != whole.param.shape:
            raise _refusal(cls, f"its state {key!r} has not the shape of the parameter")
        if not torch.equal(value, torch.cat([p.state[key] for p in parts])):
            raise _refusal(cls, f"its state {key!r} differs between a tensor and its two halves")
        keys[key] = value.dtype
    return States(keys, whole.eager)


class _ElementwiseTrial:
    """A few steps of a new optimizer.

    Args:
        given: each parameter as it begins, and its gradients.
        moves: each step finds parameters in other memory and in other tensors, as those that are streamed are.
    """

    def __init__(
        self,
        cls: type[Optimizer],
        kw: Mapping[str, object],
        options: Mapping[str, object],
        given: Sequence[tuple[torch.Tensor, Sequence[torch.Tensor]]],
        moves: bool = False,
    ) -> None:
        self.params = [start.clone() for start, _ in given]
        made = make(cls, kw, options, self.params)
        # A learning rate that is a tensor may be written to.
        made.param_groups[0].update({k: copy.deepcopy(v) for k, v in options.items()})
        self.eager = bool(made.state)
        step, before = step_of(cls), _numbers(made)
        for i in range(_STEPS):
            if moves:
                self._move(made)
            for param, (_, grads) in zip(self.params, given, strict=True):
                param.grad = grads[i].clone()
            try:
                step(made)
            except (TypeError, RuntimeError, ValueError, KeyError) as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise _refusal(cls, f"its step on a small tensor fails ({reason})") from error
        for param in self.params:
            param.grad = None
        for key in made.state:
            if not any(key is param for param in self.params):
                raise _refusal(cls, f"it keeps state {key!r} for all parameters together")
        for name, number in _numbers(made).items():
            if before.get(name) != number:
                raise _refusal(cls, f"it keeps a number, {name!r}, for all parameters together")
        self.state = dict(made.state.get(self.param, {}))

    def _move(self, made: Optimizer) -> None:
        moved = [param.clone() for param in self.params]
        states = [made.state.pop(param, None) for param in self.params]
        made.state.update(
            {param: state for param, state in zip(moved, states, strict=True) if state is not None}
        )
        made.param_groups[0]["params"] = self.params = moved

    @property
    def param(self) -> torch.Tensor:
        return self.params[0]


def _numbers(made: Optimizer) -> dict[str, float]:
    """Attributes that may count or sum: each of the optimizers that a streamed one is made of has its own."""
    out = {}
    for name, value in vars(made).items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            out[name] = float(value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            out[name] = value
    return out


def make(
    cls: type[Optimizer], kw: Mapping[str, Any], options: Mapping[str, Any], tensors: Sequence[torch.Tensor]
) -> Optimizer:
    """The real class over plain tensors, with the options of one parameter group."""
    return cls([{**options, "params": list(tensors)}], **kw)


def step_of(cls: type[Optimizer]) -> Any:
    """``cls.step`` without torch's step hooks: they run once, around the step that the user calls."""
    step = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


def _refusal(cls: type[Optimizer], why: str) -> OptimizerError:
    return OptimizerError(
        f"zero.optimizer streams optimizers that update each element by itself, and {cls.__name__} is none: {why}; "
        f'use torch.optim\'s AdamW, SGD or the like here, or {cls.__name__} itself with all tiers at "none"'
    )
