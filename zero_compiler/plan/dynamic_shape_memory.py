"""What the Programs of a frame hold at other sizes than those that they were planned at.

Dynamo makes a size symbolic when it has changed once, and from then on one graph serves all later ones. Its plan counts
bytes at the sizes at which it was captured; under a memory budget a call at others counts them again before it begins.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from ..emit.emit import Emitted
from ..ir import facts
from ..ir.program import Program
from ..memory.alias_table import storages_of
from ..memory.live import live_bytes
from .call_admission import AtSizes, PlannedMemory, at_sizes

_REMEMBERED = 64  # distinct calls


@dataclass(frozen=True)
class _Symbol:
    """A size that may change: where a phase is given it (number of the input; dimension, or None for a number), what it
    was when the graph was captured, and its name for messages."""

    symbol: object
    input: int
    dim: int | None
    planned: int
    name: str

    def read(self, inputs: Sequence[Any]) -> int:
        given = inputs[self.input]
        return int(given if self.dim is None else given.shape[self.dim])


@dataclass(frozen=True)
class _SizedPhase:
    program: Program
    symbols: list[_Symbol]
    # What it is at other sizes, and bytes that a backward is handed; None: nothing in it has a size that may change.
    at: Callable[[facts.Sizes], tuple[Program, int | None]] | None
    # Bytes that a backward is handed at other sizes.
    saved: Callable[[facts.Sizes], int] | None = None


class Sized:
    """The Programs of one frame at the sizes of its calls.

    ``saved_now``: bytes that its last forward has saved for its backward; None: as planned.
    """

    def __init__(self) -> None:
        self.saved_now: int | None = None
        self._phases: dict[str, _SizedPhase] = {}
        self._known: OrderedDict[object, tuple[AtSizes, int | None]] = OrderedDict()
        self._saved: OrderedDict[tuple[int, ...], int] = OrderedDict()

    def add(self, emitted: Emitted) -> None:
        """Take a phase whose segments are compiled."""
        program, graph, numbers = emitted.program, emitted.graph, emitted.numbers
        if not any(facts.symbols_of(facts.value(n)) for n in graph.find_nodes(op="placeholder")):
            self._phases[program.phase] = _SizedPhase(program, [], None)
            return

        def at(sizes: facts.Sizes) -> tuple[Program, int | None]:
            live, inside = live_bytes(program, graph, numbers, emitted.segments, sizes)
            storages, _ = storages_of(graph, numbers, program.phase, sizes)
            saved = facts.saved_bytes(graph, sizes) if program.phase == "backward" else None
            returned = facts.returned_bytes(graph, sizes)
            again = replace(program, live=live, inside=inside, storages=storages, returned_bytes=returned)
            return again, saved

        handed = partial(facts.saved_bytes, graph) if program.phase == "backward" else None
        self._phases[program.phase] = _SizedPhase(program, _symbols(graph), at, handed)

    def more_saved(self, inputs: Sequence[object]) -> tuple[int, str]:
        """By how many bytes a forward hands more to its backward than was planned, at the sizes of this call; and these
        in words."""
        symbols = self._phases["forward"].symbols if "forward" in self._phases else []
        values = tuple(s.read(inputs) for s in symbols)
        backward = self._phases.get("backward")
        if backward is None or backward.saved is None or values == tuple(s.planned for s in symbols):
            return 0, ""
        if values not in self._saved:
            now, then = (
                backward.saved(facts.Sizes({s.symbol: n for s, n in zip(symbols, of, strict=True)}))
                for of in (values, [s.planned for s in symbols])
            )
            self._saved[values] = now - then
            if len(self._saved) > _REMEMBERED:
                self._saved.popitem(last=False)
        return self._saved[values], ", ".join(_said(symbols, values))

    def call(
        self,
        phase: str,
        inputs: Sequence[object],
        before_bytes: int,
        planned: PlannedMemory,
        programs: Mapping[str, Program],
    ) -> AtSizes | None:
        """What a call takes, a forward together with its backward; None where it is as its plan says.

        Args:
            before_bytes: that frames before this one have saved for their backward.
            planned: for the models of the call.
            programs: of the frame, with what it has been told of other frames.
        """
        mine = self._phases[phase]
        values = tuple(s.read(inputs) for s in mine.symbols)
        if phase == "forward":
            self.saved_now = None
        if values == tuple(s.planned for s in mine.symbols) and before_bytes == mine.program.before_bytes:
            return None
        phases = [
            p for p in (("forward", "backward") if phase == "forward" else (phase,)) if p in self._phases
        ]
        again = tuple(programs[p].again_bytes for p in phases)
        key = phase, values, before_bytes, again, planned
        if key not in self._known:
            self._known[key] = self._count(phases, values, before_bytes, again, planned)
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        at, saved = self._known[key]
        if phase == "forward":
            self.saved_now = saved
        return at

    def _count(
        self,
        phases: Sequence[str],
        values: Sequence[int],
        before_bytes: int,
        again_bytes: Sequence[int],
        planned: PlannedMemory,
    ) -> tuple[AtSizes, int | None]:
        symbols = self._phases[phases[0]].symbols
        sizes = facts.Sizes({s.symbol: v for s, v in zip(symbols, values, strict=True)})
        programs: dict[str, Program] = {}
        saved = None
        for phase, again in zip(phases, again_bytes, strict=True):
            one = self._phases[phase]
            program, saved = one.at(sizes) if one.at is not None else (one.program, None)
            programs[phase] = replace(program, before_bytes=before_bytes, again_bytes=again)
        text = _said(symbols, values)
        if before_bytes:
            text.append(f"{before_bytes:,} bytes that frames before it have saved")
        return at_sizes(programs, planned, ", ".join(text)), saved


def _said(symbols: Sequence[_Symbol], values: Sequence[int]) -> list[str]:
    return [f"{s.name} = {v:,} (planned: {s.planned:,})" for s, v in zip(symbols, values, strict=True)]


def planned_sizes(graph: fx.Graph) -> dict[str, int]:
    """The sizes that may change from call to call, by name, as they were when the graph was captured."""
    return {s.name: s.planned for s in _symbols(graph)}


def _symbols(graph: fx.Graph) -> list[_Symbol]:
    """Every symbol that an input of the graph is, or that is a size of one."""
    found: dict[object, _Symbol] = {}

    def see(size: object, at: int, dim: int | None) -> None:
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
