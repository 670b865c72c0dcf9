"""Terms that are added to a loss outside of the forward and computed from shards: a sum over ``model.parameters()``.

DTensor lets such a term be added to a plain loss, and then gives the plain part a gradient that is a DTensor, at which
the backward of the model fails in words that name neither. It cannot just be made plain: of a product of the two each
rank would take its own part of the gradient for the mean over all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from ..errors import GradientError
from ..ir import ops
from ..ranks.failing import BACKWARD
from ..ranks.failure_broadcast import tell
from ..ranks.group import Group
from .mixed_operands import managed_leaf, sharded_rule

# Operators that make one loss of several; DTensor takes a plain number beside a DTensor. Those that write to a plain
# tensor take no DTensor.
_JOINING = (
    "add.Tensor",
    "sub.Tensor",
    "rsub.Tensor",
    "mul.Tensor",
    "div.Tensor",
    "stack.default",
    "where.self",
)
_WRITING = ("add_.Tensor", "sub_.Tensor", "mul_.Tensor", "div_.Tensor")


def watch_outputs(outputs: Iterable[object], group: Group) -> None:
    """See to it that a backward says so where the gradient of one of these plain ``outputs``, of a forward or of what
    is computed from one, is a DTensor.

    Args:
        group: of the ranks that run this backward together.
    """
    seen = None
    for out in outputs:
        if isinstance(out, torch.Tensor) and not isinstance(out, DTensor):
            node = out.grad_fn
            if node is not None and node is not seen:
                seen = node
                node.register_prehook(functools.partial(_check, group))


def _check(group: Group, gradients: tuple[object, ...]) -> None:
    if any(isinstance(gradient, DTensor) for gradient in gradients):
        _refuse(group, "and the gradient of the model's output is a DTensor by that")


def _refuse(group: Group, why: str) -> NoReturn:
    error = GradientError(
        "a term of this loss is computed from sharded parameters outside of the model's forward (a sum over "
        f"model.parameters(), say), {why}: read each parameter p in it as "
        'p.full_tensor(grad_placements=[Partial("avg")]), with Partial of torch.distributed.tensor (once for each '
        "dimension of the mesh), whose gradient is the mean over ranks"
    )
    # Peers whose loss has no such term begin their backward, which under zero.no_sync may meet nobody.
    tell(lambda: group, error, BACKWARD)
    raise error


@functools.cache
def watch_terms() -> None:
    """Have torch call :func:`_joined` where a plain number and a DTensor become one; once a process.

    A loss that is computed outside of the model's forward meets the term there, and its backward would fail before it
    reaches the model's output.
    """
    for name in (*_JOINING, *_WRITING):
        packet, overload = name.split(".")
        torch.library.register_torch_dispatch(
            getattr(getattr(torch.ops.aten, packet), overload),
            DTensor,
            _joined if name in _JOINING else _written,
        )


def _joined(
    cls: type,
    op: Any,
    types: Sequence[type],
    args: tuple[object, ...],
    kwargs: dict[str, object] | None = None,
) -> object:
    """Watch plain operands beside what is computed from sharded parameters of ours; then DTensor's rule."""
    operands = args[0] if isinstance(args[0], (list, tuple)) else args
    terms = [t for t in operands if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    if len(terms) > 1 and not torch.compiler.is_compiling():
        plain = [t for t in terms if not isinstance(t, (DTensor, FakeTensor))]
        if plain and (group := _group_of(terms)) is not None:
            watch_outputs(plain, group)
    return sharded_rule(cls, op, types, args, kwargs)


def _written(
    cls: type,
    op: Any,
    types: Sequence[type],
    args: tuple[object, ...],
    kwargs: dict[str, object] | None = None,
) -> object:
    """Refuse to write to a plain tensor what is computed from sharded parameters of ours; then DTensor's rule."""
    if not isinstance(args[0], (DTensor, FakeTensor)) and not torch.compiler.is_compiling():
        if (group := _group_of(args[1:2])) is not None:
            _refuse(group, f"and {op.name().split('::')[-1].split('.')[0]} writes it to a plain tensor")
    return sharded_rule(cls, op, types, args, kwargs)


def _group_of(terms: Iterable[object]) -> Group | None:
    """The ranks of the sharded model from whose parameters one of the ``terms`` is computed; None where none is."""
    term = next((t for t in terms if isinstance(t, DTensor) and t.grad_fn is not None), None)
    if term is None:
        return None
    group: Group | None = next((p.group for p in ops.owners() if p.group.mesh == term.device_mesh), None)
    return None if group is None or managed_leaf(term.grad_fn) is None else group
