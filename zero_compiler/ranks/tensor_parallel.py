"""Parameters that tensor parallelism has placed before ZeRO shards what each rank holds of them.

``parallelize_module`` of torch makes them DTensors over one dimension of a mesh. Their local tensors are what the
data ranks partition; inside a forward a weight is again the DTensor over that one dimension. Placements at rest are
those of FSDP2 over tensor parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from ..errors import ShardError
from .group import Group


@dataclass(frozen=True)
class TensorPart:
    """The placement of a parameter over the tensor-parallel dimension, and its shape as a whole."""

    mesh: DeviceMesh
    placement: Placement
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, local: torch.Tensor) -> DTensor:
        """The weight whose part on this rank is ``local``; differentiable."""
        return DTensor.from_local(
            local,
            self.mesh,
            (self.placement,),
            run_check=False,
            shape=torch.Size(self.shape),
            stride=self.stride,
        )

    def local_view(self, whole: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """The part of this rank, of ``shape``, as a view of the whole."""
        return whole[tuple(slice(a, a + n) for a, n in zip(self.start(), shape, strict=True))]

    def start(self) -> tuple[int, ...]:
        """Where the part of this rank begins in the whole."""
        start = [0] * len(self.shape)
        if self.placement.is_shard():
            dim = self.placement.dim  # type: ignore[attr-defined]
            start[dim] = self.shape[dim] // self.mesh.size() * self.mesh.get_local_rank()
        return tuple(start)


def part_of(name: str, param: torch.Tensor, group: Group) -> TensorPart | None:
    """How ``param`` is placed over the tensor-parallel dimension; None where it is no DTensor.

    Raises:
        ShardError: it lies on another mesh, or in a way that ranks cannot agree about.
    """
    if not isinstance(param, DTensor):
        return None
    if group.tensor is None or param.device_mesh != group.tensor.mesh:
        expected = (
            "the mesh given to zero.shard has no tensor-parallel dimension"
            if group.tensor is None
            else f"the tensor-parallel dimension is {group.tensor.mesh}"
        )
        raise ShardError(
            f"parameter {name} is a DTensor over {param.device_mesh} already, and {expected}: leave out "
            "fully_shard (or what else distributes it over all ranks), or, after parallelize_module, pass the mesh of "
            'both dimensions, with the name "tp" for the one given to parallelize_module'
        )
    (placement,) = param.placements
    if placement.is_partial():
        raise ShardError(f"parameter {name} is a DTensor of partial sums, {placement}; redistribute it first")
    if placement.is_shard():
        rows, ranks = param.shape[placement.dim], group.tensor.world  # type: ignore[attr-defined]
        if rows % ranks:
            raise ShardError(
                f"parameter {name} has {rows} entries in dimension {placement.dim}, which {ranks} tensor-parallel "  # type: ignore[attr-defined]
                "ranks do not divide; pad it to a multiple"
            )
    return TensorPart(group.tensor.mesh, placement, tuple(param.shape), tuple(param.stride()))


def tensor_mesh_of(model: nn.Module) -> DeviceMesh | None:
    """The mesh of the parameters that are DTensors already, and not of a sharded part; None where all are plain."""
    for module in model.modules():
        if "_zero" not in module.__dict__:
            for param in module._parameters.values():
                if isinstance(param, DTensor):
                    return param.device_mesh
    return None
