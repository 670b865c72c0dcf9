"""Segments that are recorded and replayed give what they give when they run; a CPU stands in for CUDA graphs."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from recorded_loops import LOOPS, Net, batches, run, simple
from stand_in_recorder import StandIn

import zero_compiler as zero
from zero_compiler.errors import MemoryBudgetError
from zero_compiler.ir.recorded_phase import RecordedPhase
from zero_compiler.runtime import recorded_segments
from zero_compiler.runtime.recorded_segments import RecordedSegments
from zero_compiler.tools import planning
from zero_compiler.torch_cpp import Held, RecordedValues, addresses


@pytest.fixture
def stand_in(monkeypatch):
    """Recorders of the CPU; the counts of the stand-in begin anew."""
    monkeypatch.setitem(recorded_segments.RECORDERS, "cpu", StandIn)
    for name in ("replays", "recordings"):
        monkeypatch.setattr(StandIn, name, 0)
    torch._dynamo.reset()
    return StandIn


# --- values over memory of a graph --------------------------------------------------------------------------------


class _Owner:
    pass


def test_values_lie_where_they_were_made_and_keep_their_owner_alive():
    owner, made = _Owner(), torch.arange(6.0).view(2, 3).t()
    held, gone = Held(owner), weakref.ref(owner)
    values = RecordedValues(held, [], [made, None])
    first, none = values.make([])
    assert none is None
    assert (first.data_ptr(), first.shape, first.stride()) == (made.data_ptr(), made.shape, made.stride())
    assert torch.equal(first, made)
    view = first[1:]
    del first, owner, values
    assert held.count() == 1
    del held
    gc.collect()
    assert gone() is not None  # of a view that is left
    del view
    assert gone() is None


def test_views_of_inputs_are_views_of_what_a_replay_is_given():
    given = torch.arange(12.0).view(3, 4)
    held = Held(None)
    values = RecordedValues(held, [given], [given[1:, 2:], given])
    other = torch.ones(20)[4:16].view(3, 4)
    view, same = values.make([other])
    assert view.untyped_storage()._cdata == other.untyped_storage()._cdata
    assert (view.storage_offset(), view.shape, view.stride()) == (4 + 6, (2, 2), (4, 1))
    assert same.data_ptr() == other.data_ptr()
    assert held.count() == 0
    with pytest.raises(ValueError, match="a view of what it is given, in another dtype"):
        RecordedValues(held, [given], [given.view(torch.int32)])


def test_inputs_are_told_by_where_they_lie():
    a, b = torch.ones(3), torch.ones(3)
    values = RecordedValues(Held(None), [a, None, b], [])
    assert values.lie_there([a.view(3, 1), None, b.detach()])
    assert not values.lie_there([b, None, a])
    assert not values.lie_there([a, None])
    assert addresses([a, 3, b]) == [a.data_ptr(), 0, b.data_ptr()]


# --- when calls are recorded --------------------------------------------------------------------------------------


class _Calls:
    """Calls of a phase with one segment: a weight times what it is given, plus one."""

    def __init__(self, run=lambda args: [args[0] * args[1] + 1], given=(1,), returned=(0,), recorder=StandIn):
        self.weight = torch.full((4,), 2.0)
        phase = RecordedPhase(given, returned)
        self.recorded = RecordedSegments(phase, 2, lambda: recorder(torch.device("cpu")), "frame 0, forward")
        (self.segment,) = self.recorded.of([run])

    def __call__(self, x):
        try:
            env = [self.weight, x, None]
            self.recorded.began(env)
            env[2] = self.segment(env[:2])[0]
            return self.recorded.outputs([env.pop()])[0]
        finally:
            self.recorded.ended()


def _inputs(count):
    """None of them lies where another did."""
    return [torch.full((4,), float(k)) for k in range(count)]


def test_the_second_call_is_recorded_and_others_replay_it(stand_in):
    call = _Calls()
    for k, x in enumerate(_inputs(5)):
        assert torch.equal(call(x), x * 2 + 1)
        assert call.recorded.replayed == (k > 1)
    assert (stand_in.recordings, stand_in.replays) == (1, 3)


def test_an_output_of_the_caller_is_its_own(stand_in):
    call = _Calls()
    outputs = [call(x) for x in _inputs(6)]
    assert [o[0].item() for o in outputs] == [1, 3, 5, 7, 9, 11]
    assert stand_in.replays == 4


def test_values_that_are_still_held_are_not_written_over(stand_in, caplog):
    call = _Calls(returned=())
    held = []
    for k, x in enumerate(_inputs(6)):
        held.append(call(x))
        if k == 3:
            del held[1:3]  # the recording's own, and what ran beside it
    assert [o[0].item() for o in held] == [1, 7, 9, 11]
    assert (stand_in.recordings, stand_in.replays) == (1, 1)
    said = "frame 0, forward: segments run without their recorded graphs: values of an earlier call are still held"
    assert caplog.messages == [said]


def test_a_copy_of_an_input_that_is_still_held_is_not_written_over(stand_in):
    call = _Calls(lambda args: [args[1].view(2, 2)], returned=())
    held = [call(x) for x in _inputs(6)]
    assert [o[0, 0].item() for o in held] == [0, 1, 2, 3, 4, 5]
    assert stand_in.replays == 0


def test_a_weight_that_moves_is_recorded_anew_and_one_that_goes_on_moving_is_not(stand_in, caplog):
    call, x = _Calls(), torch.ones(4)
    moved = 0
    for k in range(40):
        if k in (5, 10, 15, 20, 25):
            call.weight, moved = torch.full((4,), float(k)), moved + 1
        assert torch.equal(call(x), call.weight + 1)
    assert stand_in.recordings == recorded_segments._MOST_RECORDINGS
    assert moved > stand_in.recordings - 1
    assert "its inputs have moved after 4 recordings" in caplog.text


def test_inputs_that_never_lie_where_they_did_are_said(stand_in, caplog):
    call = _Calls(given=())
    for x in _inputs(12):
        assert torch.equal(call(x), x * 2 + 1)
    assert stand_in.recordings == 0
    assert [m.rpartition(": ")[2] for m in caplog.messages] == ["its inputs lie elsewhere in every call"]


def test_other_sizes_of_an_input_are_not_replayed(stand_in, caplog):
    call = _Calls(lambda args: [args[1].sum()[None]])
    inputs = [torch.ones(n) for n in (4, 4, 4, 6, 4, 2)]
    assert [call(x).item() for x in inputs] == [4, 4, 4, 6, 4, 2]
    assert stand_in.replays == 2
    assert "its inputs have other sizes" in caplog.text


class _Refuses(StandIn):
    def record(self, run, args):
        args.clear()  # as code that has begun to run may have
        raise RuntimeError("operation not permitted when stream is capturing\nand more")


class _HasNoMemory(StandIn):
    def __init__(self, device):
        raise torch.OutOfMemoryError("no memory\nand more")


@pytest.mark.parametrize(
    ("recorder", "why"),
    [
        (_Refuses, "a segment cannot be recorded: operation not permitted when stream is capturing"),
        (_HasNoMemory, "no memory"),
    ],
)
def test_what_cannot_be_recorded_runs(recorder, why, stand_in, caplog):
    call = _Calls(recorder=recorder)
    for k, x in enumerate(_inputs(8)):
        assert call(x)[0] == 2 * k + 1
    said = f"frame 0, forward: segments run without their recorded graphs: {why}"
    assert caplog.messages[0] == said
    assert stand_in.replays == 0


def test_an_expanded_input_and_one_that_overlaps_itself(stand_in, caplog):
    call = _Calls(lambda args: [args[1].sum()[None]])
    rows = [torch.full((1, 3), float(k)).expand(4, 3) for k in range(6)]
    assert [call(x).item() for x in rows] == [12.0 * k for k in range(6)]
    assert stand_in.replays == 4
    call = _Calls(lambda args: [args[1].sum()[None]])
    windows = [torch.full((6,), float(k)).as_strided((3, 4), (1, 1)) for k in range(6)]
    assert [call(x).item() for x in windows] == [12.0 * k for k in range(6)]
    assert stand_in.replays == 4
    assert "an input overlaps itself" in caplog.text


def test_the_memory_of_a_recording_goes_before_the_next_one_is_made(stand_in):
    alive = weakref.WeakSet()

    class Counted(StandIn):
        def __init__(self, device):
            super().__init__(device)
            assert not alive
            alive.add(self)

    call, x = _Calls(recorder=Counted), torch.ones(4)
    for k in range(12):
        if k in (4, 8):
            call.weight = torch.full((4,), float(k))
        assert torch.equal(call(x), call.weight + 1)
    assert Counted.recordings == 3


class _Chain:
    """Three segments; the one in the middle is not recorded, and may return what it is given."""

    def __init__(self, middle):
        phase = RecordedPhase(given=(0,), returned=(0,), direct=frozenset({1}))
        self.recorded = RecordedSegments(phase, 1, lambda: StandIn(torch.device("cpu")), "frame 0, forward")
        runs = [lambda args: [args[0] + 1], middle, lambda args: [args[0] * 3]]
        self.segments = self.recorded.of(runs)

    def __call__(self, x):
        env = [x]
        self.recorded.began(env)
        try:
            for segment in self.segments:
                env = list(segment(env))
            return self.recorded.outputs(env)[0]
        finally:
            self.recorded.ended()


@pytest.mark.parametrize(
    "middle",
    [lambda args: [args[0] * 2], lambda args: [args[0][:2]], lambda args: [args[0][args[0] > 0]]],
    ids=["made", "view", "of varying size"],
)
def test_around_a_segment_that_is_not_recorded_the_others_are_replayed(middle, stand_in):
    call = _Chain(middle)
    for x in _inputs(8):
        assert torch.equal(call(x), middle([x + 1])[0] * 3)
    assert stand_in.recordings == 1
    assert stand_in.replays == 2 * 6


@pytest.mark.parametrize("replayed", [True, False])
def test_values_that_share_memory_share_that_of_their_copy(replayed, stand_in, caplog):
    phase = RecordedPhase(given=(0,), returned=(0, 1, 2))
    recorded = RecordedSegments(phase, 1, lambda: StandIn(torch.device("cpu")), "frame 0, inference")

    def run(args):
        out = args[0] + 1
        # The whole of it, or parts that lie one beyond the other.
        return [out[1:3], out if replayed else out[2:], out.view(2, 2).t() if replayed else out[:2]]

    (segment,) = recorded.of([run])
    for x in _inputs(6):
        env = [x]
        recorded.began(env)
        made = recorded.outputs(list(segment(env)))
        recorded.ended()
        want = run([x])
        made[0].add_(100)
        want[0].add_(100)
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(made, want, strict=True))
    assert stand_in.replays == (4 if replayed else 0)
    assert replayed or "outputs share memory that none of them has whole" in caplog.text


def test_a_number_among_the_inputs_is_not_recorded(stand_in, caplog):
    call = _Calls(lambda args: [args[0] * args[1]])
    for k in (3, 3, 3, 5):
        assert call(k)[0] == 2 * k
    assert stand_in.recordings == 0
    assert "a size is among its inputs" in caplog.text


def test_a_call_that_breaks_off_while_it_is_recorded(stand_in):
    broken = [False, True, False, False, False, False]

    def run(args):
        if broken.pop(0):
            raise KeyError("user's")
        return [args[0] * args[1] + 1]

    call = _Calls(run)
    x = torch.ones(4)
    call(x)
    with pytest.raises(KeyError):
        call(x)
    for _ in range(4):
        assert torch.equal(call(x), x * 2 + 1)


# --- models -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_same_bits_as_without(loop, stand_in):
    recorded, _ = run(loop, mode="reduce-overhead")
    replays = stand_in.replays
    torch._dynamo.reset()
    plain, _ = run(loop)
    assert len(recorded) == len(plain)
    for a, b in zip(recorded, plain, strict=True):
        assert torch.equal(a, b)
    assert replays > 0
    assert stand_in.replays == replays


@pytest.mark.slow
def test_the_plan_counts_their_memory_and_the_model_goes_with_them(stand_in):
    (_, step), (_, without) = run(simple, mode="reduce-overhead"), run(simple)
    memory = zero.inspect(step).memory
    assert zero.inspect(without).memory.recorded == 0
    assert memory.at_rest - memory.recorded == zero.inspect(without).memory.at_rest
    assert f"graphs of the device      {memory.recorded:>16,}" in str(zero.inspect(step))
    assert zero.inspect(step).to_dict()["memory"]["recorded_bytes"] == memory.recorded


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", "backward", "inference"])
def test_the_memory_of_a_phase_is_no_more_than_planned(phase, stand_in, monkeypatch):
    model = zero.shard(Net(), device="cpu")
    step = torch.compile(model, backend="zero", mode="reduce-overhead")
    of_phase = []
    made = RecordedSegments._begin

    def begin(self, given, lie):
        made(self, given, lie)
        of_phase.append((phase in self._name, self.recorder, sum(m.nbytes for m in self.memory)))

    monkeypatch.setattr(RecordedSegments, "_begin", begin)
    for x, y in batches(4, rows=64):
        if phase == "inference":
            with torch.no_grad():
                step(x, y)
        else:
            step(x, y)[0].backward()
            model.zero_grad()
    (frame,) = zero.inspect(step).frames
    ((recorder, copies),) = [(r, c) for wanted, r, c in of_phase if wanted]
    planned = frame.programs[phase].recorded_bytes
    assert planned / 2 < recorder.most_alive + copies <= planned


@pytest.mark.slow
def test_a_budget_counts_them(stand_in):
    _, step = run(simple, mode="reduce-overhead")
    _, without = run(simple)
    peak = zero.inspect(without).memory.peak
    assert zero.inspect(step).memory.peak > peak
    torch._dynamo.reset()
    assert zero.inspect(run(simple, memory_budget_bytes=peak)[1]).memory.peak <= peak
    torch._dynamo.reset()
    with pytest.raises(MemoryBudgetError):
        run(simple, mode="reduce-overhead", memory_budget_bytes=peak)


def _planned(device, mode):
    return planning.report(Net(), next(iter(batches(1))), 2, device, mode=mode)


def test_plans_for_a_device_that_is_not_here_count_them():
    planned = _planned("cuda", "reduce-overhead")
    assert planned.memory.recorded > 0
    assert planned.memory.peak == _planned("cuda", None).memory.peak + planned.memory.recorded
    assert "segments are recorded into graphs of the device" in str(planned)
    assert _planned("cpu", "reduce-overhead").memory == _planned("cpu", None).memory


@pytest.mark.slow
def test_it_is_said_where_a_device_has_no_graphs():
    torch._dynamo.reset()
    _, step = run(simple, mode="reduce-overhead")
    assert "mode='reduce-overhead': nothing is recorded, as the device has no graphs" in str(
        zero.inspect(step)
    )
