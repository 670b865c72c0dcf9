"""What differs between the versions of torch that this project supports: the one place that knows.

Every other name of torch that the code uses, private ones included, is the same from the first of these versions to
the last. The engine's own differences stand in C++, chosen by what torch's headers declare
(``csrc/src/c10d_transport.cc``).

Two places are written for what Dynamo does since 2.14, in a form that holds with every version: the attributes that
``params/refusals.py`` refuses are false in the class, since Dynamo looks there for the mark of FSDP, and the ``data``
of ``sharded/write_detector.py`` reads by torch's own function, since Dynamo takes ``torch.Tensor.data.__get__`` for
the property that overrides it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._functorch import predispatch

FIRST = (2, 11)
PAST_LAST = (2, 16)  # as in pyproject.toml


def supported() -> bool:
    """Whether the torch of this process lies in the supported range."""
    return FIRST <= tuple(int(part) for part in torch.__version__.split(".")[:2]) < PAST_LAST


# 2.13 renamed the two flat collectives, and warns of the old names.
all_gather_flat: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# What begins a transform of torch.func in a graph of Dynamo: up to 2.12 ``predispatch`` has vmap's alone, and from 2.13
# on jvp's too; grad's stands in ``torch._C._functorch`` in each.
TRANSFORM_BEGINNINGS = frozenset(
    getattr(module, name)
    for module in (torch._C._functorch, predispatch)
    for name in ("_grad_increment_nesting", "_jvp_increment_nesting", "_vmap_increment_nesting")
    if hasattr(module, name)
)

# By which Inductor's code checks the size and the strides of what an operator has returned: the second since 2.15.
TELLS_SIZES = frozenset({"assert_size_stride", "assert_tensor_metadata"})


def forget_instructions() -> None:
    """Dynamo's instructions of the functions that it has followed last are dropped, where it keeps them in a cache."""
    from torch._dynamo import bytecode_transformation

    cached: Any = getattr(bytecode_transformation, "_cached_cleaned_instructions", None)
    if hasattr(cached, "cache_clear"):
        cached.cache_clear()
