"""What the optimizer's step adds to a plan: its turns on the lanes of files, behind backward or in it."""

import dataclasses

import pytest
import torch
from null.instructions import gather_of, program_of, reduce_of, spec_of
from torch import nn

import zero_compiler as zero
from zero_compiler.cost.simulate import UpdateTurn, simulate
from zero_compiler.cost.timeline import COMPUTE, HOST, READ, WRITE
from zero_compiler.ir.instructions import Compute, Gather, Reduce, WaitGather, WaitReduce
from zero_compiler.storage.double_buffer import BUFFERS
from zero_compiler.tools.planning import report

# Read in 5 + 20 us, updated in 3 us and written in 10 + 25 us.
TURN = UpdateTurn("update of w0", frozenset({("m", "w0")}), 3.0, 1000, 500)


def turns(count):
    return [dataclasses.replace(TURN, names=frozenset({("m", f"w{k}")})) for k in range(count)]


@pytest.mark.parametrize("count", [1, 3, BUFFERS + 4])
def test_turns_are_read_updated_and_written_side_by_side(count):
    """The lane that has most to do is never idle, but for what comes before its first and behind its last turn."""
    timeline = simulate(program_of([]), spec_of(), 1, turns=turns(count))
    assert timeline.total_us == pytest.approx(25.0 + 3.0 + 35.0 * count)
    assert timeline.nbytes(READ) == 1000 * count
    assert timeline.nbytes(WRITE) == 500 * count
    # There are so many buffers: the one after them waits for the first that is written.
    starts = sorted(s.start_us for s in timeline.spans if s.lane == READ)
    if count > BUFFERS:
        assert starts[BUFFERS] >= 25.0 + 3.0 + 35.0


def test_states_on_the_host_of_an_accelerator_are_copied_to_it_and_back():
    turn = UpdateTurn("update of w", frozenset({("m", "w")}), 3.0, copied_bytes=1000)
    spec = spec_of()
    timeline = simulate(program_of([]), spec, 1, turns=[turn])
    assert timeline.total_us == pytest.approx(2 * spec.host_device.us(1000) + 3.0)
    assert timeline.nbytes(HOST) == 2000


def backward(reads: bool):
    """Three gradients that are there at once, before 100 us more of computing, which may read w0."""
    instrs = [Gather(0), WaitGather(0, (0,))]
    instrs += [i for k in range(3) for i in (Reduce(k, (), ()), WaitReduce(k, (-1,)))]
    instrs += [Compute(0, (0,) if reads else (), (), ())]
    reduces = [dataclasses.replace(reduce_of(10), names=(f"w{k}",)) for k in range(3)]
    return dataclasses.replace(program_of(instrs, [gather_of(10)], reduces, [100.0]), phase="backward")


def test_an_update_hides_behind_the_backward_that_it_overlaps():
    """100 us of computing hide what the disk does of the three turns; none begins before its weight is read."""
    alone = simulate(backward(False), spec_of(), 1).total_us
    step = simulate(program_of([]), spec_of(), 1, turns=turns(3)).total_us
    both = simulate(backward(False), spec_of(), 1, turns=turns(3))
    assert alone < both.total_us < alone + step
    assert both.nbytes(READ) == 3000
    begun = min(s.start_us for s in both.spans if s.lane == READ)
    (computed,) = (s for s in both.spans if s.lane == COMPUTE and s.label.startswith("segment"))
    assert begun <= computed.start_us
    # That of a weight which the computing reads begins behind it.
    held_up = simulate(backward(True), spec_of(), 1, turns=turns(3))
    assert sum(s.start_us < computed.end_us for s in held_up.spans if s.lane == READ) == 2


def test_gradients_that_an_update_uses_up_are_written_nowhere():
    reduces = [dataclasses.replace(reduce_of(1000, tiers=("nvme",)))]
    program = dataclasses.replace(
        program_of([Reduce(0, (), ()), WaitReduce(0, (-1,))], (), reduces), phase="backward"
    )
    assert simulate(program, spec_of(), 1).nbytes(WRITE) == 4000
    assert simulate(program, spec_of(), 1, turns=turns(1)).nbytes(WRITE) == TURN.written_bytes


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


NUMEL = 4 * (64 * 64 + 64)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [("optimizer",), ("params", "optimizer"), ("params", "grads", "optimizer")])
def test_a_plan_counts_an_update_that_it_must_assume(kinds, tmp_path):
    fields = {f"offload_{kind}": "nvme" for kind in kinds}
    told = report(model(), (torch.ones(2, 64),), 1, nvme_dir=str(tmp_path), **fields)
    update = told.update.timeline
    states, param, grad = 8 * NUMEL, 4 * NUMEL * ("params" in kinds), 4 * NUMEL * ("grads" in kinds)
    assert (update.nbytes(READ), update.nbytes(WRITE)) == (states + param + grad, states + param)
    (frame,) = told.frames
    assert told.step_us == pytest.approx(sum(t.total_us for t in frame.timelines.values()) + update.total_us)
    assert "(assumed: adamw of zero.optimizer, overlap=False; 2 fp32 states a parameter)" in str(told)
    assert told.to_dict()["update"]["timeline"]["total_us"] == update.total_us


def test_a_plan_without_ranks_has_the_update_of_the_optimizer_that_it_assumes():
    told = report(model(), (torch.ones(2, 64),), 1)
    assert told.update.what == "assumed: adamw, fused; 2 fp32 states a parameter"
    assert (told.update.early, told.update.late) == (0, 1)
    assert told.step.update_us == told.update.timeline.total_us > 0
    states = report(model(), (torch.ones(2, 64),), 1, optimizer="sgd")
    assert states.update.timeline.total_us < told.update.timeline.total_us


def test_a_model_that_is_here_has_no_update_of_a_plain_optimizer_in_memory():
    told = zero.inspect(zero.shard(model()), (torch.ones(2, 64),))
    assert told.update is None


def test_an_update_in_memory_writes_what_it_has_read():
    """It reads parameter, gradient and state, and writes the first and the last, half as fast again as a copy."""
    sharded = zero.shard(model())
    keep = zero.optimizer(torch.optim.SGD, sharded, lr=0.1, momentum=0.9)
    told, spec = zero.inspect(sharded, (torch.ones(2, 64),)), sharded._zero.sharded_model.hardware
    copied_us = NUMEL * 4 * 5 / spec.memory_bytes_per_us
    assert told.update.timeline.total_us == pytest.approx(copied_us / 1.5 + spec.kernel_us * told.update.late)
    del keep


@pytest.mark.slow
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_plan_counts_the_update_as_its_optimizer_runs_it(clip, tmp_path):
    sharded = zero.shard(model(), offload_params="nvme", offload_optimizer="nvme", nvme_dir=str(tmp_path))
    x = (torch.ones(2, 64),)

    def planned():
        torch._dynamo.reset()
        told = zero.inspect(sharded, x)
        return told, told.frames[0].timelines["backward"]

    plain, before = planned()
    optimizer = zero.optimizer(torch.optim.SGD, sharded, lr=0.1, momentum=0.9)
    told, same = planned()
    assert same.total_us == before.total_us
    # One state, not the two that are assumed.
    assert told.update.timeline.nbytes(WRITE) == plain.update.timeline.nbytes(WRITE) - 4 * NUMEL
    assert "SGD of zero.optimizer" in str(told)
    del optimizer
    keep = zero.optimizer(torch.optim.SGD, sharded, lr=0.1, momentum=0.9, overlap=True, max_grad_norm=clip)
    overlapped, after = planned()
    if clip is not None:  # the norm of all gradients comes first
        assert (after.total_us, overlapped.update.early) == (before.total_us, 0)
        return
    assert overlapped.update.late == 0
    assert after.nbytes(WRITE) == told.update.timeline.nbytes(WRITE)
    assert before.total_us < after.total_us <= before.total_us + told.update.timeline.total_us
    assert overlapped.step_us < plain.step_us
    assert "while backward runs (SGD of zero.optimizer, overlap=True)" in str(overlapped)
    del keep


@pytest.mark.slow
@pytest.mark.parametrize("way", ["memory", "budget", "tiles"])
def test_a_plan_knows_which_gradients_go_to_overlapped_updates_by_file(way, tmp_path):
    """Under a budget all of them do, of weights in tiles without one those; else none."""
    fields = {"memory": {}, "budget": {"memory_budget_bytes": 1 << 26}, "tiles": {"tile_bytes": 8 << 10}}[way]
    tiers = {f"offload_{what}": "nvme" for what in ("params", "grads", "optimizer")}
    sharded = zero.shard(model(), nvme_dir=str(tmp_path), **tiers, **fields)
    keep = zero.optimizer(torch.optim.SGD, sharded, lr=0.1, momentum=0.9, overlap=True)
    told = zero.inspect(sharded, (torch.ones(2, 64),))
    reduces = told.frames[0].programs["backward"].reduces
    tiled = {name for r in reduces if r.tile is not None for name in r.names}
    assert bool(tiled) == (way == "tiles")
    filed = {p for p, _ in sharded.named_parameters() if way == "budget" or p in tiled}
    filed_bytes = 4 * sum(p.numel() for n, p in sharded.named_parameters() if n in filed)
    # Parameters and their one state are read and written in any case; forward and backward read parameters, too.
    assert told.frames[0].timelines["backward"].nbytes(WRITE) == 2 * 4 * NUMEL + filed_bytes
    turns = [s for s in told.frames[0].timelines["backward"].spans if s.lane == READ and "update" in s.label]
    assert sum(s.nbytes for s in turns) == 2 * 4 * NUMEL + filed_bytes
    del keep
