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
) -> tuple[Emitted, list[SegmentFn]]:
    """Compile every segment, and count the bytes of the Program again where their code takes more.

    Where a Program then passes its memory budget, segments whose code holds more than their operators do one by one
    run so, as long as that lowers the peak. Not with tensor-parallel ranks: these compute the same, and one that fuses
    and one that does not would round differently.
    """
    by_graph, segments, build = emitted.program.inside, emitted.segments, _builder(compiler, phase)
    emitted, artifacts = count_compiled(emitted, compiler, phase)
    if any(a.generated is not None for a in artifacts):
        larger = [
            k
            for k, (a, b) in enumerate(zip(emitted.program.inside, by_graph, strict=True))
            if a > b and alike_one_by_one(segments[k])
        ]
        if larger and not any(sharded_model.group.tensor for sharded_model in state.sharded_models.values()):
            emitted, artifacts = _within_budget(emitted, artifacts, larger, build, state)
    numbers: dict[str, int] = {}
    texts = []
    for seg, artifact in zip(segments, artifacts, strict=True):
        if artifact.key not in numbers:
            numbers[artifact.key] = len(numbers)
            texts.append(seg.gm.print_readable(print_output=False))
    program = replace(
        emitted.program, segments=texts, structures=[numbers[artifact.key] for artifact in artifacts]
    )
    return state.with_recorded_bytes(replace(emitted, program=program), phase), [a.run for a in artifacts]


def count_compiled(emitted: Emitted, compiler: SegmentCompiler, phase: str) -> tuple[Emitted, list[Artifact]]:
    """Compile every segment, and count the bytes of the Program by what its code takes."""
    artifacts = list(map(_builder(compiler, phase), emitted.segments))
    if any(a.generated is not None for a in artifacts):
        emitted = _counted(emitted, artifacts)
    return emitted, artifacts


def _builder(compiler: SegmentCompiler, phase: str) -> Callable[..., Artifact]:
    return functools.partial(
        compiler.compile, is_inference=phase == "inference", is_backward=phase == "backward"
    )


def _counted(emitted: Emitted, artifacts: list[Artifact]) -> Emitted:
    segments = [
        replace(seg, generated=a.generated) for seg, a in zip(emitted.segments, artifacts, strict=True)
    ]
    live, inside = live_bytes(emitted.program, emitted.graph, emitted.numbers, segments)
    return replace(emitted, segments=segments, program=replace(emitted.program, live=live, inside=inside))


def _within_budget(
    emitted: Emitted,
    artifacts: list[Artifact],
    larger: list[int],
    build: Callable[..., Artifact],
    state: FrameState,
) -> tuple[Emitted, list[Artifact]]:
    """The artifacts with which the Program keeps the memory budget, or comes nearest.

    Args:
        larger: segments that may run operator by operator, and hold less then.
        build: compiles a segment.
    """
    budget_bytes, phase = state.config.memory_budget_bytes, emitted.program.phase
    if budget_bytes is None or not state.sharded_models:
        return emitted, artifacts
    beside = [p for name, p in (state.planned | state.frame.programs).items() if name != phase]
    peak = state.peak([emitted.program, *beside])
    apart: list[int] = []
    while larger and peak > budget_bytes:
        live = {
            instr.segment: nbytes
            for instr, nbytes in zip(emitted.program.instrs, emitted.program.live, strict=True)
            if isinstance(instr, Compute)
        }
        key = artifacts[max(larger, key=live.__getitem__)].key
        alike = [k for k in larger if artifacts[k].key == key]
        larger = [k for k in larger if k not in alike]
        tried = list(artifacts)
        for k in alike:
            tried[k] = build(emitted.segments[k], fuse=False)
        counted = _counted(emitted, tried)
        lower = state.peak([counted.program, *beside])
        if lower < peak:
            emitted, artifacts, peak, apart = counted, tried, lower, apart + alike
    if apart:
        note = (
            f"segments {', '.join(map(str, sorted(apart)))} run operator by operator: fused they take more than "
            "memory_budget_bytes leaves"
        )
        program = emitted.program
        emitted = replace(emitted, program=replace(program, notes=[*program.notes, note]))
    return emitted, artifacts
