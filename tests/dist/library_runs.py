"""What tests of other libraries share: the environment that torchrun gives a rank, and what their tests compare."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dist.cases import refused
from torch.distributed.tensor import DTensor

from zero_compiler.errors import ShardError


def as_rank() -> None:
    """Set the variables that torchrun sets, for a rank whose process group is there."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder that all ranks see, which is there until all have left."""
    made = [tempfile.mkdtemp(prefix="zero-tools-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    assert made[0] is not None
    yield Path(made[0])
    dist.barrier()


def one_rank_alone(
    call: str, save: Callable[[], object], model: Callable[[], object], end_s: float = 40.0
) -> list[str]:
    """What is wrong with a ``call`` of a library that rank 0 makes alone, while the other waits in a barrier: it ends in
    time, with a sentence, and the other's next call of the model with that reason. Then ranks meet again."""
    begun = time.monotonic()
    if dist.get_rank() == 0:
        errors = refused(save, ShardError, call, "not all ranks have come to it")
        dist.barrier()
    else:
        dist.barrier()
        errors = refused(model, ShardError, f"rank 0 of 2 could not go on behind {call}")
    model()
    taken = time.monotonic() - begun
    return errors + ([f"{call}: {taken:.0f} s"] if taken > end_s else [])


def number(value: Any) -> float:
    """A loss or a norm, which may be a DTensor that is not summed yet."""
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.item() if isinstance(value, torch.Tensor) else float(value)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Full values of all parameters, by the names that they had before anything was put around the model."""
    return {
        name.removeprefix("module."): (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def reduced_seldom(what: str, counts: list[int], last: Collection[int]) -> list[str]:
    """What is wrong with the bytes that micro-batches have reduced, which ``counts`` sums up after each: those whose
    index is in ``last`` end an accumulation and reduce the same bytes each, and the others reduce none."""
    sent = [after - before for before, after in itertools.pairwise([0, *counts])]
    at_once = max(sent, default=0)
    expected = [at_once if i in last else 0 for i in range(len(sent))]
    return [] if sent == expected and at_once > 0 else [f"{what}: bytes reduced: {sent}"]


def differences(what: str, ours: Any, theirs: Any, tolerance: float) -> list[str]:
    """Sentences about numbers, or tensors, that differ by more than ``tolerance`` of the larger ones."""
    if isinstance(ours, dict):
        if ours.keys() != theirs.keys():
            return [f"{what}: {sorted(ours)} instead of {sorted(theirs)}"]
        return [e for k in ours for e in differences(f"{what} {k}", ours[k], theirs[k], tolerance)]
    a, b = torch.as_tensor(ours, dtype=torch.float64), torch.as_tensor(theirs, dtype=torch.float64)
    if a.shape != b.shape:
        return [f"{what}: shape {tuple(a.shape)} instead of {tuple(b.shape)}"]
    error = (a - b).abs().max().item() if a.numel() else 0.0
    scale = max(b.abs().max().item() if b.numel() else 0.0, 1e-3)
    return [f"{what}: differs by {error:.3g} of {scale:.3g}"] if not error <= tolerance * scale else []
