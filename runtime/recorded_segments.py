"""Segments recorded into graphs of the device (``mode="reduce-overhead"``): a replay is one launch in place of one a
kernel.

A replay reads and writes the addresses of the recording. Weights lie at planned places, and what recorded segments
return lies in memory of the phase's own, whose blocks are used again as values die; they die at the same instructions
in every call. What the caller makes anew for each call is copied to one place. Where anything lies elsewhere, or a
value of an earlier call is still held, segments run as they do without graphs.
"""

from __future__ import annotations

import contextlib
import logging
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
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # a default stream cannot be recorded
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


RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": GraphRecorder}


class _Mode(Enum):
    """How the segments of a call run."""

    DIRECT = "direct"
    RECORD = "record"
    REPLAY = "replay"


class RecordedSegments:
    """The segments of one phase, recorded in one of its calls and replayed from then on.

    :meth:`began` and :meth:`ended` stand around the instructions of a call; in between, what :meth:`of` has made of
    the segments is called in the order of the instructions.

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
        self._phase, self._num_inputs, self._make_recorder = phase, num_inputs, make_recorder
        self._name = name
        self._recordings = self._unsteady = 0
        self._copies: dict[int, torch.Tensor] = {}  # of inputs, at one place
        self._placed: RecordedValues | None = None  # which counts those of a call
        self._varying: set[int] = set()  # inputs of the caller's that were found elsewhere than before
        self._before: list[int] | None = None  # where inputs lay in the last call
        self._recorded: list[int] | None = None  # and in the one that was recorded
        self._said: set[str] = set()

    def of(self, segment: SegmentFn) -> SegmentFn:
        """``segment`` as it runs in these calls."""
        return _RecordedSegment(self, segment)

    def began(self, env: list[object]) -> None:
        """Decide how this call runs. Of its inputs, the first values of ``env``, some are exchanged for copies."""
        self.replayed, self.mode = 0, _Mode.DIRECT
        given = env[: self._num_inputs]
        lie = addresses(given)
        self.mode, why = self._decided(given, lie)
        self._before = lie
        if why:
            self.say(f"segments run without their recorded graphs: {why}")
        if self.mode is not _Mode.DIRECT:
            assert self._placed is not None
            for (i, copy), placed in zip(self._copies.items(), self._placed.make([]), strict=True):
                if isinstance(value := given[i], torch.Tensor):
                    copy.copy_(value)
                    env[i] = placed

    def ended(self, outputs: list[object]) -> list[object]:
        """The outputs, of which those that are the caller's are in memory of their own."""
        mode, self.mode = self.mode, _Mode.DIRECT
        if mode is not _Mode.DIRECT:
            for at in self._phase.returned:
                if isinstance(value := outputs[at], torch.Tensor):
                    outputs[at] = value.clone()
        return outputs

    def say(self, what: str) -> None:
        """Tell the user, once."""
        if what not in self._said:
            self._said.add(what)
            log.warning("%s: %s", self._name, what)

    def _decided(self, given: Sequence[object], lie: list[int]) -> tuple[_Mode, str]:
        """How a call runs whose inputs ``given`` lie there, and why, where a user may want to know."""
        before, known = self._before, self._recorded
        if before is None:
            return _Mode.DIRECT, ""  # kernels are chosen and loaded in the first call
        self.first = [storage for storage in self.first if not storage.expired()]
        if self.first or (self.held is not None and self.held.count()):
            return _Mode.DIRECT, "values of an earlier call are still held"
        if known is not None:
            elsewhere = {i for i, at in enumerate(lie) if at != known[i]} - self._copies.keys()
            if not elsewhere and not self.moved:
                return (
                    (_Mode.REPLAY, "")
                    if self._alike(given)
                    else (_Mode.DIRECT, "its inputs have other sizes")
                )
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
        if self._recordings == _MOST_RECORDINGS:
            return _Mode.DIRECT, f"its inputs have moved after {_MOST_RECORDINGS} recordings"
        self._begin(given, lie)
        return _Mode.RECORD, ""

    def _alike(self, given: Sequence[object]) -> bool:
        values = [(copy, given[i]) for i, copy in self._copies.items()]
        return all(
            isinstance(v, torch.Tensor) and (c.shape, c.stride(), c.dtype) == (v.shape, v.stride(), v.dtype)
            for c, v in values
        )

    def _begin(self, given: Sequence[object], lie: list[int]) -> None:
        """Begin a recording, in memory of its own."""
        self._recordings += 1
        self._recorded, self.moved = lie, False
        self.recorder = self.held = self._placed = None  # the memory of the one before goes first
        self._copies.clear()
        self.recorder = self._make_recorder()
        with torch.inference_mode(False):  # calls without it write to them
            self._copies = {
                i: torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device)
                for i in sorted(self._varying)
                if isinstance(v := given[i], torch.Tensor)
            }
        copies = list(self._copies.values())
        self.held = Held((self.recorder, copies))
        self._placed = RecordedValues(self.held, [], copies)


class _RecordedSegment:
    """One segment, called with its inputs in a list, which it empties."""

    def __init__(self, phase: RecordedSegments, run: SegmentFn) -> None:
        self._phase, self._run = phase, run
        self._values: RecordedValues | None = None
        self._held: Held | None = None  # of the recording that these are of
        self._replay: Callable[[], None] = lambda: None

    def __call__(self, args: list[object]) -> Sequence[object]:
        phase = self._phase
        if phase.mode is _Mode.RECORD:
            return self._record(args)
        if phase.mode is _Mode.DIRECT or self._values is None or self._held is not phase.held:
            return self._run(args)
        if not self._values.lie_there(args):
            phase.moved = True
            return self._run(args)
        self._replay()
        made = self._values.make(args)
        args.clear()
        phase.replayed += 1
        return made

    def _record(self, args: list[object]) -> Sequence[object]:
        phase, given = self._phase, list(args)
        self._values, self._held = None, phase.held
        assert phase.recorder is not None
        assert phase.held is not None
        tensors = [a for a in given if isinstance(a, torch.Tensor)]
        if len(tensors) < len(given) or len({t.device for t in tensors}) != 1:
            phase.say("a segment is not recorded: what it is given is not all on the device")
            return self._run(args)
        try:
            made, self._replay = phase.recorder.record(self._run, args)
        except RuntimeError as error:
            phase.say(f"a segment is not recorded: {str(error).splitlines()[0]}")
            return self._run(given)
        theirs = {t.untyped_storage()._cdata for t in tensors}
        phase.first += [
            StorageWeakRef(v.untyped_storage())
            for v in made
            if isinstance(v, torch.Tensor) and v.untyped_storage()._cdata not in theirs
        ]
        try:
            self._values = RecordedValues(phase.held, given, made)
        except (TypeError, ValueError) as error:  # it has run all the same
            phase.say(f"a segment is not replayed: {str(error).splitlines()[0]}")
        return made
