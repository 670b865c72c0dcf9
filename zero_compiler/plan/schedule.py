"""How far ahead of its use each unit's gathers start: decided once for a model's phase, for all ranks.

What the times say depends on the sizes of a batch, which ranks may legally disagree about; the order of
collectives must not. So one rank decides (rank 0, or under a budget the one with
the least room), and what was decided stands for every later compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..alignment import arena_aligned
from ..cost.hardware import HardwareSpec
from ..cost.lane_simulator import share_cores
from ..cost.prefetch import Event, Phase, distances, in_flight, phase_us
from ..cost.simulate import simulate
from ..cost.timeline import HOST, READ, WRITE, duration
from ..cost.transfer_costs import transfer_us, transfers, work_us
from ..ir.facts import ParamRef
from ..ir.instructions import Instruction, Step
from ..ir.program import Program
from ..ir.transfers import GatherDesc
from ..passes.base import ParamPlan
from ..ranks.agreement import digest

# Without a memory budget gather buffers in flight may take the bytes of this many of the largest unit: one more
# than at distance 1.
LARGEST_UNITS = 2
# Offsets are packed anew for every choice, so its bytes are known only afterwards. So often a smaller room is tried.
_TRIES = 4


def nothing_to_decide(
    params: Mapping[ParamRef, ParamPlan], phase: str, spec: HardwareSpec, world: int
) -> str | None:
    """Why every distance is 1 whatever the sizes; None where they must be decided. The same on every rank."""
    moved = [p for p in params.values() if p.sharded and not p.home and (p.released or phase != "backward")]
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
        """Distances as gathers start: at the top at most, and none behind one that is used later."""
        begins = [max(0, i + 1 - chosen.get(u, 1)) for i, u in enumerate(self.units)]
        for i in range(len(begins) - 2, -1, -1):
            begins[i] = min(begins[i], begins[i + 1])
        return [i + 1 - begin for i, begin in enumerate(begins)]

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
        if instr.table != "gathers":
            continue
        g = program.gathers[instr.index]
        unit, collective = f"{g.owner}:{g.unit}", Step("gathers", instr.index, g.steps - 1)
        if instr.starts(program) == collective:
            if unit not in index:
                index[unit] = len(us)
                us.append(0.0)
                nbytes.append(0)
            us[index[unit]] += gather_costs[instr.index][0]
            nbytes[index[unit]] += _bytes_in_flight(g, world)
        elif instr.ends(program) == collective:
            last_wait[index[unit]] = at
    ends = {at for at in last_wait.values()}
    between: list[list[Event]] = [[]]
    for at, (instr, of) in enumerate(zip(program.instrs, program.reductions, strict=True)):
        if at in ends:
            between.append([])
        if (work := instr.work(program)) is not None:
            between[-1].append(("compute", work_us(work, spec)))
        elif of is not None and (of.starts or of.ends) and reduce_costs[instr.index][0]:
            between[-1].append(("start" if of.starts else "wait", instr.index))
    return Look(list(index), Phase(us, nbytes, between, [cost for cost, _ in reduce_costs]))


def _bytes_in_flight(g: GatherDesc, world: int) -> int:
    """Bytes of this rank that a gather needs from its start to its wait, beside those of kept weights."""
    item, staging = getattr(torch, g.dtype).itemsize, g.staging_bytes(world)
    if g.kept or g.home:
        return staging
    buffers = sum(arena_aligned(n * g.ranks(world) * item) for n in g.chunk_numels)
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
        return LARGEST_UNITS * largest, "two of the largest unit"
    return largest + spare_bytes, "the largest unit and what the memory budget leaves"


# Hops: chunks on their way from other tiers. Each rank decides for itself, since nothing is sent between ranks.


def hop_distances(
    program: Program,
    stage: int,
    spec: HardwareSpec,
    world: int,
    budgeted: bool,
    checksums: bool = False,
) -> list[int] | None:
    """How far ahead the hops of a stage start (see `prefetch_hops.py`), by unit; None where the Program has
    no such stage, or its chunks are not copied to a device.

    Those of stages before it stand where they were found to; these stand one unit ahead. Without a memory budget, two
    of the largest unit may be in flight.
    """
    copied = any(hop.pool == "device" for g in program.gathers for hop in g.hops)
    if not copied or all(len(g.hops) < stage for g in program.gathers):
        return None
    phase = hop_phase(program, stage, spec, world, checksums)
    largest = max(phase.nbytes, default=0)
    return distances(phase, largest if budgeted else LARGEST_UNITS * largest)


def hop_phase(program: Program, stage: int, spec: HardwareSpec, world: int, checksums: bool = False) -> Phase:
    """The hops of one stage as the search sees them: the host's time between them is what it would take if chunks
    came from other tiers in no time."""
    lanes = {HOST} if stage == 1 else {READ}
    if READ in lanes and any({READ, WRITE} <= set(group) for group in spec.shared):
        lanes.add(WRITE)
    unit_of: list[int] = []
    for k, g in enumerate(program.gathers):
        before = program.gathers[k - 1] if k else None
        same = before is not None and (before.owner, before.unit) == (g.owner, g.unit)
        unit_of.append(unit_of[-1] + (not same) if unit_of else 0)
    count = unit_of[-1] + 1 if unit_of else 0
    us, nbytes = [0.0] * count, [0] * count
    waits: dict[int, int] = {}  # the first instruction that waits for hops of a unit
    starts: dict[int, int] = {}  # the last one that starts the unit in the stage before
    for at, instr in enumerate(program.instrs):
        if instr.table != "gathers":
            continue
        g, unit = program.gathers[instr.index], unit_of[instr.index]
        transfer, ended = instr.transfer(program), instr.ends(program)
        if transfer is not None and len(g.hops) - transfer.step.number == stage:
            us[unit] += transfer_us(transfer, spec)
            nbytes[unit] += g.chunk_bytes
        elif transfer is not None and len(g.hops) - transfer.step.number == stage - 1:
            starts[unit] = at
        elif ended is not None and len(g.hops) - ended.number == stage:
            waits.setdefault(unit, at)
    reached = [0.0, *simulate(program, spec, world, fetches=False, checksums=checksums).reached_us]
    other_us: list[float] = []
    between: list[list[Event]] = []
    begin = next((at for at, i in enumerate(program.instrs) if i.table == "gathers" and i.starts(program)), 0)
    for unit in range(count + 1):
        end = waits.get(unit, starts.get(unit, begin)) if unit < count else len(program.instrs)
        events: list[Event] = []
        now_us = reached[begin]
        for at in range(begin, end):
            if cost := _other_us(program, program.instrs[at], lanes, spec):
                events += [("compute", reached[at] - now_us), ("start", len(other_us))]
                other_us.append(cost)
                now_us = reached[at]
        between.append([*events, ("compute", reached[max(begin, end)] - now_us)])
        begin = max(begin, starts.get(unit, end - 1) + 1)
    return Phase(us, nbytes, between, other_us)


def _other_us(program: Program, instr: Instruction, lanes: Collection[str], spec: HardwareSpec) -> float:
    """Time on ``lanes`` of what an instruction puts there, if that is no hop."""
    transfer = instr.transfer(program)
    if transfer is not None and transfer.step.table != "gathers" and transfer.lane in lanes:
        return transfer_us(transfer, spec)
    if instr.effects.completes and WRITE in lanes:
        r = program.reduces[instr.index]
        return spec.nvme_write.us(r.result_bytes) if r.tiers[-1:] == ("nvme",) else 0.0
    return 0.0
