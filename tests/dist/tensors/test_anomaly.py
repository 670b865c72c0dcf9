"""``torch.autograd.detect_anomaly`` around backwards of sharded models."""

from __future__ import annotations

import pytest
import torch
from dist.cases import Cases
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Shard, distribute_tensor

import zero_compiler as zero
from zero_compiler.tensors.anomaly import of_own_rows

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore:Anomaly Detection")]
cases = Cases(__name__)


@cases.add
def gradients_are_as_without_it(rank: int) -> list[str]:
    errors = []
    for stage in range(4):
        torch.manual_seed(0)
        model = zero.shard(
            nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), stage=stage, device="cpu"
        )
        found = []
        for check in (False, True):
            model.zero_grad()
            with torch.autograd.set_detect_anomaly(check, check_nan=check):
                model(torch.full((2, 5), rank + 1.0)).square().mean().backward()
            found.append([p.grad.full_tensor() for p in model.parameters()])
        if not all(map(torch.equal, *found)):
            errors.append(f"stage {stage}: other gradients")
    return errors


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2))

    def forward(self, by: torch.Tensor) -> torch.Tensor:
        return self.weight * by


@cases.add
def a_rank_raises_for_its_own_rows(rank: int) -> list[str]:
    """What is infinite on both ranks, with two signs, has a mean that is no number; the first rank has that row."""
    by = torch.ones(4, 2)
    by[0, 0] = float("inf") * (1 - 2 * rank)
    with torch.autograd.detect_anomaly():
        try:
            zero.shard(Scales(), stage=3, device="cpu")(by).sum().backward()
        except RuntimeError as error:
            return [] if rank == 0 and "returned nan values" in str(error) else [str(error)]
    return ["no error"] if rank == 0 else []


@cases.add
def dtensors_of_others_stay_as_they_are(rank: int) -> list[str]:
    zero.shard(nn.Linear(4, 4), device="cpu")
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("theirs",))
    x = distribute_tensor(torch.ones(4, 4, dtype=torch.bool), mesh, [Shard(0)])
    given = of_own_rows(DTensor, torch.ops.aten._is_any_true.default, (DTensor,), (x,))
    return [] if given is NotImplemented else [str(given)]


@pytest.mark.parametrize("name", cases.names)
def test_anomaly_mode(name: str) -> None:
    cases.check(name)
