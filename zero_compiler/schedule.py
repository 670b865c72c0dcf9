"""How far ahead of its use each unit's gathers start: decided once for a model's phase, for all ranks.

What the times say depends on the sizes of a batch, which ranks may legally disagree about; the order of
collectives must not. So rank 0 decides, and what was decided stands for every later compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .agreement import digest
from .arena import aligned
from .hardware import HardwareSpec
from .ir.facts import ParamRef
from .prefetch import Event, Phase, distances, in_flight, phase_us
from .program import Compute, Gather, GatherDesc, Program, Reduce, WaitGather, WaitReduce
from .simulate import duration, share_cores, transfers

# Without a memory budget gather buffers in flight may take the bytes of this many of the largest unit: one more
# than at distance 1.
_LARGEST_UNITS = 2
# Offsets are packed anew for every choice, so its bytes are known only afterwards. So often a smaller room is tried.
_TRIES = 4


@dataclass(frozen=True)
class Choice:
    """Distances of a phase by unit, and why, as a sentence for the report."""

    why: str
    distances: Mapping[str, int] = field(default_factory=dict)

    @property
    def ahead(self) -> bool:
        """Whether any unit starts further ahead than behind the wait of the one before it."""
        return any(d > 1 for d in self.distances.values())

    def text(self) -> str:
        """One line for the report."""
        far = {u.split(":", 1)[-1]: d for u, d in self.distances.items() if d > 1}
        if not far:
            return f"gathers start one unit ahead: {self.why}"
        furthest = sorted(far.items(), key=lambda row: -row[1])
        rows = [f"{d} ahead for {unit or 'the model'}" for unit, d in furthest]
        more = f" and {len(rows) - 6} more" if len(rows) > 6 else ""
        return f"gathers start one unit ahead, but {', '.join(rows[:6])}{more}: {self.why}"


def nothing_to_decide(
    params: Mapping[ParamRef, Any], phase: str, spec: HardwareSpec, world: int
) -> str | None:
    """Why every distance is 1 whatever the sizes; None where they must be decided. The same on every rank."""
    moved = [p for p in params.values() if p.cut and not p.home and (p.released or phase != "backward")]
    if world == 1 or not moved:
        return "nothing moves between ranks"
    if share_cores(spec):
        return "compute and transfers share cores here, so an earlier start hides nothing"
    return None


def key_of(phase: str, units: Sequence[str]) -> str:
    """Name of a decision: the phase and its units in order, their owners by number, since keys differ by rank."""
    owners: dict[str, int] = {}
    names = []
    for unit in dict.fromkeys(units):
        owner, _, name = unit.partition(":")
        names.append(f"{owners.setdefault(owner, len(owners))}:{name}")
    return f"{phase}/{digest(chr(10).join(names)).hex()[:16]}"


def to_text(choice: Mapping[str, int], units: Sequence[str]) -> str:
    """Distances as text that means the same on every rank: by the place of the unit in the order of use."""
    return " ".join(str(choice.get(u, 1)) for u in dict.fromkeys(units))


def from_text(text: str, units: Sequence[str]) -> dict[str, int]:
    """Inverse of :func:`to_text`."""
    return dict(zip(dict.fromkeys(units), map(int, text.split()), strict=True))


@dataclass(frozen=True)
class Look:
    """A Program with every distance 1, as the search sees it."""

    units: list[str]
    phase: Phase

    def of(self, chosen: Mapping[str, int]) -> list[int]:
        return [min(chosen.get(u, 1), i + 1) for i, u in enumerate(self.units)]

    def explained(self, chosen: Mapping[str, int], room: str) -> str:
        """What the choice is worth, in words."""
        now = self.of(chosen)
        before = phase_us(self.phase, [1] * len(now)) - self.phase.compute_us
        after = phase_us(self.phase, now) - self.phase.compute_us
        held = f"{in_flight(self.phase, now):,} bytes in flight, room {room}"
        if after < before:
            return f"stall {duration(before)} becomes {duration(after)}; {held}"
        return f"starting earlier saves none of {duration(before)} of stall; {held}"


def look(program: Program, spec: HardwareSpec, world: int) -> Look:
    """What the search needs of a Program whose distances are all 1."""
    gather_costs, reduce_costs = transfers(program, spec, world)
    index: dict[str, int] = {}
    us: list[float] = []
    nbytes: list[int] = []
    last_wait: dict[int, int] = {}
    for at, instr in enumerate(program.instrs):
        if isinstance(instr, Gather):
            g = program.gathers[instr.index]
            unit = f"{g.owner}:{g.unit}"
            if unit not in index:
                index[unit] = len(us)
                us.append(0.0)
                nbytes.append(0)
            us[index[unit]] += gather_costs[instr.index][0]
            nbytes[index[unit]] += _bytes_in_flight(g, world)
        elif isinstance(instr, WaitGather):
            g = program.gathers[instr.index]
            last_wait[index[f"{g.owner}:{g.unit}"]] = at
    ends = {at for at in last_wait.values()}
    between: list[list[Event]] = [[]]
    for at, instr in enumerate(program.instrs):
        if at in ends:
            between.append([])
        elif isinstance(instr, Compute):
            between[-1].append(("compute", program.segment_us[instr.segment]))
        elif isinstance(instr, (Reduce, WaitReduce)) and reduce_costs[instr.index][0]:
            between[-1].append(("start" if isinstance(instr, Reduce) else "wait", instr.index))
    return Look(list(index), Phase(us, nbytes, between, [cost for cost, _ in reduce_costs]))


def _bytes_in_flight(g: GatherDesc, world: int) -> int:
    """Bytes of this rank that a gather needs from its start to its wait, beside those of kept weights."""
    item = getattr(torch, g.dtype).itemsize
    staging = 0
    if g.staging >= 0:
        staging = sum(g.chunk_numels) * item * (world + 1 if len(g.names) > 1 else 1)
    if g.kept or g.home:
        return staging
    buffers = sum(aligned(n * world * item) for n in g.chunk_numels)
    return staging + (-(-buffers // world) if g.shared else buffers)


def choose(
    looks: Mapping[str, Look],
    spare_bytes: int | None,
    over_bytes: Callable[[Mapping[str, Mapping[str, int]]], int],
) -> dict[str, dict[str, int]]:
    """Distances of every phase by unit: the smallest that take the least time, in the room that there is.

    Args:
        spare_bytes: what a memory budget leaves beside the plan with every distance 1; None without a budget.
        over_bytes: by how much the phases, planned with given distances, pass that budget.
    """
    for _ in range(_TRIES):
        if spare_bytes is not None and spare_bytes < 0:
            break
        found = {}
        for phase, seen in looks.items():
            steps = distances(seen.phase, _room(seen, spare_bytes)[0])
            found[phase] = dict(zip(seen.units, steps, strict=True))
        ahead = any(d > 1 for chosen in found.values() for d in chosen.values())
        over = over_bytes(found) if spare_bytes is not None and ahead else 0
        if spare_bytes is None or over <= 0:
            return found
        spare_bytes -= over
    return {phase: dict.fromkeys(seen.units, 1) for phase, seen in looks.items()}


def room_text(seen: Look, spare_bytes: int | None) -> str:
    room, why = _room(seen, spare_bytes)
    return f"{room:,} ({why})"


def _room(seen: Look, spare_bytes: int | None) -> tuple[int, str]:
    largest = max(seen.phase.nbytes, default=0)
    if spare_bytes is None:
        return _LARGEST_UNITS * largest, "two of the largest unit"
    return largest + spare_bytes, "the largest unit and what the memory budget leaves"
