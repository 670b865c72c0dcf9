"""A forward that writes to a weight in place, element by element: the same is done to the rows of this rank.

Inside a forward a weight is a gathered copy, and what is written to that alone is lost with it. Each element of what an
elementwise operator writes depends on the same element of the weight, and on numbers or elements of other tensors. So
the operator, applied to this rank's rows of all of them, makes this rank's rows of the result. Eager code is heard by
the class of the copy (`write_detector.py`); in a captured graph the operators are found (`captured_writes.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor

from ..layout import Layout

# Elementwise methods of torch.Tensor, by the name of the one that makes a new tensor.
NAMES = (
    "abs absolute acos acosh add addcdiv addcmul arccos arccosh arcsin arcsinh arctan arctanh asin asinh "
    "atan atan2 atanh bitwise_and bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clip copysign cos "
    "cosh deg2rad digamma div divide erf erfc erfinv exp exp2 expm1 fix float_power floor floor_divide "
    "fmod frac heaviside hypot ldexp lerp log log10 log1p log2 logit masked_fill mul multiply nan_to_num "
    "neg negative pow rad2deg reciprocal relu remainder round rsqrt sgn sigmoid sign sin sinh sqrt square "
    "sub subtract tan tanh true_divide trunc xlogy"
).split()
IN_PLACE = frozenset([f"{n}_" for n in NAMES if hasattr(torch.Tensor, f"{n}_")] + ["copy_", "fill_", "zero_"])
OPERATORS = "add sub mul truediv floordiv mod pow and or xor".split()
# The same in the names of Python's operators; of these the left side is written to.
OPERATORS_IN_PLACE = frozenset(f"__i{n}__" for n in OPERATORS if hasattr(torch.Tensor, f"__i{n}__"))


def rows_of(value: object, layout: Layout, rank: int, device: torch.device) -> object:
    """Of an operand of an elementwise operator with a whole weight, what goes with the rows of ``rank``, where those
    are."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    value = value.detach()
    if layout.sharded and value.dim() == len(layout.shape) and value.shape[0] == layout.shape[0]:
        value = value[layout.start(rank) : layout.start(rank) + layout.rows(rank)]
    return value.to(device)  # what has fewer rows is the same for every row


def write_rows(param: DTensor, write: Callable[[torch.Tensor], object]) -> None:
    """Call ``write`` with this rank's rows of ``param``; it counts as a write to it.

    A forward that a checkpoint makes again in backward counts none: its writes are those of the first time.
    """
    with torch.no_grad():
        write(param._local_tensor)
    if torch._C._current_graph_task_id() == -1 and not param.is_inference():
        torch.autograd.graph.increment_version(param)
