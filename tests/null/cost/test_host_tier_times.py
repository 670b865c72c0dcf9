"""Copies between an accelerator and its host in time: their lane in a simulation, and how far ahead they start."""

from __future__ import annotations

import dataclasses
import json
import random
import re

import pytest
import torch
from harness import SimulatedModel
from machines import machine
from null.hosted import TIERS, deep, on, planned, programs
from torch import nn

from zero_compiler.cost import hardware
from zero_compiler.cost.prefetch import phase_us
from zero_compiler.cost.simulate import simulate
from zero_compiler.cost.timeline import COMPUTE, HOST, LINK, READ
from zero_compiler.ir.instructions import Fetch, Gather
from zero_compiler.plan import schedule

pytestmark = pytest.mark.usefixtures("on_accelerator")


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
