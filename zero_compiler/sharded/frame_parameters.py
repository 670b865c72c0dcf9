"""The parameters of one frame as its calls find them: their rows, and whether their chunks lie where they lay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from ..torch_cpp import FrameRows, all_stand
from .managed_parameters import Places

T = TypeVar("T")


class _Rests(Protocol):
    """A sharded model, as far as it knows where chunks lie.

    ``at_rest_changes``: how often it has found a chunk, or found it elsewhere. ``stands``: during a call, whether its
    chunks lie where the calls before have found them, so that a gather need not look again.
    """

    at_rest_changes: int
    stands: bool


class FrameParameters:
    """Parameters that a frame was called with.

    Args:
        places: where each stands.
    """

    def __init__(self, params: tuple[Any, ...], places: Sequence[Places]) -> None:
        self.places = list(places)
        self._rows = FrameRows(params)
        # Dynamo looks at one place of a parameter, or at some.
        self._tied = [
            (param, param._local_tensor, param._local_tensor.data_ptr(), at)
            for param, at in zip(params, places, strict=True)
            if len(at) > 1
        ]
        self._seen: dict[str, list[int]] = {}

    @property
    def rows(self) -> tuple[torch.Tensor, ...]:
        """Aliases of their local tensors, which share version counters with the parameters: the same in each call."""
        return self._rows.rows

    def hold(self, params: tuple[Any, ...]) -> bool:
        """Whether these are the same parameters, with local tensors that are where they were."""
        return self._rows.hold(params) and all_stand(self._tied)

    def run(self, phase: str, models: Iterable[_Rests], same: bool, do: Callable[[], T]) -> T:
        """``do``, which gathers what the phase of the frame gathers.

        Args:
            models: whose the parameters are.
            same: :meth:`hold` was true just now.
        """
        models = list(models)
        stand = same and self._seen.get(phase) == [model.at_rest_changes for model in models]
        for model in models:
            model.stands = stand
        try:
            out = do()
        finally:
            for model in models:
                model.stands = False
        self._seen[phase] = [model.at_rest_changes for model in models]
        return out
