"""Gathers that start several units ahead, on two ranks that see different sizes: one choice, and plain losses."""

import json
from pathlib import Path

import pytest
import torch
from compare import Twin
from dist.spawn import run_ranks
from machines import machine
from torch import nn

import zero_compiler as zero
from zero_compiler.params.modules import sharded_models_of

pytestmark = pytest.mark.dist


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.head = nn.Linear(32, 1024)

    def forward(self, x):
        for layer in self.h:
            x = torch.tanh(layer(x))
        return self.head(x).square().mean()


def _train(rank, hardware, rows_of):
    torch.manual_seed(0)

    def sharded(model):
        model = zero.shard(
            model, stage=3, hardware=hardware, transport="c10d", bucket_bytes=1000, compute="aten"
        )
        return torch.compile(model, backend="zero", dynamic=False)

    twin = Twin(Net(), sharded, where=f"rank {rank}")
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(rows_of(rank, step), 32, generator=generator)
        twin.backward(lambda m, x=x: m(x))
        twin.check_gradients()
        twin.step()
    (sharded_model,) = sharded_models_of(twin.model)
    chosen = [frame.choices[phase] for frame in sharded_model.frames for phase in ("forward", "backward")]
    lines = [
        line.split(":", 1)[-1]
        for frame in sharded_model.frames
        for phase in ("forward", "backward")
        for line in frame.programs[phase].collectives().splitlines()
    ]
    return (
        twin.errors,
        [sorted(d for d in c.distances.values()) for c in chosen],
        lines,
        sharded_model.agreed.decided,
    )


def _uneven(rank, world, hardware):
    # Rank 1 alone has more rows, and later recompiles alone: by its own sizes it would choose otherwise.
    return _train(rank, hardware, lambda rank, step: 4 if rank == 0 else 512 if step < 2 else 512 + step)


@pytest.fixture
def hardware(tmp_path):
    path = tmp_path / "machine.json"
    # Slow arithmetic, so that more rows give a transfer more to hide behind.
    path.write_text(json.dumps(machine(bytes_per_us=2_000.0, matmul_flops_per_us={"float32": 2000.0})))
    return str(path)


def test_ranks_with_different_sizes_start_as_far_ahead(hardware):
    (errors0, chosen0, lines0, known0), (errors1, chosen1, lines1, known1) = run_ranks(_uneven, 2, hardware)
    assert errors0 == errors1 == []
    assert max(max(c) for c in chosen0) > 2
    # Rank 0 compiled once, rank 1 three times, each time with what rank 0 decided at first.
    assert len(chosen0) == 2
    assert len(chosen1) == 6
    assert chosen1 == chosen0 * 3
    assert lines1 == lines0 * 3
    assert known0 == known1


def _own_choice(rank, world, hardware):
    return _train(rank, hardware, lambda rank, step: 512)[1]


def test_the_sizes_of_the_other_rank_would_give_another_choice(hardware):
    # What makes the test above one of agreement.
    many = run_ranks(_own_choice, 2, hardware)
    few = run_ranks(_uneven, 2, hardware)[0][1]
    assert many[0] == many[1]
    assert many[0] != few


def _within(rank, world, apart, cores, rows):
    """The furthest start within a budget that leaves the rank with more rows no room for any."""

    def batch(rows):
        return torch.randn(rows, 32, generator=torch.Generator().manual_seed(rank))

    def sharded(hardware, **budget):
        torch.manual_seed(0)
        how = dict(stage=3, transport="c10d", bucket_bytes=1000, compute="aten")
        return zero.shard(Net(), hardware=hardware, **how, **budget)

    # Where compute and transfers share cores every unit starts one ahead.
    peaks = [0] * world
    peak = zero.inspect(sharded(cores), (batch(512 if rank else 4),)).memory.peak
    torch.distributed.all_gather_object(peaks, peak)
    model = sharded(apart, memory_budget_bytes=max(peaks) + 512)
    torch.compile(model, backend="zero", dynamic=False)(batch(rows[rank])).backward()
    (sharded_model,) = sharded_models_of(model)
    (frame,) = sharded_model.frames
    assert zero.inspect(model).memory.peak <= max(peaks) + 512
    return max(d for phase in ("forward", "backward") for d in frame.choices[phase].distances.values())


def test_within_a_budget_the_rank_with_the_least_room_decides(hardware, tmp_path):
    cores = tmp_path / "cores.json"
    cores.write_text(
        json.dumps(json.loads(Path(hardware).read_text()) | {"shared": [["compute", "device-device"]]})
    )
    # Rank 0 would start ahead, and did where nobody asked rank 1: which then was refused.
    assert run_ranks(_within, 2, hardware, str(cores), (4, 512)) == [1, 1]
    # What makes it a case: two ranks with the few rows of rank 0 do start ahead in the same budget.
    assert min(run_ranks(_within, 2, hardware, str(cores), (4, 4))) > 1


def _alone(rank, world, hardware):
    """One rank looks at a plan alone; nothing waits for the other, and nothing is decided."""
    model = zero.shard(Net(), stage=3, hardware=hardware, transport="c10d", bucket_bytes=1000)
    if rank == 1:
        told = zero.inspect(model, (torch.zeros(4, 32),))
        assert "ahead for head" in told.summary()
    (sharded_model,) = sharded_models_of(model)
    return sharded_model.agreed.decided


def test_a_lone_look_decides_nothing(hardware):
    assert run_ranks(_alone, 2, hardware) == [{}, {}]
