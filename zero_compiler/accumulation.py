"""Whether a call fits the memory budget beside gradients of earlier backwards, where it would add to them.

A plan is for steps that begin without gradients. Those that are kept (a second backward, ``zero.no_sync``) take bytes
of their own, and which steps keep some is known only when they run: so each call looks before it begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from .beside import frames_of
from .budget import memory_of
from .errors import MemoryBudgetError
from .grads import PendingGrad
from .live import most
from .program import Program
from .report import Memory


@dataclass(frozen=True)
class Planned:
    """What the models of a call were planned to take, and the budget that they were planned for."""

    memory: Memory
    allowed: int

    @property
    def roomy(self) -> bool:
        """Whatever is kept fits: two reduced gradients, full ones, and storages that wait for the next backward."""
        m = self.memory
        return max(m.peak, m.accumulating_peak) + 2 * m.gradients <= self.allowed


def planned_for(policies: Sequence[Any]) -> Planned | None:
    """By the frames compiled so far; None without a budget. Of several budgets the least; where a frame was compiled
    again for another one, the last."""
    frames = frames_of(policies)
    last = {f.code or f.index: f.config.memory_budget_bytes for f in frames}
    budgets = [b for b in last.values() if b is not None]
    if not budgets:
        return None
    programs = [p for f in frames for p in f.programs.values()]
    return Planned(memory_of(policies, programs, max(f.kept_bytes for f in frames)), min(budgets))


@dataclass(frozen=True)
class Need:
    """What a call takes: ``nbytes`` on this rank, or 0 where it fits. Of the storages of gradients that nobody holds
    ``idle_bytes`` may wait while it runs; -1: all of them."""

    nbytes: int
    idle_bytes: int


def need_of(program: Program, policies: Sequence[Any], planned: Planned | None) -> Need:
    """What a call of ``program`` takes beside gradients that are there.

    Args:
        policies: those of its weights.
        planned: for these.
    """
    if planned is None or planned.roomy:
        return Need(0, program.idle_bytes)
    memory, allowed = planned.memory, planned.allowed
    backward = program.phase == "backward"
    rest, idle = memory.at_rest - memory.gradients, program.idle_bytes
    rows, full = _held((policy, policy.params) for policy in policies)
    if backward and (full or program.keeps):
        # All of the step is looked at when it begins: the forward and the last backward that follow need as much, and
        # so do other frames of this backward, which find gradients that it has made.
        running = torch._C._current_graph_task_id()
        if all(policy.looked == running for policy in policies):
            return Need(0, 0)
        for policy in policies:
            policy.looked = running
        needed, idle = rest + memory.accumulating + rows, 0
    elif backward:
        names: dict[str, list[str]] = {}
        for r in program.reduces:
            names.setdefault(r.owner, []).extend(r.names)
        rows, _ = _held((policy, names.get(policy.key, ())) for policy in policies)
        rows = max(0, rows - program.again_bytes)  # in the plan: other frames of this backward have made them
        needed = rest + most(program, memory.gradients) + rows if rows else 0
    else:
        needed = rest + most(program, memory.gradients) + rows + full if rows or full else 0
        idle = max(0, idle - rows - full)
    return Need(needed if needed > allowed else 0, idle)


def _held(of: Iterable[tuple[Any, Iterable[str]]]) -> tuple[int, int]:
    """Bytes on the compute device of the gradients of some parameters: of those that are reduced, this rank's rows; and
    full ones that wait for it."""
    rows = full = 0
    for policy, names in of:
        for name in names:
            grad = getattr(policy.find(name), "grad", None)
            if isinstance(grad, PendingGrad):
                full += grad.full.nbytes
                grad = grad.base
            if isinstance(grad, DTensor) and policy.placed.tier("grads", name) == "none":
                rows += policy.params[name].layout.bytes_local()
    return rows, full


def refuse(program: Program, planned: Planned | None, needed: int, who: str) -> NoReturn:
    """Raise, on every rank alike.

    Args:
        needed, who: bytes on the rank that needs most.
    """
    allowed = planned.allowed if planned is not None else 0
    begin = f"memory_budget_bytes={allowed:,} is {needed - allowed:,} bytes too small"
    if program.keeps:
        waiting = planned.memory.waiting if planned is not None else 0
        raise MemoryBudgetError(
            f"{begin} to accumulate under zero.no_sync: such a step needs {needed:,} bytes on {who}, {waiting:,} of "
            f"them full gradients that wait for their reduction, and {allowed:,} are allowed; leave zero.no_sync out, "
            "so that every backward reduces, or give more bytes, and call the model under zero.no_sync the first time, "
            "so that its plan leaves room for them"
        )
    raise MemoryBudgetError(
        f"{begin} to keep gradients of an earlier backward: beside them this {program.phase} needs {needed:,} bytes on "
        f"{who}, and {allowed:,} are allowed; call zero_grad(set_to_none=True) before, make one backward of a larger "
        "part of the batch, or give more bytes"
    )
