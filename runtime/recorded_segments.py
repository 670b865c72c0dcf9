"""Segments recorded into graphs of the device (``mode="reduce-overhead"``): a replay is one launch in place of one a
kernel.

A replay reads and writes the addresses of the recording. Weights lie at planned places, and what recorded segments
return lies in memory of the phase's own, whose blocks are used again as values die; they die at the same instructions
in every call. What the caller makes anew for each call is copied to one place. Where anything lies elsewhere, or a
value of an earlier call is still held, segments run as they do without graphs.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zero_compiler.emit.segments import SegmentFn
from zero_compiler.ir.recorded_phase import RecordedPhase
from zero_compiler.torch_cpp import Held, RecordedValues, addresses

log = logging.getLogger("zero_compiler")

_MOST_RECORDINGS = 4  # of one phase: addresses that change once more will go on to do so
_MOST_UNSTEADY = (
    8  # calls in a row with inputs that lie where they did not before: from then on it is worth a word
)


Recording = tuple[Sequence[object], Callable[[], None]]


class Recorder(Protocol):
    """Records what is given to a device. What is recorded, and its memory, lives as long as the recorder."""

    def record(self, run: SegmentFn, args: list[object]) -> Recording:
        """What ``run(args)`` returns, in that memory, and what does it again.

        Raises:
            RuntimeError: it cannot be recorded, and was not run.
        """


class GraphRecorder:
    """CUDA graphs that share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # of the calls before: while something is recorded nothing is given back
        self._device, self._stream = device, _recording_stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def record(self, run: SegmentFn, args: list[object]) -> Recording:
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # Other threads, which transfer meanwhile, may allocate.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                out = run(args)
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(self._stream)
        graph.replay()
        self._graphs.append(graph)
        return out, graph.replay


@functools.cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings, as a default stream cannot be recorded. Its workspace for products is made here: one that
    is made while something is recorded would stay in the memory of that graph."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream), torch.no_grad():
        small = torch.ones(8, 8, device=device)
        torch.addmm(small, small, small)
    torch.cuda.current_stream(device).wait_stream(stream)
    return stream


RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": GraphRecorder}


class _Mode(Enum):
    """How the segments of a call run."""

    DIRECT = "direct"
    RECORD = "record"
    REPLAY = "replay"


class _InputCopy:
    """An input at one place: a copy of what a call is given, without what an expanded tensor repeats."""

    def __init__(self, value: torch.Tensor) -> None:
        self._form = value.shape, value.stride(), value.dtype
        once = _once(value)
        self.memory = torch.empty_strided(once.shape, once.stride(), dtype=once.dtype, device=once.device)

    def fits(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and self._form == (value.shape, value.stride(), value.dtype)

    def fill(self, value: torch.Tensor) -> None:
        self.memory.copy_(_once(value))

    def whole(self) -> torch.Tensor:
        shape, stride, _ = self._form
        return self.memory.as_strided(shape, stride)


def _once(value: torch.Tensor) -> torch.Tensor:
    """``value`` without the elements that lie where others of it do, along the dimensions that expand it."""
    shape = [1 if step == 0 else size for size, step in zip(value.shape, value.stride(), strict=True)]
    return value.as_strided(shape, value.stride())


def _overlaps(value: torch.Tensor) -> bool:
    """Whether elements of it may lie at one place though no dimension expands it."""
    once, extent = _once(value), 1
    for step, size in sorted(zip(once.stride(), once.shape, strict=True)):
        if size > 1:
            if step < extent:
                return True
            extent += step * (size - 1)
    return False


class RecordedSegments:
    """The segments of one phase, recorded in one of its calls and replayed from then on.

    In a call :meth:`began` comes before its instructions; then, in their order, what :meth:`of` has made of the
    segments; then :meth:`outputs`. :meth:`ended` comes last, whatever has happened.

    Args:
        phase: what of it may be recorded.
        num_inputs: of a call.
        make_recorder: called for each recording; see :data:`RECORDERS`.
        name: of the phase, for messages.
    """

    def __init__(
        self, phase: RecordedPhase, num_inputs: int, make_recorder: Callable[[], Recorder], name: str
    ) -> None:
        self.replayed = 0  # segments of the last call that were
        self.mode = _Mode.DIRECT
        self.recorder: Recorder | None = None
        self.held: Held | None = None
        self.first: list[StorageWeakRef] = []  # of values that the recording itself has made
        self.moved = False  # a segment found something elsewhere
        self.memory: list[torch.Tensor] = []  # that lives as long as a value in it
        self._phase, self._num_inputs, self._make_recorder = phase, num_inputs, make_recorder
        self._name = name
        self._segments: list[weakref.ref[_RecordedSegment]] = []
        self._never = ""  # why nothing is recorded any more
        self._recordings = self._unsteady = 0
        self._copies: dict[int, _InputCopy] = {}  # of inputs
        self._placed: RecordedValues | None = None  # which counts those of a call
        self._together: list[list[int]] = []  # outputs of the caller's by the memory that they share
        self._varying: set[int] = set()  # inputs of the caller's that were found elsewhere than before
        self._before: list[int] | None = None  # where inputs lay in the last call
        self._recorded: list[int] | None = None  # and in the one that was recorded
        self._said: set[str] = set()

    def of(self, segments: Sequence[SegmentFn]) -> list[SegmentFn]:
        """The segments of the phase as they run in these calls."""
        made = [_RecordedSegment(self, run, i not in self._phase.direct) for i, run in enumerate(segments)]
        self._segments = [weakref.ref(segment) for segment in made]
        return list(made)

    def began(self, env: list[object]) -> None:
        """Decide how this call runs. Of its inputs, the first values of ``env``, some are exchanged for copies."""
        self.replayed, self.mode = 0, _Mode.DIRECT
        given = env[: self._num_inputs]
        lie = addresses(given)
        mode, why = self._decided(given, lie)
        self._before = lie
        if mode is _Mode.RECORD:
            try:
                self._begin(given, lie)
            except RuntimeError as error:  # no memory for it, say
                mode, why = _Mode.DIRECT, str(error).splitlines()[0]
        if why:
            self.say(f"segments run without their recorded graphs: {why}")
        if mode is not _Mode.DIRECT and self._placed is not None:
            for (i, copy), placed in zip(self._copies.items(), self._placed.make([]), strict=True):
                if isinstance(value := given[i], torch.Tensor):
                    copy.fill(value)
                    env[i] = placed
        self.mode = mode

    def outputs(self, outputs: list[object]) -> list[object]:
        """Those of the call, of which the caller's are in memory of their own."""
        if self.mode is _Mode.DIRECT:
            return outputs
        theirs = {at: v for at in self._phase.returned if isinstance(v := outputs[at], torch.Tensor)}
        if self.mode is _Mode.RECORD:
            groups: dict[int, list[int]] = {}
            for at, value in theirs.items():
                groups.setdefault(value.untyped_storage()._cdata, []).append(at)
            # Of those that share memory the largest one first.
            self._together = [sorted(group, key=lambda at: -theirs[at].numel()) for group in groups.values()]
            if not all(
                _is_within(theirs[at], theirs[group[0]]) for group in self._together for at in group[1:]
            ):
                # The caller is given what was recorded, which is not replayed.
                self.stop("outputs share memory that none of them has whole")
                return outputs
        for first, *others in self._together:
            whole = theirs[first]
            copy = outputs[first] = whole.clone(memory_format=torch.preserve_format)
            for at in others:
                view = theirs[at]
                outputs[at] = copy.as_strided(view.shape, view.stride(), _begins(view, whole))
        return outputs

    def ended(self) -> None:
        """The call is over, and what runs next begins anew."""
        self.mode = _Mode.DIRECT

    def say(self, what: str) -> None:
        """Tell the user, once."""
        if what not in self._said:
            self._said.add(what)
            log.warning("%s: %s", self._name, what)

    def stop(self, why: str) -> None:
        """Record and replay nothing of this phase any more."""
        self._never = why
        self.mode = _Mode.DIRECT
        self.say(f"segments run without their recorded graphs: {why}")
        self._forget()

    def _decided(self, given: Sequence[object], lie: list[int]) -> tuple[_Mode, str]:
        """How a call runs whose inputs ``given`` lie there, and why, where a user may want to know."""
        before, known = self._before, self._recorded
        if self._never or before is None:
            return _Mode.DIRECT, ""  # kernels are chosen and loaded in the first call
        self.first = [storage for storage in self.first if not storage.expired()]
        if self.first or (self.held is not None and self.held.count()):
            return _Mode.DIRECT, "values of an earlier call are still held"
        if known is not None:
            elsewhere = {i for i, at in enumerate(lie) if at != known[i]} - self._copies.keys()
            if not elsewhere and not self.moved:
                alike = all(copy.fits(given[i]) for i, copy in self._copies.items())
                return (_Mode.REPLAY, "") if alike else (_Mode.DIRECT, "its inputs have other sizes")
            self._varying |= elsewhere.intersection(self._phase.given)
        else:
            self._varying |= {i for i in self._phase.given if lie[i] != before[i]}
        if any(lie[i] != before[i] for i in range(len(lie)) if i not in self._varying):
            self._unsteady += 1
            late = self._unsteady >= _MOST_UNSTEADY
            return _Mode.DIRECT, "its inputs lie elsewhere in every call" if late else ""
        self._unsteady = 0
        if any(isinstance(v, (int, float, torch.SymInt)) for v in given):
            return _Mode.DIRECT, "a size is among its inputs"
        if any(isinstance(v := given[i], torch.Tensor) and _overlaps(v) for i in self._varying):
            return _Mode.DIRECT, "an input overlaps itself"
        if self._recordings == _MOST_RECORDINGS:
            return _Mode.DIRECT, f"its inputs have moved after {_MOST_RECORDINGS} recordings"
        return _Mode.RECORD, ""

    def _forget(self) -> None:
        """What was recorded, and its memory."""
        self._recorded = self.recorder = self.held = self._placed = None
        self._copies = {}
        self.memory = []
        for ref in self._segments:
            if (segment := ref()) is not None:
                segment.forget()

    def _begin(self, given: Sequence[object], lie: list[int]) -> None:
        """Begin a recording, in memory of its own."""
        self._forget()
        self._recordings += 1
        self.moved = False
        recorder = self._make_recorder()
        with torch.inference_mode(False):  # calls without it write to them
            varying = ((i, given[i]) for i in sorted(self._varying))
            copies = {i: _InputCopy(v) for i, v in varying if isinstance(v, torch.Tensor)}
        self.memory += [copy.memory for copy in copies.values()]
        held = Held((recorder, self.memory))
        self._placed = RecordedValues(held, [], [copy.whole() for copy in copies.values()])
        self.recorder, self.held, self._copies, self._recorded = recorder, held, copies, lie


def _begins(view: torch.Tensor, whole: torch.Tensor) -> int:
    """Elements of ``whole`` that lie before ``view``."""
    return (view.data_ptr() - whole.data_ptr()) // whole.element_size()


def _is_within(view: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether a copy of ``whole``, which has no gaps, has all that ``view`` has, at the same place."""
    begin, ends = _begins(view, whole), [1 + _last(t) for t in (view, whole)]
    dense = ends[1] == whole.numel() and not _overlaps(whole)
    return dense and view.dtype == whole.dtype and begin >= 0 and begin + ends[0] <= ends[1]


def _last(value: torch.Tensor) -> int:
    """Elements between the first and the last one of ``value``."""
    return sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True) if size)


class _RecordedSegment:
    """One segment, called with its inputs in a list, which it empties.

    Args:
        recorded: it may be.
    """

    def __init__(self, phase: RecordedSegments, run: SegmentFn, recorded: bool) -> None:
        self._phase, self._run, self._recorded = phase, run, recorded
        self.forget()

    def forget(self) -> None:
        """What was recorded of it."""
        self._values: RecordedValues | None = None
        self._replay: Callable[[], None] | None = None
        self._places: dict[int, torch.Tensor] = {}  # of results of a segment that runs by itself

    def __call__(self, args: list[object]) -> Sequence[object]:
        phase = self._phase
        if phase.mode is _Mode.DIRECT:
            return self._run(args)
        if not self._recorded:
            return self._by_itself(args)
        if phase.mode is _Mode.RECORD:
            return self._record(args)
        if self._values is None or self._replay is None or not self._values.lie_there(args):
            phase.moved = True
            return self._run(args)
        self._replay()
        made = self._values.make(args)
        args.clear()
        phase.replayed += 1
        return made

    def _record(self, args: list[object]) -> Sequence[object]:
        phase, given = self._phase, list(args)
        assert phase.recorder is not None
        assert phase.held is not None
        try:
            made, replay = phase.recorder.record(self._run, args)
        except RuntimeError as error:
            # What it leaves behind is for nobody else to meet: such segments are known beforehand (`recordable.py`).
            phase.stop(f"a segment cannot be recorded: {str(error).splitlines()[0]}")
            return self._run(given)
        theirs = _storages(given)
        phase.first += [
            StorageWeakRef(v.untyped_storage()) for v in _tensors(made) if not _storages([v]) <= theirs
        ]
        try:
            self._values, self._replay = RecordedValues(phase.held, given, made), replay
        except (TypeError, ValueError) as error:  # it has run all the same
            phase.stop(f"a segment cannot be replayed: {str(error).splitlines()[0]}")
        return made

    def _by_itself(self, args: list[object]) -> Sequence[object]:
        """Run a segment that is not recorded, and copy what it makes to where those behind it read it."""
        phase, theirs = self._phase, _storages(args)
        made = list(self._run(args))
        new = {
            k: v
            for k, v in enumerate(made)
            if isinstance(v, torch.Tensor) and v.numel() and not _storages([v]) <= theirs
        }
        if phase.mode is _Mode.RECORD:
            assert phase.held is not None
            with torch.inference_mode(False):
                self._places = {
                    k: torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device)
                    for k, v in new.items()
                    if not any(step == 0 for step in v.stride()) and not _overlaps(v)
                }
            phase.memory += self._places.values()
            self._values = RecordedValues(phase.held, [], list(self._places.values()))
        if self._values is None:  # the recording broke off before
            phase.moved = True
            return made
        for (k, place), placed in zip(self._places.items(), self._values.make([]), strict=True):
            value = new.get(k)
            if value is not None and (value.shape, value.stride()) == (place.shape, place.stride()):
                place.copy_(value)
                made[k] = placed
        return made


def _tensors(values: Sequence[object]) -> list[torch.Tensor]:
    return [v for v in values if isinstance(v, torch.Tensor)]


def _storages(values: Sequence[object]) -> set[int]:
    return {v.untyped_storage()._cdata for v in _tensors(values)}
