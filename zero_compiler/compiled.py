"""The segments of a Program compiled, and what that changes in its plan."""

from __future__ import annotations

from dataclasses import replace

from .emit import Emitted
from .frame_state import FrameState
from .live import live_bytes
from .program import Compute
from .segments import SegmentCompiler, SegmentFn


def compile_segments(
    emitted: Emitted, compiler: SegmentCompiler, phase: str, state: FrameState
) -> list[SegmentFn]:
    """Compile every segment, and count the bytes of the Program again where their code takes more.

    What fits a memory budget as the graph says fits it in the end: where it would not, segments whose code holds more
    than their operators one by one run so.
    """
    program = emitted.program
    flags = phase == "inference", phase == "backward"
    artifacts = [compiler.compile(seg, *flags) for seg in emitted.segments]
    by_graph = program.inside

    def count() -> None:
        emitted.segments = [
            replace(seg, generated=a.generated) for seg, a in zip(emitted.segments, artifacts, strict=True)
        ]
        program.live, program.inside = live_bytes(program, emitted.graph, emitted.numbers, emitted.segments)

    if any(a.generated is not None for a in artifacts):
        count()
    budget_bytes = state.config.memory_budget_bytes
    beside = [p for name, p in (state.planned | state.frame.programs).items() if name != phase]
    larger = [i for i, (a, b) in enumerate(zip(program.inside, by_graph, strict=True)) if a > b]
    apart = list[int]()
    while larger and budget_bytes is not None and state.policies:
        if state.peak([program, *beside]) <= budget_bytes:
            break
        live = {
            i.segment: n for i, n in zip(program.instrs, program.live, strict=True) if isinstance(i, Compute)
        }
        key = artifacts[max(larger, key=live.__getitem__)].key
        for i in [i for i in larger if artifacts[i].key == key]:
            artifacts[i] = compiler.compile(emitted.segments[i], *flags, fuse=False)
            larger.remove(i)
            apart.append(i)
        count()
    if apart:
        program.notes.append(
            f"segments {', '.join(map(str, sorted(apart)))} run operator by operator: fused they take more than "
            "memory_budget_bytes leaves"
        )
    numbers: dict[str, int] = {}
    for seg, artifact in zip(emitted.segments, artifacts, strict=True):
        if artifact.key not in numbers:
            numbers[artifact.key] = len(numbers)
            program.segments.append(seg.gm.print_readable(print_output=False))
        program.structures.append(numbers[artifact.key])
    return [a.run for a in artifacts]
