"""A compiled frame beside its budget of memory: whether it fits, and what gradients may lend to activations."""

from __future__ import annotations

from dataclasses import replace

from ..memory import live
from ..memory.verify import verify_program
from ..plan import budget, cross_frame_memory
from .frame_state import FrameState


def lend_gradients(state: FrameState) -> None:
    """Between two backwards, let activations have the bytes of gradients where that lowers the peak."""
    mine = list(state.frame.programs.values())
    sharded_models = state.relatives
    if not sharded_models or not mine:
        return
    others = [
        p for sharded_model in sharded_models for f in sharded_model.frames for p in f.programs.values()
    ]
    gradients = budget.memory_of(sharded_models, mine, 0).gradients
    most = max(live.most(p, gradients) for p in (*mine, *others))
    idle = live.idle_bytes(mine, gradients, most)
    for phase, program in state.frame.programs.items():
        if phase != "backward":
            state.frame.programs[phase] = replace(program, idle_bytes=idle)


def check_budget(state: FrameState) -> None:
    """What was compiled fits the budget, by the plan and by the verifier's own count; and so does it together with
    frames before it, which may find more there than was known of them.

    Raises:
        MemoryBudgetError: it does not.
    """
    cross_frame_memory.link_backwards(state.frame, state.others, state.due.values())
    budget_bytes = state.config.memory_budget_bytes
    if budget_bytes is None or not state.sharded_models:
        return
    sharded_models, programs = state.relatives, list(state.frame.programs.values())
    every = [*programs, *state.waiting]
    memory = budget.memory_of(sharded_models, every, state.frame.kept_bytes)
    budget.check(memory, budget_bytes, budget.peak_at(every, memory.gradients), sharded_models)
    worlds = {ref.owner: plan.world for ref, plan in state.params.items()}
    room = budget_bytes - memory.at_rest + memory.gradients
    for program in programs:
        verify_program(program, worlds, room - program.beside_bytes, memory.gradients)
