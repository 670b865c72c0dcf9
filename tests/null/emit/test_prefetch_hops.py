"""Programs with shards and gradients on the host of an accelerator, and in files behind it: order, waits, memory."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
import torch
from expecttest import TestCase
from harness import SimulatedModel
from marks import thorough
from null.hosted import TIERS, deep, on, planned, programs
from standin import accelerator
from tiered import Net

import zero_compiler as zero
from zero_compiler.emit.no_sync_program import accumulating
from zero_compiler.errors import ConfigError, MemoryBudgetError, VerifyError
from zero_compiler.ir.instructions import Fetch, Gather, Reduce, Store, WaitFetch, WaitReduce
from zero_compiler.ir.program import Program
from zero_compiler.memory.peak_check import recount
from zero_compiler.memory.verify import verify_accumulating, verify_program

pytestmark = pytest.mark.usefixtures("on_accelerator")


# The Programs ----------------------------------------------------------------------------------------------------


class Goldens(TestCase):
    def setUp(self):
        patch = accelerator()
        patch.__enter__()
        self.addCleanup(patch.__exit__, None, None, None)

    def test_on_the_host(self):
        both = programs(model=deep(2, 8, bias=False), x=torch.ones(2, 8))
        self.assertExpectedInline(
            both["forward"].text(),
            """\
fetch           0.0.weight, 128 bytes a rank, to the device                              live 2,048
wait            copy of 0.0.weight                                                       live 2,048
gather          0.0.weight float32[8, 8]                                                 live 2,048
fetch           1.0.weight, 128 bytes a rank, to the device                              live 2,048
wait            0.0.weight                                                               live 2,048
wait            copy of 1.0.weight                                                       live 2,048
gather          1.0.weight float32[8, 8]                                                 live 2,048
compute         segment 0: L['fn'].0                                                     live 2,176
release         0.0.weight                                                               live 2,112
wait            1.0.weight                                                               live 2,112
compute         segment 1: L['fn'].1                                                     live 2,240
release         1.0.weight                                                               live 2,176""",
        )
        self.assertExpectedInline(
            both["backward"].text(),
            """\
fetch           1.0.weight, 128 bytes a rank, to the device                              live 1,216
wait            copy of 1.0.weight                                                       live 1,216
gather          1.0.weight float32[8, 8]                                                 live 1,216
compute         segment 0: L['fn'].1                                                     live 1,536
wait            1.0.weight                                                               live 1,536
compute         segment 1: L['fn'].1                                                     live 1,600
release         1.0.weight                                                               live 1,536
reduce-scatter  1.0.weight float32[8, 8]                                                 live 1,664
compute         segment 2: L['fn'].0                                                     live 1,856
reduce-scatter  0.0.weight float32[8, 8]                                                 live 1,920
store           gradients of 1.0.weight, 128 bytes a rank                                live 1,920
store           gradients of 0.0.weight, 128 bytes a rank                                live 1,664
wait            gradients of 1.0.weight                                                  live 1,408
wait            gradients of 0.0.weight                                                  live 1,280""",
        )

    def test_in_files_behind_the_host(self):
        both = programs(
            model=deep(3, 8, bias=False),
            x=torch.ones(2, 8),
            offload_params="nvme",
            offload_grads="nvme",
            nvme_dir="/",
        )
        self.assertExpectedInline(
            both["forward"].text(live=False),
            """\
fetch           0.0.weight, 128 bytes a rank
wait            file of 0.0.weight
fetch           0.0.weight, 128 bytes a rank, to the device
fetch           1.0.weight, 128 bytes a rank
wait            copy of 0.0.weight
gather          0.0.weight float32[8, 8]
wait            file of 1.0.weight
fetch           1.0.weight, 128 bytes a rank, to the device
fetch           2.0.weight, 128 bytes a rank
wait            0.0.weight
wait            copy of 1.0.weight
gather          1.0.weight float32[8, 8]
wait            file of 2.0.weight
fetch           2.0.weight, 128 bytes a rank, to the device
compute         segment 0: L['fn'].0
release         0.0.weight
wait            1.0.weight
wait            copy of 2.0.weight
gather          2.0.weight float32[8, 8]
compute         segment 1: L['fn'].1
release         1.0.weight
wait            2.0.weight
compute         segment 2: L['fn'].2
release         2.0.weight""",
        )
        self.assertExpectedInline(
            both["backward"].text(live=False),
            """\
fetch           2.0.weight, 128 bytes a rank
wait            file of 2.0.weight
fetch           2.0.weight, 128 bytes a rank, to the device
fetch           1.0.weight, 128 bytes a rank
wait            copy of 2.0.weight
gather          2.0.weight float32[8, 8]
wait            file of 1.0.weight
fetch           1.0.weight, 128 bytes a rank, to the device
compute         segment 0: L['fn'].2
wait            2.0.weight
wait            copy of 1.0.weight
gather          1.0.weight float32[8, 8]
compute         segment 1: L['fn'].2, L['fn'].1
release         2.0.weight
reduce-scatter  2.0.weight float32[8, 8]
wait            1.0.weight
compute         segment 2: L['fn'].1
release         1.0.weight
reduce-scatter  1.0.weight float32[8, 8]
compute         segment 3: L['fn'].0
store           gradients of 2.0.weight, 128 bytes a rank
reduce-scatter  0.0.weight float32[8, 8]
store           gradients of 1.0.weight, 128 bytes a rank
wait            gradients of 2.0.weight
store           gradients of 0.0.weight, 128 bytes a rank
wait            gradients of 1.0.weight
wait            gradients of 0.0.weight""",
        )


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"param_dtype": torch.bfloat16},
        *thorough({"bucket_bytes": 0}),
        {"bucket_bytes": 0, "tile_bytes": 600},
    ],
    ids=str,
)
@pytest.mark.parametrize("world", [*thorough(1), 2, *thorough(3)])
@pytest.mark.slow
def test_chunks_arrive_and_nothing_is_overwritten_on_the_way(world, fields, tier, tmp_path):
    run = SimulatedModel(deep(), world, **on(tier, tmp_path), **fields)
    inputs = [(torch.randn(3, 16),) for _ in range(world)]
    if fields.get("param_dtype"):
        here = SimulatedModel(deep(), world, **fields)
        assert all(map(torch.equal, *(r.step(inputs, lambda out: out.float().sum()) for r in (run, here))))
        for a, b in zip(run.rows, here.rows, strict=True):
            assert all(torch.equal(a[name].grad, b[name].grad) for name in a)
    else:
        run.check(inputs, lambda out: out.sum())
    for phase, program in run.programs.items():
        assert program.device_bytes > 0
        assert (program.host_bytes > 0) == (tier == "nvme")
        assert any(isinstance(i, Store) for i in program.instrs) == (phase == "backward")


def test_gradients_between_replicas_go_to_the_host():
    run = SimulatedModel(deep(), 2, copies=2, offload_params="host")
    run.check([(torch.randn(3, 16),) for _ in range(4)], lambda out: out.sum())


def test_gradients_that_waited_are_reduced_and_copied_once():
    run = SimulatedModel(deep(), 2, offload_params="host")
    first, second = ([(torch.randn(3, 16),) for _ in range(2)] for _ in range(2))
    _, a, _ = run.eager(first, lambda out: out.sum())
    _, b, _ = run.eager(second, lambda out: out.sum())
    run.sync = False
    run.step(first, lambda out: out.sum())
    run.sync = True
    run.step(second, lambda out: out.sum())
    run.check_gradients({name: a[name] + b[name] for name in a})


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
def test_each_use_waits_for_its_chunks_and_each_result_for_its_copy(tier, tmp_path):
    for phase, program in programs(**on(tier, tmp_path)).items():
        at = {
            (type(i), i.index, getattr(i, "hop", 0)): k
            for k, i in enumerate(program.instrs)
            if hasattr(i, "index")
        }
        for k, g in enumerate(program.gathers):
            tiers = ["nvme", "host"] if tier == "nvme" else ["host"]
            assert [h.tier for h in g.hops] == tiers
            assert [h.pool for h in g.hops] == (["host", "device"] if tier == "nvme" else ["device"])
            steps = [at[kind, k, hop] for hop in range(len(tiers)) for kind in (Fetch, WaitFetch)]
            assert [*steps, at[Gather, k, 0]] == sorted([*steps, at[Gather, k, 0]])
            # Each hop is under way while the gather of the unit before starts, or that unit is copied.
            if k:
                assert at[Fetch, k, len(tiers) - 1] > at[Gather, k - 1, 0]
                assert at[Fetch, k, len(tiers) - 1] < at[WaitFetch, k, len(tiers) - 1] - 1
        copied = [k for k, r in enumerate(program.reduces) if r.copied]
        assert len(copied) == (4 if phase == "backward" else 0)
        for k, r in enumerate(program.reduces):
            assert r.tiers == (("host", "nvme") if r.tiers[-1:] == ("nvme",) else ("host",))
            assert at[Reduce, k, 0] < at[Store, k, 0] < at[WaitReduce, k, 0]
        # The copy goes on until the next result has landed.
        for first, second in itertools.pairwise(copied):
            assert at[WaitReduce, first, 0] == at[Store, second, 0] + 1


@pytest.mark.slow
def test_the_program_survives_json():
    for program in programs().values():
        assert Program.from_dict(json.loads(program.to_json())) == program


def test_the_verifier_sees_what_does_not_wait():
    program = programs()["backward"]
    worlds = {g.owner: 2 for g in program.gathers}
    verify_program(program, worlds)

    def broken(drop, message):
        instrs = [i for i in program.instrs if not drop(i)]
        with pytest.raises(VerifyError, match=message):
            verify_program(dataclasses.replace(program, instrs=instrs), worlds)

    broken(lambda i: isinstance(i, WaitFetch) and i.index == 1, "gather 1 is fetching, must be fetched")
    broken(lambda i: isinstance(i, (Fetch, WaitFetch)) and i.index == 1, "gather 1 is idle, must be fetched")
    broken(lambda i: isinstance(i, Store) and i.index == 1, "reduce 1 is started, must be stored")
    broken(lambda i: isinstance(i, WaitReduce) and i.index == 1, "output .* was never written")
    # Two chunks that lie there at the same time.
    g = [
        dataclasses.replace(x, hops=(dataclasses.replace(x.hops[0], offsets=(0,)),)) for x in program.gathers
    ]
    with pytest.raises(VerifyError, match=r"planned memory \(device\)"):
        verify_program(dataclasses.replace(program, gathers=g), worlds)
    # A result that rests on the device has nowhere to be copied to.
    r = [dataclasses.replace(x, tiers=()) for x in program.reduces]
    with pytest.raises(VerifyError, match=r"reduction \d+ rests where it is, and is not to be copied"):
        verify_program(dataclasses.replace(program, reduces=r), worlds)


def test_the_verifier_sees_a_hop_that_is_left_out(tmp_path):
    program = programs(**on("nvme", tmp_path))["forward"]
    worlds = {g.owner: 2 for g in program.gathers}
    instrs = [i for i in program.instrs if not (isinstance(i, (Fetch, WaitFetch)) and i.index == 1 and i.hop)]
    with pytest.raises(VerifyError, match="gather 1 starts after 1 of 2 hops of its chunks"):
        verify_program(dataclasses.replace(program, instrs=instrs), worlds)
    instrs = [
        dataclasses.replace(i, hop=1 - i.hop) if isinstance(i, (Fetch, WaitFetch)) and i.index == 1 else i
        for i in program.instrs
    ]
    with pytest.raises(VerifyError, match="hop 1 of gather 1 is not number 0 of 2"):
        verify_program(dataclasses.replace(program, instrs=instrs), worlds)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_what_leaves_the_device_counts_there_until_it_is_copied(world):
    program = programs(world=world)["backward"]
    chunk = 64 * 64 * 4 // world
    held = 0
    for k, (instr, (reduced, others)) in enumerate(zip(program.instrs, recount(program), strict=True)):
        assert reduced == 0  # nothing rests on the device
        if isinstance(instr, (Store, WaitReduce)):
            assert others >= chunk, k
        held = max(held, others)
        assert program.live[k] >= others  # with the arenas
    kept = accumulating(program, {r.owner for r in program.reduces})
    verify_accumulating(
        kept, program, {r.owner for r in program.reduces}, {r.owner: world for r in program.reduces}
    )
    assert not any(isinstance(i, Store) for i in kept.instrs)
    assert min(kept.live) >= 0


# Memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_device_and_the_host_count_apart(tmp_path):
    chunk = 64 * 64 * 4 // 2
    for tier in TIERS:
        told = planned(**on(tier, tmp_path))
        memory, both = told.memory, told.frames[0].programs
        assert memory.parameters == memory.gradients == memory.optimizer == memory.host == 0
        pool = max(p.host_bytes for p in both.values())
        if tier == "host":
            assert (memory.files, pool) == (0, 0)
            assert memory.apart == 4 * (chunk + chunk + 2 * chunk)
        else:
            assert memory.files == 4 * chunk
            assert memory.apart == 4 * (chunk + 2 * chunk) + pool
        assert memory.arena == max(p.buffer_bytes for p in both.values())
        assert memory.arena >= max(p.device_bytes for p in both.values()) > 0
        assert "bytes of this rank on the host" in str(told)
    here = planned(offload_params="none").memory
    assert (here.parameters, here.gradients, here.apart) == (4 * chunk, 4 * chunk, 0)


@pytest.mark.slow
def test_the_pool_on_the_device_is_two_layers_or_three_on_one_rank():
    """However deep the model is: a layer on its way, one that is gathered, and one with which one rank computes."""
    for depth in (6, 12):
        for world, layers in ((1, 3), (2, 2)):
            both = programs(model=deep(depth, 64, bias=False), world=world, memory_budget_bytes=1 << 30)
            for phase, program in both.items():
                assert program.device_bytes == layers * 64 * 64 * 4 // world, (depth, world, phase)


@pytest.mark.slow
def test_a_budget_of_the_device_alone_is_kept():
    none, host = (planned(offload_params=tier).memory for tier in ("none", "host"))
    assert host.peak < none.peak
    fits = planned(memory_budget_bytes=host.peak)
    assert fits.memory.peak <= host.peak
    with pytest.raises(MemoryBudgetError):
        planned(offload_params="none", memory_budget_bytes=host.peak)


# Refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"offload_grads": "host"}, 'offload_grads="host" needs offload_params="host" or "nvme"'),
        ({"offload_params": "host", "offload_grads": "none"}, 'offload_grads="none" would keep on cpu'),
        ({"offload_params": "host", "offload_optimizer": "none"}, 'offload_optimizer="none" would keep'),
        ({"offload_params": "host", "stage": 2}, 'offload_params="host" needs stage=3, not 2'),
        ({"offload_activations": "nvme"}, 'offload_activations="nvme" needs nvme_dir'),
    ],
)
def test_tiers_that_do_not_go_together(fields, message):
    with pytest.raises(ConfigError, match=message):
        zero.shard(Net(), **fields)
