"""Meshes of two dimensions: which of them partitions, and what hybrid sharding makes of a plan."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from harness import SimulatedModel
from machines import machine
from marks import slow
from models import TiedAndFrozen
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zero_compiler as zero
from zero_compiler.cost.hardware import HardwareSpec
from zero_compiler.cost.transfer_costs import transfers
from zero_compiler.errors import ShardError, TransferError
from zero_compiler.ir.instructions import Reduce, WaitReduce
from zero_compiler.memory.peak_check import recount
from zero_compiler.ranks.mesh import bare_mesh, find_again, roles_of
from zero_compiler.runtime.reference import Reference


def mesh(*names: str, shape: tuple[int, ...] = (2, 2)) -> DeviceMesh:
    ranks = torch.arange(torch.tensor(shape).prod()).view(shape)
    return bare_mesh("cpu", ranks, names or None)


@pytest.mark.parametrize(
    ("names", "roles"),
    [
        (("replicate", "shard"), ("replicate", "shard")),
        (("shard", "replicate"), ("shard", "replicate")),
        (("dp_replicate", "dp_shard"), ("replicate", "shard")),
        (("Shard", "hosts"), ("shard", "replicate")),
        (("gpus", "replicate"), ("shard", "replicate")),
        (("dp", "tp"), ("shard", "tensor")),
        (("model_tp", "data"), ("tensor", "shard")),
        (("dp_shard", "tensor_parallel"), ("shard", "tensor")),
        (("hosts", "gpus"), ("replicate", "shard")),  # no name says: as FSDP2 takes them
    ],
)
def test_names_say_which_dimension_shards(names, roles):
    assert roles_of(mesh(*names)) == roles


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (mesh(), "a mesh of two dimensions must name them, so that it says which one shards"),
        (
            mesh("shard", "shard_too"),
            "'shard' and 'shard_too' say 'shard' and 'shard'; one of two must shard",
        ),
        (
            mesh("replicate", "x_replicate"),
            "say 'replicate' and 'replicate'; one of two must shard, and the other",
        ),
        (mesh("dp_replicate", "tp"), "say 'replicate' and 'tensor'; one of two must shard"),
        (mesh("tp", "tensor"), "say 'tensor' and 'tensor'; one of two must shard"),
        (mesh("a", "b", "c", shape=(2, 2, 1)), "mesh must have one or two dimensions, not 3; pass mesh"),
    ],
    ids=["no names", "two that shard", "two that replicate", "none that shards", "two of tensors", "three"],
)
def test_a_mesh_that_does_not_say_is_refused(given, sentence):
    with pytest.raises(ShardError, match=sentence):
        zero.shard(nn.Linear(2, 2), mesh=given)


def test_a_dimension_with_parameters_on_it_is_tensor_parallel_whatever_its_name():
    assert roles_of(mesh("data", "model"), "model") == ("shard", "tensor")


def test_a_model_that_was_pickled_on_other_ranks_is_refused(monkeypatch):
    given = mesh("replicate", "shard")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 7)
    with pytest.raises(
        ShardError, match="was pickled on rank 0 of 4 of a mesh, and is loaded on rank 7 of the job"
    ):
        find_again(given, ("replicate", "shard"), 0, 4, "cpu")


def tokens(rank: int) -> tuple[torch.Tensor]:
    return (torch.randint(0, 7, (4,), generator=torch.Generator().manual_seed(rank)),)


def square(out):
    return out.float().square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, *slow(1), 3])
@pytest.mark.parametrize("world", [*slow(1), 2])
def test_gradients_are_the_mean_over_both_dimensions(world, stage):
    run = SimulatedModel(TiedAndFrozen(7), world, copies=2, stage=stage, bucket_bytes=64)
    run.check([tokens(k) for k in range(2 * world)], square)


@pytest.mark.slow
def test_the_sums_of_replicas_meet_in_the_dtype_of_reduction():
    run = SimulatedModel(
        TiedAndFrozen(7), 2, copies=2, stage=3, param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    one = SimulatedModel(TiedAndFrozen(7), 4, stage=3, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    batches = [tokens(k) for k in range(4)]
    for each in (run, one):
        each.step(batches, square)
    for name, info in run.sharded_model.params.items():
        if not info.layout.sharded or run.rows[0][name].grad is None:
            continue
        whole = torch.cat([one.rows[k][name].grad for k in range(4)])
        mine = whole[info.layout.start(1) : info.layout.start(1) + info.layout.rows(1)]
        # A sum in bf16 would be off by 4e-3.
        torch.testing.assert_close(run.rows[3][name].grad, mine, rtol=1e-5, atol=1e-6)


def test_the_program_names_both_collectives():
    run = SimulatedModel(nn.Linear(4, 6), 2, copies=2, stage=3)
    run.check([(torch.randn(3, 4),) for _ in range(4)], square)
    assert_expected_inline(
        run.programs["backward"].text(live=False),
        """\
compute         segment 0: L['fn']
reduce-scatter, all-reduce x 2 weight float32[6, 4], bias float32[6]
wait            gradients of weight, bias""",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "fields", "beside"),
    [
        # 15 elements of a rank. Several are summed in a copy; nothing is cast.
        (torch.float32, {}, [0, 0, 60]),
        # What is summed waits for its cast, and what it is cast to is counted as the result: 60 bytes, or 30.
        (torch.float32, {"reduce_dtype": torch.bfloat16}, [0, 0, 30]),
        (torch.bfloat16, {"reduce_dtype": torch.float32}, [0, 0, 60 + 60 - 30]),
        # One alone is summed where the transport writes it; with a cast that is there from the start.
        (torch.float32, {"bucket_bytes": 0}, [0] * 5),
        (torch.float32, {"bucket_bytes": 0, "reduce_dtype": torch.bfloat16}, None),
    ],
)
def test_what_is_summed_between_replicas_is_counted(dtype, fields, beside):
    live, counted = [], []
    for copies in (1, 2):
        run = SimulatedModel(nn.Linear(4, 6, dtype=dtype), 2, copies=copies, stage=3, **fields)
        run.step([(torch.randn(3, 4, dtype=dtype),) for _ in range(2 * copies)], square)
        p = run.programs["backward"]
        live.append(p.live)
        counted.append([p.buffer_bytes + sum(row) for row in recount(p)])
        assert all(again <= planned for again, planned in zip(counted[-1], p.live, strict=True))
    more = [[two - one for one, two in zip(*rows, strict=True)] for rows in (live, counted)]
    if beside is None:
        beside, held = [], {}
        for instr in p.instrs:
            r = p.reduces[instr.index] if isinstance(instr, (Reduce, WaitReduce)) else None
            if isinstance(instr, Reduce):
                held[instr.index] = 2 * sum(r.chunk_numels)
            elif isinstance(instr, WaitReduce):  # the sums before it become results
                waited = [k for k in held if k < instr.index]
                for k in waited:
                    del held[k]
            beside.append(sum(held.values()))
        assert 0 < max(beside) <= 2 * 15
    assert more == [beside, beside]


def test_the_reference_runs_what_was_planned():
    run = SimulatedModel(nn.Linear(4, 6), 2, copies=2, stage=3)
    run.step([(torch.randn(3, 4),) for _ in range(4)], square)
    backward = run.references[-1]
    with pytest.raises(TransferError, match="planned for 2 ranks with the same rows, not 1"):
        Reference(backward.program, backward.segments, run.layouts, run.ranks)


def test_the_second_collective_costs_its_own_time():
    spec = HardwareSpec.from_dict(machine(latency_us=3.0, bytes_per_us=8.0))
    one = SimulatedModel(nn.Linear(4, 6), 2, stage=3)
    two = SimulatedModel(nn.Linear(4, 6), 2, copies=2, stage=3)
    for run in (one, two):
        run.step([(torch.randn(3, 4),) for _ in range(run.world)], square)
    costs = [transfers(run.programs["backward"], spec, 2)[1] for run in (one, two)]
    part = 4 * (3 * 4 + 3)  # bytes of one rank's rows of weight and bias
    assert [us for us, _ in costs[1]] == [us + 3.0 + part / 8.0 for us, _ in costs[0]]
    assert [nbytes for _, nbytes in costs[1]] == [nbytes + part for _, nbytes in costs[0]]
