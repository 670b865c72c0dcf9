"""How far ahead the gathers of a model start, on machines of several speeds, and what the report says of it."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import pytest
import torch
from machines import machine
from null.instructions import gather_of, program_of, reduce_of, spec_of
from torch import nn

from zero_compiler.cost.hardware import PythonTime, load
from zero_compiler.cost.prefetch import phase_us
from zero_compiler.cost.simulate import simulate
from zero_compiler.cost.timeline import COMPUTE, LINK, PYTHON, READ, WRITE
from zero_compiler.ir.instructions import Compute, Fetch, Gather, Reduce, WaitFetch, WaitGather, WaitReduce
from zero_compiler.ir.transfers import Hop
from zero_compiler.plan import schedule
from zero_compiler.storage.writeback_buffers import write_buffers
from zero_compiler.tools.planning import plan, report

LAYERS = 8


class Headed(nn.Module):
    """Small layers, then a head that takes as long to gather as several of them to compute."""

    def __init__(self, width: int = 64, out: int = 4096) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(LAYERS))
        self.head = nn.Linear(width, out, bias=False)

    def forward(self, x):
        for layer in self.h:
            x = torch.tanh(layer(x))
        return self.head(x).square().mean()


@pytest.fixture
def on(tmp_path):
    def write(**fields) -> str:
        path = tmp_path / f"machine{len(list(tmp_path.iterdir()))}.json"
        path.write_text(json.dumps(machine(**fields)))
        return str(path)

    return write


def reported(hardware: str, **fields):
    torch._dynamo.reset()
    return report(Headed(), (torch.zeros(4, 64),), 2, hardware=hardware, bucket_bytes=0, **fields)


def frame_of(hardware: str, world: int = 2, **fields):
    torch._dynamo.reset()
    (frame,) = plan(Headed(), (torch.zeros(4, 64),), world, hardware=hardware, bucket_bytes=0, **fields)
    return frame


def ahead(program) -> dict[str, int]:
    """By unit, how many waits of other units stand between the start of its gather and its own wait, plus one."""
    waited = 0
    started: dict[str, int] = {}
    out = {}
    for instr in program.instrs:
        if isinstance(instr, Gather):
            started[program.gathers[instr.index].unit] = waited
        elif isinstance(instr, WaitGather):
            unit = program.gathers[instr.index].unit
            out[unit] = waited - started[unit] + 1
            waited += 1
    return out


def test_a_large_weight_starts_as_early_as_its_transfer_needs(on):
    hardware = on()
    frame = frame_of(hardware)
    program, timeline = frame.programs["forward"], frame.timelines["forward"]
    # A layer computes for about 20 us (two kernels of 10) and moves 16 KiB in 3 us; the head moves 1 MiB in 106.
    want = math.ceil((1 + 64 * 4096 * 4 / 10_000) / program.segment_us[1])
    assert 4 <= want <= 6
    found = ahead(program)
    assert found["head"] == want
    # The layers in between come first on the lane: none starts behind the head. Those before start one ahead.
    start = LAYERS + 1 - want
    for i in range(LAYERS):
        assert i + 1 - found[f"h.{i}"] <= start if i >= start else found[f"h.{i}"] == 1
    # Nothing is waited for but the first layer, which nothing can hide.
    assert [s.label for s in timeline.waited_for()] == ["gather of h.0.weight"]


@pytest.mark.slow
def test_the_search_sees_what_the_simulation_sees(on):
    hardware = on()
    for phase in ("forward", "backward"):
        frame = frame_of(hardware)
        program, spec = frame.programs[phase], load(hardware)
        by_name = {unit.partition(":")[2]: d for unit, d in frame.choices[phase].distances.items()}
        # The same Program at distance 1, from a machine without anything to hide.
        plain = frame_of(on(share=True)).programs[phase]
        plain.segment_us = program.segment_us
        seen = schedule.look(plain, spec, 2)
        chosen = {unit: by_name[unit.partition(":")[2]] for unit in seen.units}
        assert max(chosen.values()) > 1 or phase == "backward"
        assert phase_us(seen.phase, [1] * len(seen.units)) == pytest.approx(simulate(plain, spec, 2).total_us)
        assert phase_us(seen.phase, seen.of(chosen)) == pytest.approx(frame.timelines[phase].total_us)
        assert frame.timelines[phase].total_us <= simulate(plain, spec, 2).total_us


@pytest.mark.parametrize(
    ("fields", "world", "why"),
    [
        ({"share": True}, 2, "compute and transfers share cores here"),
        ({}, 1, "nothing moves between ranks"),
    ],
)
def test_where_nothing_is_to_decide_nothing_is_looked_at(on, monkeypatch, fields, world, why):
    monkeypatch.setattr(schedule, "choose", lambda *_: pytest.fail("distances were searched"))
    frame = frame_of(on(**fields), world)
    for phase in ("forward", "backward"):
        assert why in frame.choices[phase].why
        assert set(ahead(frame.programs[phase]).values()) <= {1}


def test_kept_weights_move_nothing_in_backward(on):
    frame = frame_of(on(), stage=2)
    assert frame.choices["backward"].why == "nothing moves between ranks"
    gathers = [s for s in frame.timelines["backward"].spans if s.label.startswith("gather")]
    assert gathers == []
    assert ahead(frame.programs["forward"])["head"] > 1


@pytest.mark.slow
def test_a_budget_bounds_what_is_in_flight(on):
    tight = reported(on(share=True))
    hardware = on()
    one = 64 * 64 * 4
    peaks, distances = [], []
    for layers in (0, 1, 2, 64):
        budget = tight.memory.peak + layers * one
        told = reported(hardware, memory_budget_bytes=budget)
        (frame,) = told.frames
        peaks.append(told.memory.peak)
        distances.append(ahead(frame.programs["forward"])["head"])
        assert told.memory.peak <= budget
    assert distances[0] < distances[-1] == ahead(frame_of(hardware).programs["forward"])["head"]
    assert distances == sorted(distances)


def test_the_report_says_how_far_and_why(on):
    text = reported(on()).summary()
    assert re.search(
        r"gathers start one unit ahead, but 5 ahead for head, .*: stall [0-9.]+ us becomes", text
    )
    assert "two of the largest unit" in text
    assert "waits 2.6 us for the gather of h.0.weight: 0% of 2.6 us hidden" in text


def test_a_choice_means_the_same_on_every_rank():
    mine = ["m1f:", "m1f:h.0", "m1f:h.0", "m2a:h.0"]
    theirs = ["m77:", "m77:h.0", "m77:h.0", "m03:h.0"]
    assert schedule.key_of("forward", mine) == schedule.key_of("forward", theirs)
    assert schedule.key_of("forward", mine) != schedule.key_of("backward", mine)
    assert schedule.key_of("forward", mine) != schedule.key_of("forward", [*mine[:3], "m1f:h.1"])
    text = schedule.to_text({"m1f:h.0": 3}, mine)
    assert schedule.from_text(text, theirs) == {"m77:": 1, "m77:h.0": 3, "m03:h.0": 1}


# The simulation, by hand -----------------------------------------------------------------------------------


CORES = [("compute", "device-device")]
# Computes for 10 us while 400 bytes travel: 2 + 4 us, if nothing else ran.
BEHIND = [Gather(0), Compute(0, (), (), ()), WaitGather(0, (-1,))]


@pytest.mark.parametrize(
    ("shared", "computed_us", "moved_us"),
    [
        ([], 10.0, 6.0),  # side by side
        (CORES, 16.0, 12.0),  # each at half speed until the transfer ends; 4 us of computing are left then
        ([("compute", "host-device")], 10.0, 6.0),  # shared with another lane
    ],
)
def test_lanes_that_share_cores_slow_each_other_down(shared, computed_us, moved_us):
    program = program_of(BEHIND, [gather_of(50)], segment_us=[10.0])
    timeline = simulate(program, spec_of(shared), 2)
    ends = {s.lane: (s.start_us, s.end_us) for s in timeline.spans}
    assert ends == {"compute": (0.0, pytest.approx(computed_us)), LINK: (0.0, pytest.approx(moved_us))}
    assert timeline.total_us == pytest.approx(computed_us)
    assert timeline.stalled_us == 0
    # What the step takes longer than its computing is not hidden, although nothing is waited for.
    assert timeline.exposed_us(LINK) == pytest.approx(computed_us - 10.0)
    hidden = 0.0 if shared is CORES else 1.0
    (moved,) = (s for s in timeline.spans if s.lane == LINK)
    assert moved.hidden == pytest.approx(hidden)
    assert timeline.lines()[0].startswith(
        f"predicted {computed_us / 1e3:.2f} ms: compute 0.01 ms, transfers 0.01 ms for 400 bytes, {hidden:.0%} of them"
    )


def test_a_transfer_that_is_waited_for_has_the_cores_to_itself():
    # 1000 bytes: 12 us alone. Half speed for the 20 us of computing 10; the 2 us that are left at full speed.
    program = program_of(BEHIND, [gather_of(125)], segment_us=[10.0])
    timeline = simulate(program, spec_of(CORES), 2)
    assert timeline.total_us == pytest.approx(22.0)
    assert timeline.stalls == {LINK: pytest.approx(2.0)}
    (moved,) = (s for s in timeline.spans if s.lane == LINK)
    assert (moved.start_us, moved.end_us) == (0.0, pytest.approx(22.0))
    # 12 us alone, and the step takes 12 us longer than its computing: two are waited for, ten slow it down.
    assert (moved.alone_us, moved.slowed_us) == (pytest.approx(12.0), pytest.approx(10.0))
    assert moved.hidden == pytest.approx(0.0)
    assert timeline.lines()[0].endswith("0% of them hidden; bound by device-device")


@pytest.mark.parametrize("shared", [[], CORES])
@pytest.mark.parametrize(("numel", "bound"), [(75, COMPUTE), (125, LINK), (300, LINK)])
def test_a_step_is_bound_by_what_takes_longer(shared, numel, bound):
    """10 us of computing; 8, 12 or 26 us of moving, of which the first ten can be hidden where no core is shared."""
    program = program_of(BEHIND, [gather_of(numel)], segment_us=[10.0])
    timeline = simulate(program, spec_of(shared), 2)
    assert timeline.bound == bound
    assert timeline.exposed_us(LINK) == pytest.approx(timeline.total_us - 10.0)
    assert (timeline.alone_us(COMPUTE), timeline.alone_us(LINK)) == (10.0, 2.0 + 8 * numel / 100)


@pytest.mark.parametrize("params", [1, 5])
def test_python_adds_to_a_step_on_cpu_and_runs_beside_an_accelerator(params):
    """10 us of computing; Python takes 4 us, and 3 for each parameter."""
    program = program_of(BEHIND, [gather_of(50)], segment_us=[10.0])
    python_us = 4.0 + 3.0 * params
    around = {"forward_python": PythonTime(4.0, 3.0), "backward_python": PythonTime(100.0, 100.0)}
    alone, cpu = (simulate(program, spec_of(CORES, **f), 2, params=params) for f in ({}, around))
    assert cpu.total_us == pytest.approx(alone.total_us + python_us)
    assert cpu.python_us == python_us
    # First come the parameters, then the Program.
    assert cpu.reached_us == pytest.approx([us + python_us for us in alone.reached_us])
    assert (cpu.alone_us(PYTHON), cpu.alone_us(COMPUTE)) == (python_us, 10.0)
    assert f"compute 0.01 ms, Python {python_us / 1e3:.2f} ms, transfers" in cpu.lines()[0]

    far = simulate(program, spec_of([], **around), 2, params=params)
    assert far.total_us == max(10.0, python_us)
    assert far.python_us == pytest.approx(max(0.0, python_us - 10.0))
    assert far.reached_us == simulate(program, spec_of(), 2, params=params).reached_us


@pytest.mark.parametrize("shared", [[], CORES])
def test_a_step_of_many_parameters_is_bound_by_python(shared):
    program = program_of(BEHIND, [gather_of(50)], segment_us=[10.0])
    spec = spec_of(shared, forward_python=PythonTime(1.0, 2.0))
    assert [simulate(program, spec, 2, params=n).bound for n in (1, 30)] == [COMPUTE, PYTHON]


def test_python_around_a_backward_counts_gradients_once():
    """Two gradients; one comes in two parts. Python comes after them: a plan looks at the Program alone."""
    instrs = [Reduce(0, (), ()), Reduce(1, (), ()), WaitReduce(0, ()), WaitReduce(1, ())]
    program = dataclasses.replace(
        program_of(instrs, reduces=[reduce_of(50), reduce_of(50, 25)]), phase="backward"
    )
    spec = spec_of(CORES, forward_python=PythonTime(100.0, 100.0), backward_python=PythonTime(4.0, 3.0))
    plain = simulate(program, spec, 2)
    assert plain.python_us == 0
    around = simulate(program, spec, 2, params=7)
    assert around.total_us == pytest.approx(plain.total_us + 4.0 + 2 * 3.0)
    assert around.reached_us == plain.reached_us


def test_two_lanes_that_slow_compute_down_are_charged_alike():
    """12 us of computing, 6 us of moving and 7 us of reading, on the same cores."""
    stored = gather_of(25, hops=(Hop("nvme", "host", (0,)),), rest_dtype="float32")
    instrs = [Fetch(1), Gather(0), Compute(0, (), (), ()), WaitGather(0, (-1,)), WaitFetch(1)]
    program = program_of(instrs, [gather_of(50), stored], segment_us=[12.0])
    timeline = simulate(program, spec_of([("compute", LINK, READ)]), 2)
    assert timeline.total_us == pytest.approx(12.0 + 6.0 + 7.0)
    assert timeline.slowed == {LINK: pytest.approx(6.0), READ: pytest.approx(7.0)}
    assert all(s.hidden == pytest.approx(0.0) for s in timeline.spans if s.lane != COMPUTE)


def test_three_lanes_that_share_go_at_a_third():
    """Computes 6 us; 400 bytes travel (6 us); 100 bytes come from a file (5 + 2 us)."""
    stored = gather_of(25, hops=(Hop("nvme", "host", (0,)),), rest_dtype="float32")
    instrs = [Fetch(1), Gather(0), Compute(0, (), (), ()), WaitGather(0, (-1,)), WaitFetch(1)]
    program = program_of(instrs, [gather_of(50), stored], segment_us=[6.0])
    timeline = simulate(program, spec_of([("compute", LINK, READ)]), 2)
    ends = {s.lane: s.end_us for s in timeline.spans}
    # After 18 us both of 6 us are done, and 1 us of the file is left, alone.
    assert ends == {
        "compute": pytest.approx(18.0),
        LINK: pytest.approx(18.0),
        READ: pytest.approx(19.0),
    }
    alone = simulate(program, spec_of(), 2)
    assert alone.total_us == pytest.approx(7.0)
    # Groups of two: a lane in both is as slow as in the one that is fuller.
    pairs = simulate(program, spec_of([("compute", LINK), ("compute", READ)]), 2)
    assert {s.lane: s.end_us for s in pairs.spans} == {
        "compute": pytest.approx(12.0),
        LINK: pytest.approx(12.0),
        READ: pytest.approx(13.0),
    }


DISK = [(READ, WRITE)]


def test_reads_and_writes_of_files_go_on_together_and_share_the_disk():
    """A gradient of 400 bytes is written (10 + 20 us) while as many are read (5 + 8 us)."""
    stored = gather_of(100, hops=(Hop("nvme", "host", (0,)),), rest_dtype="float32")
    instrs = [Reduce(0, (-1,), ()), WaitReduce(0, (-1,)), Fetch(0), WaitFetch(0)]
    program = program_of(instrs, [stored], [reduce_of(100, tiers=("nvme",))])
    for shared, read_us, written_us in (([], 13.0, 30.0), (DISK, 26.0, 43.0)):
        timeline = simulate(program, spec_of(shared), 1)
        begin = timeline.reached_us[1]
        ends = {s.lane: s.end_us - begin for s in timeline.spans if s.lane != COMPUTE}
        # The read does not stand behind the write; on one disk each has half of it until the read has ended.
        assert ends == {READ: pytest.approx(read_us), WRITE: pytest.approx(written_us)}
        assert timeline.busy_us(READ, WRITE) == pytest.approx(written_us)
        assert timeline.busy_us(READ) == pytest.approx(read_us)
        assert timeline.stalls[READ] == pytest.approx(read_us)
        assert timeline.bound == WRITE if not shared else timeline.bound in (READ, WRITE)
        assert any("reads of files 0.01 ms for 400 bytes" in line for line in timeline.lines())
        assert any("writes of files 0.03 ms for 400 bytes" in line for line in timeline.lines())


def test_gradients_wait_for_a_buffer_that_is_written():
    """Three buffers of the size of the largest gradient: the fourth is not copied before the first is in its file."""
    count = 6
    reduces = [dataclasses.replace(reduce_of(1024, tiers=("nvme",)), names=(f"w{k}",)) for k in range(count)]
    assert write_buffers(4096, None) == (4096, 3)
    assert write_buffers(1 << 30, 17 << 20) == (128 << 10, 17)  # an eighth of a budget
    instrs = [i for k in range(count) for i in (Reduce(k, (-1,), ()), WaitReduce(k, (-1,)))]
    spec = spec_of(DISK)
    timeline = simulate(program_of(instrs, [], reduces), spec, 1)
    writes = [s for s in timeline.spans if s.lane == WRITE]
    copies = [s for s in timeline.spans if s.label.startswith("buffer of")]
    one_us = spec.nvme_write.us(4096)
    assert [s.alone_us for s in writes] == [pytest.approx(one_us)] * count
    for k in range(3, count):
        assert copies[k].start_us == pytest.approx(writes[k - 3].end_us)
    assert timeline.stalls[WRITE] == pytest.approx(timeline.total_us - sum(s.alone_us for s in copies))
    assert timeline.bound == WRITE
    # So many are under way that a landing within them is not held up.
    few = simulate(program_of(instrs[:6], [], reduces[:3]), spec, 1)
    assert few.reached_us[-1] == pytest.approx(3 * copies[0].alone_us)


def test_a_large_gradient_goes_to_its_file_in_parts():
    numel = (20 << 20) // 4
    program = program_of(
        [Reduce(0, (-1,), ()), WaitReduce(0, (-1,))], [], [reduce_of(numel, tiers=("nvme",))]
    )
    spec = spec_of(DISK)
    writes = [s for s in simulate(program, spec, 1).spans if s.lane == WRITE]
    assert [s.nbytes for s in writes] == [8 << 20, 8 << 20, 4 << 20]
    assert sum(s.alone_us for s in writes) == pytest.approx(spec.nvme_write.us(20 << 20))


def test_checksums_take_the_time_of_the_host():
    """Of what is read when it is there, and of what is written before it goes."""
    stored = gather_of(100, hops=(Hop("nvme", "host", (0,)),), rest_dtype="float32")
    instrs = [Fetch(0), WaitFetch(0), Reduce(0, (-1,), ()), WaitReduce(0, (-1,))]
    program = program_of(instrs, [stored], [reduce_of(50, tiers=("nvme",))])
    spec = dataclasses.replace(spec_of(DISK), checksum_bytes_per_us=40.0)
    off, on = simulate(program, spec, 1), simulate(program, spec, 1, checksums=True)
    assert on.total_us == pytest.approx(off.total_us + 400 / 40 + 200 / 40)
    sums = [(s.label, s.alone_us) for s in on.spans if s.label.startswith("checksums")]
    assert sums == [
        ("checksums of the file of the gather of w0", pytest.approx(10.0)),
        ("checksums of the file of the reduction of the gradients of w0", pytest.approx(5.0)),
    ]
    assert {s.lane for s in on.spans if s.label.startswith("checksums")} == {COMPUTE}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_bytes_of_a_lane_are_those_of_its_descriptors(world):
    """Of full tensors between ranks; of this rank's part to and from files; nothing of what does not move."""
    gathers = [
        gather_of(10),
        gather_of(10, 6),
        gather_of(7, home=True),
        dataclasses.replace(
            gather_of(9), dtype="bfloat16", hops=(Hop("nvme", "host", (0,)),), rest_dtype="float32"
        ),
    ]
    reduces = [
        reduce_of(10),
        reduce_of(3, 5, replicated=True),
        reduce_of(8, tiers=("nvme",)),
        reduce_of(4, copies=3),
        dataclasses.replace(reduce_of(6), dtype="bfloat16"),
    ]
    instrs = [Fetch(3), WaitFetch(3)]
    for kinds, many in (((Gather, WaitGather), gathers), ((Reduce, WaitReduce), reduces)):
        for i, desc in enumerate(many):
            values = (-1,) * len(desc.names)
            instrs.append(Gather(i) if kinds[0] is Gather else Reduce(i, values, ()))
            instrs.append(kinds[1](i, values))
    moved = simulate(program_of(instrs, gathers, reduces), spec_of(), world)
    between = (10 + 16) * 4 * world + 9 * 2 * world  # gathers
    between += 10 * 4 * world + 8 * 4 + 8 * 4 * world + 4 * 4 * world + 6 * 2 * world  # reductions
    # Between the three replicas of the rows this rank's part of a sum travels too, also where no rank shares the rest.
    assert moved.nbytes(LINK) == (between if world > 1 else 0) + 4 * 4
    assert (moved.nbytes(READ), moved.nbytes(WRITE)) == (9 * 4, 8 * 4)
    assert moved.nbytes("compute") == 0
    times = {s.label: s.end_us - s.start_us for s in moved.spans if s.lane in (READ, WRITE)}
    assert times == {
        "file of the gather of w0": pytest.approx(5 + 36 / 50),
        "file of the reduction of the gradients of w0": pytest.approx(10 + 32 / 20),
    }
