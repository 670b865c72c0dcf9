"""What the Programs of a frame hold at other sizes than those that they were planned at.

Dynamo makes a size symbolic when it has changed once, and from then on one graph serves all later ones. Its plan counts
bytes at the sizes at which it was captured; under a memory budget a call at others counts them again before it begins.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from .emit import Emitted
from .ir import facts
from .live import live_bytes
from .program import Program
from .storages import storages_of

Values = tuple[int, ...]  # of the symbols of a phase
_REMEMBERED = 64  # distinct sizes of a phase


@dataclass(frozen=True)
class _Symbol:
    """A size that may change: where a phase is given it (number of the input; dimension, or None for a number), what it
    was when the graph was captured, and its name for messages."""

    symbol: Any
    input: int
    dim: int | None
    planned: int
    name: str

    def read(self, inputs: Sequence[Any]) -> int:
        given = inputs[self.input]
        return int(given if self.dim is None else given.shape[self.dim])


@dataclass(frozen=True)
class _Phase:
    program: Program
    symbols: list[_Symbol]
    at: Callable[[facts.Sizes], tuple[Program, int]] | None  # None: nothing in it has a size that may change


class Sized:
    """The Programs of one frame at the sizes of its calls."""

    def __init__(self) -> None:
        self._phases: dict[str, _Phase] = {}
        self._known: OrderedDict[tuple[str, Values], tuple[dict[str, Program], int]] = OrderedDict()

    def add(self, emitted: Emitted) -> None:
        """Take a phase, before its segments are compiled: that may rewrite their graphs."""
        program, graph, numbers = emitted.program, emitted.graph, emitted.numbers
        inputs = list(graph.find_nodes(op="placeholder"))
        if not any(facts.symbols_of(facts.value(n)) for n in inputs):
            self._phases[program.phase] = _Phase(program, [], None)
            return
        segments = [replace(s, gm=facts.copy_module(s.gm)) for s in emitted.segments]

        def at(sizes: facts.Sizes) -> tuple[Program, int]:
            live, inside = live_bytes(program, graph, numbers, segments, sizes)
            storages, _ = storages_of(graph, numbers, program.phase, sizes)
            saved = facts.saved_bytes(graph, sizes) if program.phase == "backward" else 0
            return replace(program, live=live, inside=inside, storages=storages), saved

        self._phases[program.phase] = _Phase(program, _symbols(graph), at)

    def values(self, phase: str, inputs: Sequence[Any]) -> Values:
        """The sizes of a call that may change."""
        return tuple(s.read(inputs) for s in self._phases[phase].symbols)

    def is_planned(self, phase: str, values: Values) -> bool:
        """Whether the plan was made for these."""
        return values == tuple(s.planned for s in self._phases[phase].symbols)

    def text(self, phase: str, values: Values) -> tuple[str, str]:
        """The sizes of a call, and those of the plan, in words."""
        symbols = self._phases[phase].symbols
        return _text([s.name for s in symbols], values), _text(
            [s.name for s in symbols], [s.planned for s in symbols]
        )

    def programs(self, phase: str, values: Values, saved_bytes: int) -> tuple[dict[str, Program], int]:
        """The Programs for which a call answers (a forward also for its backward) at its sizes, and bytes that are
        saved between the two.

        Args:
            saved_bytes: as planned.
        """
        key = phase, values
        if key not in self._known:
            sizes = facts.Sizes({s.symbol: v for s, v in zip(self._phases[phase].symbols, values, strict=True)})
            made: dict[str, Program] = {}
            for name in ("forward", "backward") if phase == "forward" else (phase,):
                if name not in self._phases:
                    continue
                one = self._phases[name]
                if one.at is None:
                    made[name] = replace(one.program)
                else:
                    made[name], found = one.at(sizes)
                    saved_bytes = found if name == "backward" else saved_bytes
            self._known[key] = made, saved_bytes
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        made, saved_bytes = self._known[key]
        for name, program in made.items():  # what other frames store is learnt later
            program.again_bytes = self._phases[name].program.again_bytes
        return made, saved_bytes


def planned_sizes(graph: fx.Graph) -> dict[str, int]:
    """The sizes that may change from call to call, by name, as they were when the graph was captured."""
    return {s.name: s.planned for s in _symbols(graph)}


def _symbols(graph: fx.Graph) -> list[_Symbol]:
    """Every symbol that an input of the graph is, or that is a size of one."""
    found: dict[Any, _Symbol] = {}

    def see(size: Any, at: int, dim: int | None) -> None:
        if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.hint is not None:
            symbol = size.node.expr
            if symbol not in found:
                found[symbol] = _Symbol(symbol, at, dim, facts.hint(size), _name(size))

    for at, node in enumerate(graph.find_nodes(op="placeholder")):
        val = facts.value(node)
        see(val, at, None)
        for dim, size in enumerate(val.shape if isinstance(val, torch.Tensor) else ()):
            see(size, at, dim)
    return list(found.values())


def _name(size: Any) -> str:
    """As ``x.size()[0]``, where Dynamo knows it."""
    symbol = size.node.expr
    sources = getattr(size.node.shape_env, "var_to_sources", {}).get(symbol)
    if not sources:
        return str(symbol)
    name = sources[0].name
    return re.sub(r"^L\['(\w+)'\]", r"\1", name() if callable(name) else name)


def _text(names: Sequence[str], values: Sequence[int]) -> str:
    return ", ".join(f"{n} = {v:,}" for n, v in zip(names, values, strict=True))
