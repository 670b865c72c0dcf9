"""Two ranks train from a plan file that was edited: the numbers of a run without one; and all of them have the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import parallel
import pytest
import torch
import torch.distributed as dist
from compare import Twin
from dist.spawn import run_ranks
from machines import machine
from marks import thorough
from null.edited import without_measures
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import ZeroError

pytestmark = pytest.mark.dist


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))
        self.head = nn.Linear(32, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.h:
            x = torch.tanh(layer(x))
        return self.head(x).square().mean()


def batch(rank: int, step: int, rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(
    rank: int, hardware: str, plan: str | None, transport: str, rows: Any = lambda rank, step: 6
) -> Any:
    """Losses of some steps, what differs from plain PyTorch, and the plan."""
    torch._dynamo.reset()
    torch.manual_seed(0)

    def sharded(model):
        model = zero.shard(model, hardware=hardware, transport=transport, bucket_bytes=1000, compute="aten")
        return torch.compile(
            model, backend="zero", dynamic=False, options=None if plan is None else {"plan": plan}
        )

    losses = []
    twin = Twin(Net(), sharded, where=f"rank {rank}")
    for step in range(3):
        x = batch(rank, step, rows(rank, step))
        with torch.no_grad():
            losses.append(twin.model(x).item())
        twin.backward(lambda m, x=x: m(x))
        twin.check_gradients()
        twin.step()
    return losses, twin.errors, zero.inspect(twin.model)


def _edit(path: str) -> None:
    data = json.loads(Path(path).read_text())
    (frame,) = (f for f in data["decisions"]["frames"] if f["kind"] == "training")
    frame["distances"]["forward"]["h.3"] = 2
    data["decisions"]["weights"]["h.1.weight"]["kept"] = True
    Path(path).write_text(json.dumps(data))


def _from_a_file(rank: int, world: int, hardware: str, folder: str, transport: str) -> Any:
    path = f"{folder}/plan{rank}.json"  # a file for each rank, of the same decisions
    plain, wrong, told = trained(rank, hardware, None, transport)
    told.save_json(path)
    again, wrong_again, told_again = trained(rank, hardware, path, transport)
    same = json.dumps(told.to_dict()["decisions"]) == json.dumps(told_again.to_dict()["decisions"])
    _edit(path)
    edited, wrong_edited, told_edited = trained(rank, hardware, path, transport)
    (frame,) = (f for f in told_edited.decisions.frames if f.kind == "training")
    return (
        plain == again == edited,
        wrong + wrong_again + wrong_edited,
        same,
        frame.distances["forward"]["h.3"],
        told_edited.decisions.weights["h.1.weight"].kept,
    )


@pytest.fixture
def hardware(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine(share=True)))
    return str(path)


@pytest.mark.parametrize("transport", ["c10d", *thorough("shared")])
def test_an_edited_plan_trains_with_the_same_numbers(transport, hardware, tmp_path):
    for found in run_ranks(_from_a_file, 2, hardware, str(tmp_path), transport):
        assert found == (True, [], True, 2, True)


def _uneven(rank: int, world: int, hardware: str, folder: str) -> Any:
    path = f"{folder}/plan{rank}.json"

    def rows(rank: int, step: int) -> int:
        return 6 if rank == 0 else 6 + step  # rank 1 compiles again, alone

    _, _, told = trained(0, hardware, None, "c10d")
    told.save_json(path)
    _edit(path)
    _, wrong, told = trained(rank, hardware, path, "c10d", rows)
    far = [f.distances["forward"]["h.3"] for f in told.decisions.frames if f.kind == "training"]
    return wrong, far


def test_ranks_of_other_sizes_hold_to_the_same_plan(hardware, tmp_path):
    (wrong0, far0), (wrong1, far1) = run_ranks(_uneven, 2, hardware, str(tmp_path))
    assert wrong0 == wrong1 == []
    assert (far0, far1) == ([2], [2, 2, 2])


def _differing(rank: int, world: int, hardware: str, folder: str, only: int | None) -> str:
    path = f"{folder}/plan{rank}.json"
    trained(rank, hardware, None, "c10d")[2].save_json(path)
    if only is None and rank == 1:
        _edit(path)
    try:
        trained(rank, hardware, path if only in (None, rank) else None, "c10d")
    except ZeroError as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize("only", [None, 0, 1])
def test_ranks_that_hold_to_different_plans_are_told(only, hardware, tmp_path):
    for said in run_ranks(_differing, 2, hardware, str(tmp_path), only):
        assert "ranks disagree about the plan: rank 1 of 2 compiles with" in said
        assert "give every rank the same file" in said
    if only is not None:
        assert "no plan" in said


def _on_a_mesh(rank: int, world: int, hardware: str, folder: str, names: tuple[str, str]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    told, path = (
        [],
        f"{folder}/plan.json",
    )  # tensor-parallel ranks have other graphs: there the file is of rank 0
    for plan in (None, path):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = parallel.by_columns(parallel.Transformer(2), mesh["tp"]) if "tp" in names else Net()
        model = zero.shard(model, mesh=mesh, hardware=hardware, compute="aten", plan=plan)
        inputs = parallel.tokens(rank // 2, 0) if "tp" in names else batch(rank, 0)
        told.append(zero.inspect(model, example_inputs=(inputs,)))
        if plan is None and rank == 0:
            told[0].save_json(path)
        dist.barrier()
    return [without_measures(t.to_dict()) for t in told], told[0].decisions.made_for


TENSOR_PARALLEL = pytest.param(("dp", "tp"), marks=pytest.mark.slow)


@pytest.mark.parametrize("names", [("replicate", "shard"), TENSOR_PARALLEL], ids="-".join)
def test_a_plan_of_a_mesh_comes_back(names, hardware, tmp_path):
    for (first, again), made_for in run_ranks(_on_a_mesh, 4, hardware, str(tmp_path), names):
        assert first == again
        assert (made_for.replicas, made_for.tensor_ranks) == ((2, 1) if "shard" in names else (1, 2))
