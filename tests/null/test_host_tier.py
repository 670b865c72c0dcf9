"""Shards and gradients on the host of an accelerator, and in files behind it; a CPU stands in the accelerator's place."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
import types
from unittest import mock

import pytest
import torch
from expecttest import TestCase
from harness import SimulatedModel
from machines import machine
from marks import slow
from standin import accelerator
from torch import nn, optim

import zero_compiler as zero
from zero_compiler import hardware, schedule
from zero_compiler.errors import ConfigError, MemoryBudgetError, ShardError, VerifyError
from zero_compiler.keeping import accumulating
from zero_compiler.layout import layout_of
from zero_compiler.planning import planned_group, report
from zero_compiler.policy import Policy
from zero_compiler.prefetch import phase_us
from zero_compiler.program import Fetch, Gather, Program, Reduce, Store, WaitFetch, WaitReduce
from zero_compiler.recount import recount
from zero_compiler.runtime.hops import Aside
from zero_compiler.runtime.stores import region_of
from zero_compiler.shard import sharded_parameter
from zero_compiler.simulate import COMPUTE, HOST, LINK, READ, simulate
from zero_compiler.verify import verify_accumulating, verify_program


@pytest.fixture(autouse=True)
def standin():
    with accelerator():
        yield


def deep(depth=4, width=16, bias=True):
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width, bias=bias), nn.Tanh()) for _ in range(depth))
    )


class Net(nn.Module):
    """With a scalar, which every rank holds on its device, and a frozen weight."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 100)
        self.inner = nn.Linear(100, 100)
        self.last = nn.Linear(100, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.inner(x))) * self.scale + self.frozen


def planned(model=None, world=2, x=None, **fields):
    """The report of a plan; on the host unless told otherwise."""
    fields = {"offload_params": "host", "bucket_bytes": 0} | fields
    torch._dynamo.reset()
    model = model or deep(4, 64, bias=False)
    return report(model, (torch.ones(2, 64) if x is None else x,), world, **fields)


def programs(**fields) -> dict[str, Program]:
    return planned(**fields).frames[0].programs


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
compute         segment 0: L['fn'].1                                                     live 1,472
wait            1.0.weight                                                               live 1,472
compute         segment 1: L['fn'].1                                                     live 1,536
release         1.0.weight                                                               live 1,472
reduce-scatter  1.0.weight float32[8, 8]                                                 live 1,600
compute         segment 2: L['fn'].0                                                     live 1,792
reduce-scatter  0.0.weight float32[8, 8]                                                 live 1,856
store           gradients of 1.0.weight, 128 bytes a rank                                live 1,856
store           gradients of 0.0.weight, 128 bytes a rank                                live 1,600
wait            gradients of 1.0.weight                                                  live 1,344
wait            gradients of 0.0.weight                                                  live 1,216""",
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


TIERS = ["host", "nvme"]


def on(tier, folder) -> dict[str, str]:
    return {"offload_params": tier} | ({"nvme_dir": str(folder)} if tier == "nvme" else {})


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(
    "fields",
    [{}, *slow({"param_dtype": torch.bfloat16}, {"bucket_bytes": 0}, {"bucket_bytes": 0, "tile_bytes": 600})],
    ids=str,
)
@pytest.mark.parametrize("world", [*slow(1), 2, *slow(3)])
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


# Time ------------------------------------------------------------------------------------------------------------


def spec_of(**links) -> hardware.HardwareSpec:
    made = {name: {"latency_us": 1e-6, "bytes_per_us": rate} for name, rate in links.items()}
    return hardware.HardwareSpec.from_dict(machine(**made))


@pytest.mark.slow
def test_the_simulation_has_a_lane_for_copies():
    plain, far = (programs(offload_params=tier)["backward"] for tier in ("none", "host"))
    spec = spec_of(host_device=1e4)
    none, host = simulate(plain, spec, 2), simulate(far, spec, 2)
    assert none.busy_us(HOST) == 0
    # Every chunk comes, and every gradient of a chunk goes.
    chunks = sum(g.chunk_bytes for g in far.gathers)
    grads = sum(r.result_bytes for r in far.reduces)
    assert host.nbytes(HOST) == chunks + grads > 0
    assert host.nbytes(LINK) == none.nbytes(LINK)
    assert any("copies" in line and "busy for" in line for line in host.lines())
    assert simulate(far, spec_of(host_device=1.0), 2).bound == HOST
    assert simulate(far, spec_of(host_device=1e9), 2).total_us == pytest.approx(none.total_us, rel=0.01)


def test_the_three_lanes_overlap_with_each_other_and_with_compute(tmp_path):
    model = deep(8, 256, bias=False)
    told = planned(model, x=torch.ones(64, 256), **on("nvme", tmp_path))
    program = told.frames[0].programs["forward"]
    program = dataclasses.replace(program, segment_us=[100.0] * len(program.segment_us))
    chunk = program.gathers[0].chunk_bytes
    rate = chunk / 60.0
    spec = spec_of(host_device=rate, nvme_read=rate, nvme_write=rate)
    spans = simulate(program, spec, 2).spans
    lanes = {lane: [s for s in spans if s.lane == lane] for lane in (COMPUTE, LINK, HOST, READ)}

    def overlap(a, b):
        return any(x.start_us < y.end_us and y.start_us < x.end_us for x in lanes[a] for y in lanes[b])

    assert all(lanes.values())
    for a, b in ((READ, HOST), (READ, COMPUTE), (HOST, COMPUTE), (LINK, COMPUTE), (READ, LINK), (HOST, LINK)):
        assert overlap(a, b), (a, b)


class Uneven(nn.Module):
    """Small layers, and a large one whose chunk takes longer to come than one small layer computes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.small = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(6))
        self.large = nn.Linear(64, 1024, bias=False)

    def forward(self, x):
        for layer in self.small:
            x = torch.tanh(layer(x))
        return self.large(x)


@pytest.mark.slow
def test_a_copy_starts_as_much_earlier_as_hides_it():
    program = programs(model=Uneven(), x=torch.ones(8, 64))["forward"]
    program = dataclasses.replace(program, segment_us=[100.0] * len(program.segment_us))
    large = program.gathers[-1].chunk_bytes
    spec = spec_of(host_device=large / 350.0)
    far = schedule.hop_distances(program, 1, spec, 2, budgeted=False)
    assert far is not None
    assert far[-1] > 1  # three and a half small layers hide it
    phase = schedule.hop_phase(program, 1, spec, 2)
    assert phase_us(phase, far) < phase_us(phase, [1] * len(far))
    assert sum(phase.gather_us) == pytest.approx(
        sum(g.chunk_bytes for g in program.gathers) / large * 350, rel=0.01
    )
    # Where nothing more may be in flight, and where a link hides it anyway, it is one unit ahead.
    assert set(schedule.hop_distances(program, 1, spec, 2, budgeted=True)) == {1}
    assert set(schedule.hop_distances(program, 1, spec_of(host_device=1e9), 2, budgeted=False)) == {1}
    assert schedule.hop_distances(program, 2, spec, 2, budgeted=False) is None
    plain = programs(model=Uneven(), x=torch.ones(8, 64), offload_params="none")["forward"]
    assert schedule.hop_distances(plain, 1, spec, 2, budgeted=False) is None


@pytest.mark.slow
def test_the_search_sees_the_time_that_the_simulation_takes():
    """Of a Program whose hops stand one unit ahead."""
    program = programs(model=Uneven(), x=torch.ones(8, 64), memory_budget_bytes=1 << 30)["forward"]
    program = dataclasses.replace(program, segment_us=[100.0] * len(program.segment_us))
    for rate in (1.0, 100.0, 1e4):
        spec = spec_of(host_device=rate)
        phase = schedule.hop_phase(program, 1, spec, 2)
        us = phase_us(phase, [1] * len(phase.gather_us))
        assert us == pytest.approx(simulate(program, spec, 2).total_us, rel=0.05)


@pytest.mark.slow
def test_a_plan_with_hops_further_ahead_computes_the_same(tmp_path):
    (first,) = planned(Uneven(), x=torch.ones(8, 64)).frames
    program = first.programs["forward"]
    rate = program.gathers[-1].chunk_bytes / (3.5 * program.segment_us[2])  # of a small layer
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine(host_device={"latency_us": 1e-6, "bytes_per_us": rate})))
    run = SimulatedModel(Uneven(), 2, offload_params="host", bucket_bytes=0, hardware=str(path))
    run.check([(torch.randn(8, 64),) for _ in range(2)], lambda out: out.square().mean())
    program = run.programs["forward"]
    order = [(type(i), i.index) for i in program.instrs if isinstance(i, (Fetch, Gather))]
    last = len(program.gathers) - 1
    assert order.index((Fetch, last)) < order.index((Gather, last - 2))
    assert re.search(
        r"note: chunks are copied to the device up to \d units ahead",
        str(planned(Uneven(), x=torch.ones(8, 64), hardware=str(path))),
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tier", TIERS)
def test_hops_may_start_anywhere_before_their_waits(tier, seed, tmp_path, monkeypatch):
    """Whatever the search finds: the Program is verified, and chunks on their way do not meet."""
    generator = random.Random(seed)

    def anywhere(program, stage, *_):
        if any(len(g.hops) >= stage for g in program.gathers):
            starts = sorted(generator.randint(0, u) for u in range(len(program.gathers)))
            return [u - min(start, u) + 1 for u, start in enumerate(starts)]
        return None

    monkeypatch.setattr(schedule, "hop_distances", anywhere)
    run = SimulatedModel(deep(6, 8, bias=False), 2, bucket_bytes=0, **on(tier, tmp_path))
    run.check([(torch.randn(3, 8),) for _ in range(2)], lambda out: out.square().sum())


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


# Running ---------------------------------------------------------------------------------------------------------


def made(folder, cls=Net, **fields):
    torch.manual_seed(0)
    return zero.shard(cls(), nvme_dir=str(folder), **fields)


def compiled(model, **options):
    torch._dynamo.reset()
    return torch.compile(model, backend="zero", options={"compute": "aten"} | options)


def train(model, run, optimizer, steps=3):
    losses = []
    for i in range(steps):
        for k in range(2):  # the second adds to the gradients of the first
            torch.manual_seed(10 * i + k)
            loss = run(torch.randn(8, 64)).square().mean()
            loss.backward()
            losses.append(loss.item())
        if i % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def local(x):
    return getattr(x, "_local_tensor", x).detach()


def assert_same(model, other):
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(local(a), local(b)), name


@pytest.mark.slow
def test_every_combination_of_the_three_options(tmp_path):
    """On a CPU all of them; on an accelerator (a CPU in its place) those that are not refused."""
    kinds = ("none", "host", "nvme")
    refused = set()

    def steps(model):
        optimizer = zero.optimizer(optim.AdamW, model, lr=0.01)
        run, losses = compiled(model), []
        for i in range(2):
            for k in range(2):  # the second adds to the gradients of the first
                loss = run(torch.linspace(-1, i + k, 128).view(2, 64)).square().mean()
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        states = [local(v).clone() for p in model.parameters() for v in optimizer.state.get(p, {}).values()]
        return losses, [local(p).clone() for p in model.parameters()], states

    def small(tiers):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 24), nn.Tanh())
        fields = dict(zip(("offload_params", "offload_grads", "offload_optimizer"), tiers, strict=True))
        return zero.shard(model, nvme_dir=str(tmp_path), **fields)

    losses, params, states = steps(small(("none",) * 3))
    assert len(states) == 3 * len(params)
    for tiers, apart in itertools.product(itertools.product(kinds, repeat=3), (False, True)):
        with mock.patch.object(Policy, "apart", apart):
            try:
                model = small(tiers)
            except ConfigError:
                refused.add((tiers, apart))
                continue
            got = steps(model)
            assert got[0] == losses, tiers
            assert all(map(torch.equal, got[1] + got[2], params + states)), tiers
            in_file = [
                region_of(local(model[0].weight)) is not None,
                zero.inspect(model).memory.files >= 4 * sum(p.numel() for p in model.parameters()),
            ]
            assert in_file == [tiers[0] == "nvme", "nvme" in tiers], tiers
    want = {
        (t, True)
        for t in itertools.product(kinds, repeat=3)
        if (t[1] != "none" if t[0] == "none" else "none" in t[1:])
    }
    assert refused == want


CHAINS = [("host", None), ("host", "host"), ("host", "nvme"), ("nvme", None), ("nvme", "nvme")]


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"param_dtype": torch.bfloat16}, {"tile_bytes": 8192}], ids=str)
@pytest.mark.parametrize(("params", "grads"), CHAINS)
def test_one_rank_trains_as_with_everything_on_the_device(params, grads, fields, tmp_path):
    want = made(tmp_path, **fields)
    losses = train(want, compiled(want), optim.AdamW(want.parameters()))
    model = made(tmp_path, offload_params=params, offload_grads=grads, **fields)
    got = train(model, compiled(model), optim.AdamW(model.parameters()))
    if "tile_bytes" in fields:  # one rank has no tiles of what is on its device: other sums
        torch.testing.assert_close(got, losses)
    else:
        assert got == losses
        assert_same(model, want)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tier", [None, "host", "nvme"])
def test_states_are_beside_the_shards_or_in_files(tier, overlap, tmp_path):
    def steps(model):
        optimizer = zero.optimizer(optim.AdamW, model, overlap=overlap)
        run, losses = compiled(model), []
        for i in range(3):
            torch.manual_seed(i)
            loss = run(torch.randn(8, 64)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    want = made(tmp_path)
    model = made(tmp_path, offload_params="host", offload_optimizer=tier)
    assert steps(model) == steps(want)
    assert_same(model, want)
    memory = zero.inspect(model).memory
    assert memory.optimizer == 0 or tier != "nvme"
    assert (memory.files > 0) == (tier == "nvme")


@pytest.mark.slow
def test_eager_code_and_windows_and_checkpoints(tmp_path):
    want, model = made(tmp_path), made(tmp_path, offload_params="host")
    x = torch.ones(2, 64)
    for m in (want, model):
        m(x).sum().backward()
    assert torch.equal(local(model.inner.weight.grad), local(want.inner.weight.grad))
    with zero.gathered(model, write=True):
        model.inner.weight.fill_(0.5)
    assert torch.equal(local(model.inner.weight), torch.full((100, 100), 0.5))
    model.load_state_dict(want.state_dict())
    assert_same(model, want)
    run, other = compiled(model), compiled(want)
    assert torch.equal(run(x), other(x))
    with torch.no_grad():
        for m in (model, want):
            m.first.weight.mul_(0.5)
    assert torch.equal(run(x), other(x))


@pytest.mark.slow
def test_accumulation_without_communication(tmp_path):
    want, model = made(tmp_path), made(tmp_path, offload_params="host")
    for m in (want, model):
        run = compiled(m)
        with zero.no_sync(m):
            run(torch.ones(2, 64)).sum().backward()
        run(torch.full((2, 64), 0.5)).sum().backward()
    for (name, a), b in zip(model.named_parameters(), want.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(local(a.grad), local(b.grad)), name


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
def test_a_model_that_is_built_on_the_host(tier, tmp_path):
    want = made(tmp_path)
    torch.manual_seed(0)
    with zero.init(nvme_dir=str(tmp_path), offload_params=tier):
        model = Net()
    assert_same(model, want)
    assert train(model, compiled(model), optim.AdamW(model.parameters())) == train(
        want, compiled(want), optim.AdamW(want.parameters())
    )


@pytest.mark.slow
def test_a_call_that_broke_off_leaves_nothing_behind(tmp_path):
    want, model = made(tmp_path), made(tmp_path, offload_params="host")
    run, other = compiled(model), compiled(want)
    run(torch.ones(2, 64)).sum().backward()
    model.zero_grad()
    session_of = model._zero.policy.frames[0]
    assert session_of.programs["backward"].device_bytes > 0

    def stop(grad):
        raise ValueError("the user's")

    x = torch.ones(2, 64, requires_grad=True)
    y = x * 2
    y.register_hook(stop)
    with pytest.raises(ValueError, match="the user's"):
        run(y).sum().backward()
    model.zero_grad()
    for r in (run, other):
        r(torch.full((2, 64), 0.5)).sum().backward()
    assert torch.equal(local(model.inner.weight.grad), local(want.inner.weight.grad))


# On the host of another device -----------------------------------------------------------------------------------


def test_rows_on_the_host_stay_there():
    """torch copies what it is given to the device of a mesh."""
    group = planned_group(2, "cuda")
    layout = layout_of(torch.empty(5, 3), 2, 3)
    param = sharded_parameter(group, layout, torch.zeros(3, 3), True)
    assert (param.device.type, param.device_mesh.device_type) == ("cpu", "cuda")
    assert param.shape == (5, 3)
    param.grad = torch.distributed.tensor.DTensor.__new__(
        torch.distributed.tensor.DTensor, torch.ones(3, 3), param._spec, requires_grad=False
    )
    optim.AdamW([param], lr=0.1).step()
    assert local(param).abs().sum() > 0


def test_copies_run_behind_what_was_computed_and_are_waited_for(monkeypatch):
    """In which order the device is told of what, by streams that only note it."""
    told: list[str] = []

    class Event:
        def query(self):
            return False

        def synchronize(self):
            told.append("host waits")

    class Stream:
        def wait_stream(self, other):
            told.append("copies wait for compute")

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def record_event(self):
            told.append("copied")
            return Event()

    current = types.SimpleNamespace(wait_event=lambda event: told.append("compute waits for copies"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: current)
    aside = Aside(torch.device("cpu"), Stream())
    event = aside.to_device([torch.zeros(2)], [torch.ones(2)])
    assert told == ["copies wait for compute", "copied"]
    aside.wait(event)
    assert told[2:] == ["compute waits for copies"]
    aside.reads(event, [(0, 100)])
    aside.spare(100, 200)  # nothing reads there
    assert told[3:] == []
    aside.spare(50, 60)
    assert told[3:] == ["host waits"]
    aside.finish()
    assert told[4:] == ["host waits"]
    aside.spare(50, 60)
    aside.finish()
    assert told[5:] == []


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


def test_states_that_were_told_to_rest_elsewhere_need_our_optimizer(tmp_path):
    model = made(tmp_path, offload_params="host", offload_optimizer="nvme")
    model(torch.ones(2, 64)).sum().backward()
    with pytest.raises(ShardError, match="make it as zero.optimizer"):
        optim.AdamW(model.parameters()).step()
