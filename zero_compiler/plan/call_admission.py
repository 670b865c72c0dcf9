"""Whether a call fits the memory budget at its sizes, and beside gradients of earlier backwards that it would add to.

A plan is for the sizes at which a graph was captured, and for steps that begin without gradients. Later calls may have
larger batches; and gradients that are kept (a second backward, ``zero.no_sync``) take bytes of their own. Both are
known only when a call is made: so each looks before it begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..emit.no_sync_program import most_accumulating
from ..ir.program import Need, Program
from ..memory.live import idle_bytes, most
from ..report.memory import Memory
from ..sharded.grads import PendingGrad
from ..sharded.sharded_model import ShardedModel
from .budget import memory_of
from .cross_frame_memory import frames_of, related


@dataclass(frozen=True)
class PlannedMemory:
    """What the models of a call were planned to take, and the budget that they were planned for."""

    memory: Memory
    allowed: int

    @property
    def roomy(self) -> bool:
        """Whatever is kept fits: two reduced gradients, full ones, and storages that wait for the next backward."""
        m = self.memory
        return max(m.peak, m.accumulating_peak) + 2 * m.gradients <= self.allowed


def planned_for(sharded_models: Sequence[ShardedModel]) -> PlannedMemory | None:
    """By the frames compiled so far of all that they are parts of; None without a budget. Of several budgets the least;
    where a frame was compiled again for another one, the last."""
    sharded_models = related(sharded_models)
    frames = frames_of(sharded_models)
    last = {f.code or f.index: f.config.memory_budget_bytes for f in frames}
    budgets = [b for b in last.values() if b is not None]
    if not budgets:
        return None
    programs = [p for f in frames for p in f.programs.values()]
    return PlannedMemory(memory_of(sharded_models, programs, max(f.kept_bytes for f in frames)), min(budgets))


@dataclass(frozen=True)
class AtSizes:
    """A call at other sizes than those of its plan.

    ``programs``: the phases for which it answers, at its sizes. ``nbytes``: that it takes where no gradients are kept.
    ``idle_bytes``: as :class:`Need` has them. ``planned``: what the models of the call take at these sizes. ``text``:
    the sizes, in words.
    """

    programs: Mapping[str, Program]
    planned: PlannedMemory
    nbytes: int
    idle_bytes: int
    text: str


def at_sizes(programs: Mapping[str, Program], planned: PlannedMemory, text: str) -> AtSizes:
    """What a call takes.

    Args:
        programs: the phases for which it answers, at its sizes.
        planned: for the models of the call.
        text: the sizes, in words.
    """
    m = planned.memory
    rest = m.at_rest - m.gradients
    largest = max(most(p, m.gradients) for p in programs.values())
    memory = replace(
        m,
        programs=max(m.programs, largest - m.gradients),
        accumulating=max(
            m.accumulating, *(most_accumulating(p, m.gradients, m.waiting) for p in programs.values())
        ),
    )
    idle = idle_bytes(programs.values(), m.gradients, planned.allowed - rest)
    return AtSizes(programs, replace(planned, memory=memory), rest + largest, idle, text)


def need_of(
    program: Program,
    sharded_models: Sequence[ShardedModel],
    planned: PlannedMemory | None,
    who: str,
    at: AtSizes | None = None,
) -> Need:
    """What a call of ``program`` takes at its sizes, beside gradients that are there.

    Args:
        sharded_models: those of its weights.
        planned: for these.
        who: this rank, for the message.
        at: where the plan is for other sizes.
    """
    idle = program.idle_bytes
    if planned is None:
        return Need(0, idle)
    held = program
    if at is not None:
        if at.nbytes > planned.allowed:
            return Need(at.nbytes, 0, _too_large(program, planned.allowed, at, who))
        held, planned = at.programs[program.phase], at.planned
        idle = idle if program.phase == "backward" else at.idle_bytes
    if planned.roomy:
        return Need(0, idle)
    memory, allowed = planned.memory, planned.allowed
    backward = program.phase == "backward"
    rest = memory.at_rest - memory.gradients
    rows, full = _held((sharded_model, sharded_model.params) for sharded_model in sharded_models)
    if backward and (full or program.keeps):
        # All of the step is looked at when it begins: the forward and the last backward that follow need as much, and
        # so do other frames of this backward, which find gradients that it has made.
        running = torch._C._current_graph_task_id()
        if all(sharded_model.looked == running for sharded_model in sharded_models):
            return Need(0, 0)
        for sharded_model in sharded_models:
            sharded_model.looked = running
        needed, idle = rest + memory.accumulating + rows, 0
    elif backward:
        names: dict[str, list[str]] = {}
        for r in program.reduces:
            names.setdefault(r.owner, []).extend(r.names)
        rows, _ = _held((sharded_model, names.get(sharded_model.key, ())) for sharded_model in sharded_models)
        rows = max(0, rows - program.again_bytes)  # in the plan: other frames of this backward have made them
        needed = rest + most(held, memory.gradients) + rows if rows else 0
    else:
        needed = rest + most(held, memory.gradients) + rows + full if rows or full else 0
        idle = max(0, idle - rows - full)
    if needed <= allowed:
        return Need(0, idle)
    return Need(needed, idle, _refusal(program, planned, needed, who))


def saves_too_much(frame: Any, more_bytes: int, sizes: str, who: str) -> Need | None:
    """Why a forward cannot run within ``activation_budget_bytes`` at its ``sizes``; None where it can.

    Args:
        more_bytes: it hands to backward than was planned.
    """
    budget = frame.config.activation_budget_bytes
    held = frame.held_bytes + more_bytes
    if more_bytes <= 0 or held <= budget:
        return None
    text = (
        f"activation_budget_bytes={budget:,} is {held - budget:,} bytes too small for this call on {who}: at {sizes} "
        f"backward would hold {held:,} bytes of what forward made; what is made again was chosen for the first sizes. "
        "Compile with dynamic=False, so that each size has a plan of its own, call with smaller sizes, or give more "
        "bytes"
    )
    return Need(held, 0, text)


def _held(of: Iterable[tuple[Any, Iterable[str]]]) -> tuple[int, int]:
    """Bytes on the compute device of the gradients of some parameters: of those that are reduced, this rank's rows; and
    full ones that wait for it."""
    rows = full = 0
    for sharded_model, names in of:
        for name in names:
            grad = getattr(sharded_model.find(name), "grad", None)
            if isinstance(grad, PendingGrad):
                full += grad.full.nbytes
                grad = grad.base
            if isinstance(grad, DTensor) and sharded_model.tiers.placed.tier("grads", name) == "none":
                rows += sharded_model.params[name].layout.bytes_local()
    return rows, full


def _refusal(program: Program, planned: PlannedMemory, needed: int, who: str) -> str:
    allowed, waiting = planned.allowed, planned.memory.waiting
    begin = f"memory_budget_bytes={allowed:,} is {needed - allowed:,} bytes too small"
    if program.keeps:
        return (
            f"{begin} to accumulate under zero.no_sync: such a step needs {needed:,} bytes on {who}, {waiting:,} of "
            f"them full gradients that wait for their reduction, and {allowed:,} are allowed; leave zero.no_sync out, "
            "so that every backward reduces, or give more bytes, and call the model under zero.no_sync the first time, "
            "so that its plan leaves room for them"
        )
    return (
        f"{begin} to keep gradients of an earlier backward: beside them this {program.phase} needs {needed:,} bytes on "
        f"{who}, and {allowed:,} are allowed; call zero_grad(set_to_none=True) before, make one backward of a larger "
        "part of the batch, or give more bytes"
    )


def _too_large(program: Program, allowed: int, at: AtSizes, who: str) -> str:
    what = "forward and its backward need" if program.phase == "forward" else f"{program.phase} needs"
    return (
        f"memory_budget_bytes={allowed:,} is {at.nbytes - allowed:,} bytes too small for a call with {at.text}: this "
        f"{what} {at.nbytes:,} bytes on {who}, and {allowed:,} are allowed; make the batch smaller, give more bytes, "
        "or have such sizes planned for themselves, which may make activations again and compute in tiles: with "
        "torch.compile(dynamic=False), or with torch._dynamo.mark_dynamic on the inputs of a first call that has the "
        "largest sizes"
    )
