"""All figures by name, in the order of the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ...errors import ConfigError
from ..planning import Say
from . import largest, nodes, speed, states, wide_layer
from .extended import Planner
from .table import Figure

FIGURES: dict[str, Callable[[Planner], Figure]] = {
    "states": states.states,
    "volume": states.volume,
    "largest": largest.largest,
    "nodes": nodes.nodes,
    "placement": nodes.placement,
    "wide-layer": wide_layer.wide_layer,
    "throughput": speed.throughput,
    "scaling": speed.scaling,
    "overlap": speed.overlap,
}


def check(names: Sequence[str]) -> None:
    """Before anything takes long.

    Raises:
        ConfigError: there is no such figure.
    """
    for name in names:
        if name not in FIGURES:
            raise ConfigError(f"--only {name!r} is no figure; give one of {', '.join(FIGURES)}")


def made(names: Sequence[str], say: Say) -> Iterator[Figure]:
    """The figures of these names, all where there is none, one after the other as they are done."""
    check(names)
    planner = Planner(say)
    for name, figure in FIGURES.items():
        if not names or name in names:
            yield figure(planner)
