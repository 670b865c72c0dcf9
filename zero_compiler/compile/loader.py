"""Loads compiled Programs: into the engine, which runs them, or into a report, where only a plan is wanted."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from ..emit.segments import SegmentFn
from ..errors import ShardError
from ..ir.program import Program
from ..ranks.agreement import decide, post_text, show
from ..ranks.failing import ended_calls
from ..report.frame import Frame
from ..runtime.model import ModelRuntime
from ..runtime.pools import joined
from ..runtime.recorded_segments import RECORDERS, RecordedSegments
from ..runtime.session import Session
from ..sharded.sharded_model import ShardedModel
from .call_decisions import CallDecisions

_PLANNING = "decision on the plan of the model"


class Loader(Protocol):
    """Where Programs go: what runs them, and the table of weights that they keep.

    ``compute`` stands in place of the option of that name, unless it is None.
    """

    compute: str | None

    def prepare(self, sharded_models: Sequence[ShardedModel], relatives: Sequence[ShardedModel]) -> None:
        """Called once a frame, before anything is compiled.

        Args:
            relatives: these, and what else there is of the models that they are parts of.
        """

    def kept_offsets(self) -> Mapping[str, dict[str, int]]:
        """The tables that :func:`emit` grows, one an owner."""

    def tightest(self, sharded_model: ShardedModel, key: str, room_bytes: int, text: str) -> str:
        """The text of the rank of the model with the least room, given this rank's."""

    def decide(self, sharded_model: ShardedModel, key: str, text: str, room_bytes: int | None = None) -> str:
        """What all ranks of the model hold to from now on, given what this rank would choose: within a budget, which
        leaves this rank ``room_bytes``, it is the choice of the rank with the least."""

    def tell_plan(self, sharded_model: ShardedModel, text: str, asks: bool) -> list[str]:
        """Let all ranks of the model know which plan file this one holds to; theirs, in order, if it ``asks``."""

    def show(self, sharded_model: ShardedModel, text: str) -> list[str]:
        """Texts of all tensor-parallel ranks of the model, in order, given this rank's."""

    def load(
        self, program: Program, segments: Sequence[SegmentFn], frame: Frame
    ) -> Callable[[list[object]], list[object]]:
        """A callable that runs ``program``, a phase of ``frame``, on a list of inputs, which it may empty."""


class EngineLoader:
    """Runs Programs through the engine, over the process group of the model."""

    compute: str | None = None

    def __init__(self) -> None:
        self.runtimes: dict[str, ModelRuntime] = {}
        self.first: ModelRuntime | None = None

    def prepare(self, sharded_models: Sequence[ShardedModel], relatives: Sequence[ShardedModel]) -> None:
        for sharded_model in sharded_models:
            sharded_model.group.check_still_valid()
            sharded_model.gradients.make_room_for_trained()
            if sharded_model.runtime is None:
                sharded_model.runtime = ModelRuntime(sharded_model)
            self.runtimes[sharded_model.key] = sharded_model.runtime
        joined(p.runtime for p in relatives if p.runtime is not None)
        self.first = sharded_models[0].runtime if sharded_models else None

    def kept_offsets(self) -> Mapping[str, dict[str, int]]:
        return {key: runtime.kept_offsets for key, runtime in self.runtimes.items()}

    def tightest(self, sharded_model: ShardedModel, key: str, room_bytes: int, text: str) -> str:
        said = [t.partition("\n") for t in self.of_all(sharded_model, key, f"{room_bytes}\n{text}")]
        return min(said, key=lambda s: int(s[0]))[2]  # of several the first rank's

    def of_all(self, sharded_model: ShardedModel, key: str, text: str) -> list[str]:
        """Texts of all ranks of the model, in order, given this rank's."""
        group = sharded_model.group.everyone
        if group.one_rank:
            return [text]
        # Either all ranks come to know the texts of all, or the call ends before on all: another attempt asks anew.
        return show(group, f"{key}/{sharded_model.agreed.attempt}.{ended_calls(group)}", text, _PLANNING)

    def decide(self, sharded_model: ShardedModel, key: str, text: str, room_bytes: int | None = None) -> str:
        asked = f"decided/{sharded_model.identity.serial}/{key}"
        if room_bytes is None:
            text = decide(sharded_model.group, f"{asked}/{sharded_model.agreed.attempt}", text, _PLANNING)
        else:
            text = self.tightest(sharded_model, asked, room_bytes, text)
        sharded_model.agreed.decided[key] = text
        return text

    def tell_plan(self, sharded_model: ShardedModel, text: str, asks: bool) -> list[str]:
        group = sharded_model.group.everyone
        if group.one_rank:
            return []
        key = f"plan/{sharded_model.identity.serial}/{sharded_model.agreed.attempt}.{ended_calls(group)}"
        if asks:
            return show(group, key, text, _PLANNING)
        post_text(group, key, text)
        return []

    def show(self, sharded_model: ShardedModel, text: str) -> list[str]:
        if text not in sharded_model.agreed.shown:  # a rank that compiles again, alone, need not ask
            attempt = f"{sharded_model.agreed.attempt}.{ended_calls(sharded_model.group)}"
            key = f"shown/{sharded_model.identity.serial}/{attempt}/{len(sharded_model.agreed.shown)}"
            peers = sharded_model.group.tensor
            assert peers is not None
            sharded_model.agreed.shown[text] = show(
                peers, key, text, "partition_activations", sharded_model.group
            )
        return list(sharded_model.agreed.shown[text])

    def load(
        self, program: Program, segments: Sequence[SegmentFn], frame: Frame
    ) -> Callable[[list[object]], list[object]]:
        decisions = CallDecisions(program, self.runtimes, self.first, frame)
        recorded = self._recorded(program, frame)
        return Session(program, segments, self.runtimes, self.first, decisions, frame.index, recorded).run

    def _recorded(self, program: Program, frame: Frame) -> RecordedSegments | None:
        """What makes graphs of the device of the segments of ``program``, where the frame asks for that."""
        phase = frame.recorded.get(program.phase)
        if phase is None or self.first is None:
            return None
        device = self.first.sharded_model.group.device
        make = functools.partial(RECORDERS[device.type], device)
        return RecordedSegments(phase, program.num_inputs, make, program.title_in(frame.index))


class PlanLoader:
    """Takes Programs and runs none. Nothing is allocated, and no other rank is asked: this one may look alone.

    Args:
        sharded_models: models that may be compiled already: what their Programs keep, they keep in the plan.
    """

    compute: str | None = "aten"  # segments are only formed, and no kernel is compiled

    def __init__(self, sharded_models: Iterable[ShardedModel] = ()) -> None:
        made = {p.key: dict(p.runtime.kept_offsets) for p in sharded_models if p.runtime is not None}
        self._kept: defaultdict[str, dict[str, int]] = defaultdict(dict, made)

    def prepare(self, sharded_models: Sequence[ShardedModel], relatives: Sequence[ShardedModel]) -> None:
        pass

    def kept_offsets(self) -> Mapping[str, dict[str, int]]:
        return self._kept

    def decide(self, sharded_model: ShardedModel, key: str, text: str, room_bytes: int | None = None) -> str:
        return text

    def tightest(self, sharded_model: ShardedModel, key: str, room_bytes: int, text: str) -> str:
        return text

    def tell_plan(self, sharded_model: ShardedModel, text: str, asks: bool) -> list[str]:
        return []

    def show(self, sharded_model: ShardedModel, text: str) -> list[str]:
        return [text]

    def load(
        self, program: Program, segments: Sequence[SegmentFn], frame: Frame
    ) -> Callable[[list[object]], list[object]]:
        def run(inputs: list[object]) -> list[object]:
            raise ShardError("this Program was only planned and cannot run")

        return run
