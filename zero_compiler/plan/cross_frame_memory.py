"""What the frames of one model hold beside each other: a graph break makes several of one forward.

While a frame runs, those before it have saved what their backward will read, which comes after its own. And when the
backward of a frame begins, those behind it have stored gradients: also of weights that it reads as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..ir import ops
from ..ir.facts import ParamRef
from ..ir.program import Program
from ..report.frame import Frame
from ..sharded.sharded_model import ShardedModel


def related(sharded_models: Iterable[ShardedModel]) -> list[Any]:
    """All that are of one model with any of these, its parts that were sharded by themselves among them, in the order
    in which they were made."""
    found = {
        id(p): p for sharded_model in sharded_models for p in (sharded_model, *sharded_model.scope.members)
    }
    return sorted(found.values(), key=lambda p: p.identity.made)


def frames_of(sharded_models: Iterable[ShardedModel]) -> list[Frame]:
    """Those compiled so far, in order."""
    return sorted(
        (f for sharded_model in sharded_models for f in sharded_model.frames), key=lambda f: f.index
    )


def due(frames: Iterable[Frame], code: str) -> dict[str, Frame]:
    """Of other ``code`` the last frame that was compiled, where a forward of it still waits for its backward."""
    return {f.code: f for f in frames if code and f.code and f.code != code and f.calls}


def behind(frames: Iterable[Frame], code: str) -> set[str]:
    """Code that runs between forward and backward of ``code``, as far as that is known."""
    return set().union(*(f.behind for f in frames if f.code == code))


def saved_before(frame: Frame, frames: Iterable[Frame]) -> int:
    """Bytes that other code has saved for a backward that is still due, at the sizes at which it was called."""
    return sum(f.saved_now for f in frames if f.code and frame.code and f.code != frame.code and f.calls)


def again_bytes(program: Program, frames: Sequence[Frame], code: str) -> int:
    """Bytes of gradients that a backward of ``code`` makes and finds stored by the frames behind it."""
    if program.phase != "backward":
        return 0
    later = behind(frames, code)
    theirs = {ref for f in frames if f.code in later for ref in _reduced(f.programs.get("backward"))}
    return sum(rows_bytes(ops.owner_of(ref.owner), ref.name) for ref in _reduced(program) & theirs)


def rows_bytes(sharded_model: ShardedModel, name: str) -> int:
    """Bytes that this rank's rows of a gradient take on the device."""
    here = sharded_model.tiers.placed.tier("grads", name) == "none"
    return sharded_model.params[name].layout.bytes_local() if here else 0


def _reduced(program: Program | None) -> set[ParamRef]:
    if program is None:
        return set()
    return {ParamRef(r.owner, name) for r in program.reduces for name in r.names}


def link_backwards(frame: Frame, others: Sequence[Frame], waiting: Iterable[Frame]) -> None:
    """Tell the frames that are ``waiting`` that ``frame``, which is compiled, runs behind them.

    Args:
        others: that were compiled before.
    """
    frames = [*others, frame]
    before = behind(frames, frame.code)
    for f in waiting:
        if f.code in before:  # it runs before as well as behind: what it waits for is another step
            continue
        f.behind.add(frame.code)
        program = f.programs.get("backward")
        if program is not None:
            f.programs["backward"] = replace(program, again_bytes=again_bytes(program, frames, f.code))


def beside_now(program: Program, frame: Frame | None) -> Program:
    """``program``, a phase of ``frame``, with what that has been told since of other frames and of gradients."""
    now = None if frame is None else frame.programs.get(program.phase)
    if now is None or (now.idle_bytes, now.again_bytes) == (program.idle_bytes, program.again_bytes):
        return program
    return replace(program, idle_bytes=now.idle_bytes, again_bytes=now.again_bytes)
