"""Where compiled Programs go: the interface of what runs them, and the engine's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from .group import decide, show
from .program import Program
from .runtime.model import ModelRuntime
from .runtime.session import Session


class Loader(Protocol):
    """Where Programs go: what runs them, and the table of weights that they keep."""

    def prepare(self, policies: Sequence[Any]) -> None:
        """Called once a frame, before anything is compiled."""

    def kept_offsets(self) -> Mapping[str, dict[str, int]]:
        """The tables that :func:`emit` grows, one an owner."""

    def decide(self, policy: Any, key: str, text: str) -> str:
        """What all ranks of the model hold to from now on, given what this rank would choose."""

    def show(self, policy: Any, text: str) -> list[str]:
        """Texts of all tensor-parallel ranks of the model, in order, given this rank's."""

    def load(self, program: Program, segments: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
        """A callable that runs ``program`` on a list of inputs, which it may empty."""


class EngineLoader:
    """Runs Programs through the engine, over the process group of the model.

    Args:
        binding: whether what is decided stands for all ranks; a rank that only looks at a plan may be alone.
    """

    def __init__(self, binding: bool = True) -> None:
        self.binding = binding
        self.runtimes: dict[str, ModelRuntime] = {}
        self.first: ModelRuntime | None = None

    def prepare(self, policies: Sequence[Any]) -> None:
        for policy in policies:
            policy.group.check_still_valid()
            if policy.runtime is None:
                policy.runtime = ModelRuntime(policy)
            self.runtimes[policy.key] = policy.runtime
        self.first = policies[0].runtime if policies else None

    def kept_offsets(self) -> Mapping[str, dict[str, int]]:
        return {key: runtime.kept_offsets for key, runtime in self.runtimes.items()}

    def decide(self, policy: Any, key: str, text: str) -> str:
        if self.binding:
            policy.distances[key] = text = decide(policy.group, f"prefetch/{policy.serial}/{key}", text)
        return text

    def show(self, policy: Any, text: str) -> list[str]:
        if not self.binding:
            return [text]
        if text not in policy.shown:  # a rank that compiles again, alone, need not ask
            key = f"shown/{policy.serial}/{len(policy.shown)}"
            policy.shown[text] = show(policy.group.tensor, key, text, "partition_activations")
        return list(policy.shown[text])

    def load(self, program: Program, segments: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
        return Session(program, segments, self.runtimes, self.first).run
