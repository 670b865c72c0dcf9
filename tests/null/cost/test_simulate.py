"""Programs by hand in simulated time: what bounds a step, Python around it, and files that gradients go to."""

from __future__ import annotations

import dataclasses

import pytest
from null.instructions import BEHIND, CORES, gather_of, program_of, reduce_of, spec_of

from zero_compiler.cost.hardware import PythonTime
from zero_compiler.cost.simulate import simulate
from zero_compiler.cost.timeline import COMPUTE, LINK, PYTHON, READ, WRITE
from zero_compiler.ir.instructions import Fetch, Reduce, WaitFetch, WaitReduce
from zero_compiler.ir.transfers import Hop
from zero_compiler.storage.writeback_buffers import write_buffers


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
        ("checksums of the file of the gradient of w0", pytest.approx(5.0)),
    ]
    assert {s.lane for s in on.spans if s.label.startswith("checksums")} == {COMPUTE}
