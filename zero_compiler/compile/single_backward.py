"""What autograd may ask of a compiled frame: one backward, of one gradient at a time, and no forward mode.

AOTAutograd's node takes no more, and says so in words that name neither the model nor a way out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NoReturn

import torch
from torch.autograd import forward_ad

from ..errors import GradientError
from ..sharded import parameter_errors
from ..tensors import transforms


def once_differentiable(compiled: Callable[..., object]) -> Callable[..., object]:
    """``compiled``, a frame that AOTAutograd has made, which says what it cannot do when it is asked for it."""

    def call(*args: object, before_backward: Callable[[object], None] | None = None) -> object:
        """``before_backward``: what autograd is to ask before each backward of this call."""
        if forward_ad._current_level >= 0 and any(map(_has_tangent, args)):
            raise GradientError(
                "a compiled model was given an input with a tangent, and forward-mode AD goes through no compiled "
                f"frame: {parameter_errors.UNCOMPILED}"
            )
        earlier = {x.grad_fn for x in args if isinstance(x, torch.Tensor)}
        out = compiled(*args)
        outputs = out if isinstance(out, (list, tuple)) else (out,)
        # An input that the frame writes to is a result of it.
        if torch.is_grad_enabled() and (node := _node_of((*outputs, *args), earlier)) is not None:
            node.register_prehook(_before)
            if before_backward is not None:
                node.register_prehook(before_backward)
        return out

    return call


def _has_tangent(value: object) -> bool:
    return isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None


def _node_of(results: Iterable[object], earlier: Collection[object]) -> torch.autograd.graph.Node | None:
    """The node of the frame: that of a result, or of the one whose view a result is. What inputs were made by is
    ``earlier``, and no node of this call."""
    for value in results:
        node = value.grad_fn if isinstance(value, torch.Tensor) else None
        while node is not None and node not in earlier:
            if type(node).__name__ == "CompiledFunctionBackward":
                return node
            node = node.next_functions[0][0] if node.next_functions else None
    return None


def _before(given: tuple[torch.Tensor | None, ...]) -> None:
    if any(map(transforms.batched, given)):
        raise parameter_errors.one_gradient_at_a_time("a compiled model")
    if torch.is_grad_enabled():  # create_graph=True
        torch._C._current_autograd_node().register_hook(_after)


def _after(made: tuple[torch.Tensor | None, ...], given: object) -> None:
    for grad in made:
        if grad is not None and grad.grad_fn is not None:
            grad.grad_fn.register_prehook(_refuse)


def _refuse(given: object) -> NoReturn:
    raise parameter_errors.differentiated_twice()
