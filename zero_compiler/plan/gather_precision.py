"""Which weights travel in 8 bits a number: those of which a step takes less time for it, as all ranks have agreed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ..cost.hardware import HardwareSpec
from ..cost.prefetch import distances, phase_us
from ..ir.facts import ParamRef
from ..ir.program import Program
from ..passes.base import ParamPlan
from ..sharded.sharded_model import ShardedModel
from .schedule import LARGEST_UNITS, look

# So often a step is timed. Units of which nothing is known by then travel in 8 bits.
_TRIES = 64

_Unit = tuple[str, str]  # its owner and its name


def undecided(
    sharded_models: Mapping[str, ShardedModel], params: Mapping[ParamRef, ParamPlan]
) -> list[ParamRef]:
    """Weights that travel in 8 bits unless it is decided that they do not."""
    return [
        ref
        for ref, plan in params.items()
        if plan.wire is not None and ref.name not in sharded_models[ref.owner].agreed.quantised
    ]


def decide(sharded_models: Mapping[str, ShardedModel], chosen: Mapping[ParamRef, bool]) -> None:
    """Have weights travel in 8 bits from here on, or not."""
    for ref, quantised in chosen.items():
        sharded_models[ref.owner].agreed.quantised[ref.name] = quantised


def forget(sharded_models: Mapping[str, ShardedModel], refs: Iterable[ParamRef]) -> None:
    """Nothing is decided of these."""
    for ref in refs:
        sharded_models[ref.owner].agreed.quantised.pop(ref.name, None)


def to_text(refs: Iterable[ParamRef], whole: frozenset[ParamRef]) -> str:
    """Which of ``refs`` travel in 8 bits, as text that means the same on every rank."""
    return "".join("0" if ref in whole else "1" for ref in refs)


def from_text(text: str, refs: Sequence[ParamRef]) -> dict[ParamRef, bool]:
    """Inverse of :func:`to_text`."""
    return {ref: digit == "1" for ref, digit in zip(refs, text, strict=True)}


def hidden(programs: Sequence[Program], spec: HardwareSpec, world: int) -> frozenset[ParamRef]:
    """Weights that may travel whole, and a step takes no longer: their gathers are hidden so, too.

    Tried is what becomes of a step where a set of units travels whole: first all of them, and of a set that makes it
    longer each half. A unit that is found stays so while the others are tried, as they share the lane.

    Args:
        programs: phases of a step, in which all that may travel in 8 bits does.
    """
    units = list(dict.fromkeys((g.owner, g.unit) for p in programs for g in p.gathers if g.wire))
    found = frozenset[_Unit]()
    best_us = _step_us(programs, found, spec, world)
    left, tries = [units] if units else [], 0
    while left and tries < _TRIES:
        some, tries = left.pop(0), tries + 1
        us = _step_us(programs, found | set(some), spec, world)
        if us <= best_us:
            found, best_us = found | set(some), us
        elif len(some) > 1:
            middle = len(some) // 2
            left += [some[:middle], some[middle:]]
    return frozenset(
        ParamRef(g.owner, name)
        for p in programs
        for g in p.gathers
        for name in g.names
        if g.wire and (g.owner, g.unit) in found
    )


def _step_us(programs: Sequence[Program], whole: frozenset[_Unit], spec: HardwareSpec, world: int) -> float:
    """Time of the phases, their gathers as far ahead as is best where ``whole`` units travel whole."""
    us = 0.0
    for program in programs:
        gathers = [replace(g, wire="") if (g.owner, g.unit) in whole else g for g in program.gathers]
        phase = look(replace(program, gathers=gathers), spec, world).phase
        room = LARGEST_UNITS * max(phase.nbytes, default=0)
        us += phase_us(phase, distances(phase, room))
    return us
