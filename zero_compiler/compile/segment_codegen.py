"""The segments of a Program compiled, and what that changes in its plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from ..emit.emit import Emitted
from ..emit.segments import Artifact, SegmentCompiler, SegmentFn, alike_one_by_one
from ..ir.instructions import Compute
from ..memory.live import live_bytes
from .frame_state import FrameState


def compile_segments(
    emitted: Emitted, compiler: SegmentCompiler, phase: str, state: FrameState
) -> list[SegmentFn]:
    """Compile every segment, and count the bytes of the Program again where their code takes more.

    Where a Program then passes its memory budget, segments whose code holds more than their operators do one by one
    run so, as long as that lowers the peak. Not with tensor-parallel ranks: these compute the same, and one that fuses
    and one that does not would round differently.
    """
    program, segments = emitted.program, emitted.segments
    by_graph, build = program.inside, _builder(compiler, phase)
    artifacts = count_compiled(emitted, compiler, phase)
    if any(a.generated is not None for a in artifacts):
        larger = [
            k
            for k, (a, b) in enumerate(zip(program.inside, by_graph, strict=True))
            if a > b and alike_one_by_one(segments[k])
        ]
        if larger and not any(policy.group.tensor for policy in state.policies.values()):
            artifacts = _within_budget(emitted, artifacts, larger, build, state)
    numbers: dict[str, int] = {}
    for seg, artifact in zip(segments, artifacts, strict=True):
        if artifact.key not in numbers:
            numbers[artifact.key] = len(numbers)
            program.segments.append(seg.gm.print_readable(print_output=False))
        program.structures.append(numbers[artifact.key])
    return [a.run for a in artifacts]


def count_compiled(emitted: Emitted, compiler: SegmentCompiler, phase: str) -> list[Artifact]:
    """Compile every segment, and count the bytes of the Program by what its code takes."""
    artifacts = list(map(_builder(compiler, phase), emitted.segments))
    if any(a.generated is not None for a in artifacts):
        _count(emitted, artifacts)
    return artifacts


def _builder(compiler: SegmentCompiler, phase: str) -> Callable[..., Artifact]:
    return functools.partial(
        compiler.compile, is_inference=phase == "inference", is_backward=phase == "backward"
    )


def _count(emitted: Emitted, artifacts: list[Artifact]) -> None:
    program = emitted.program
    emitted.segments = [
        replace(seg, generated=a.generated) for seg, a in zip(emitted.segments, artifacts, strict=True)
    ]
    program.live, program.inside = live_bytes(program, emitted.graph, emitted.numbers, emitted.segments)


def _within_budget(
    emitted: Emitted,
    artifacts: list[Artifact],
    larger: list[int],
    build: Callable[..., Artifact],
    state: FrameState,
) -> list[Artifact]:
    """The artifacts with which the Program keeps the memory budget, or comes nearest.

    Args:
        larger: segments that may run operator by operator, and hold less then.
        build: compiles a segment.
    """
    program, budget_bytes = emitted.program, state.config.memory_budget_bytes
    if budget_bytes is None or not state.policies:
        return artifacts
    beside = [p for name, p in (state.planned | state.frame.programs).items() if name != program.phase]
    peak = state.peak([program, *beside])
    apart: list[int] = []
    while larger and peak > budget_bytes:
        live = {
            instr.segment: nbytes
            for instr, nbytes in zip(program.instrs, program.live, strict=True)
            if isinstance(instr, Compute)
        }
        key = artifacts[max(larger, key=live.__getitem__)].key
        alike = [k for k in larger if artifacts[k].key == key]
        larger = [k for k in larger if k not in alike]
        tried = list(artifacts)
        for k in alike:
            tried[k] = build(emitted.segments[k], fuse=False)
        _count(emitted, tried)
        lower = state.peak([program, *beside])
        if lower < peak:
            artifacts, peak, apart = tried, lower, apart + alike
        else:
            _count(emitted, artifacts)
    if apart:
        program.notes.append(
            f"segments {', '.join(map(str, sorted(apart)))} run operator by operator: fused they take more than "
            "memory_budget_bytes leaves"
        )
    return artifacts
