"""Segments recorded into CUDA graphs give what they give when they run."""

import pytest
import torch
from recorded_loops import LOOPS, run, simple

import zero_compiler as zero
from zero_compiler.runtime.recorded_segments import RecordedSegments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA"),
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_same_bits_as_without(loop, monkeypatch):
    replayed = []
    ended = RecordedSegments.ended

    def counted(self, outputs):
        replayed.append(self.replayed)
        return ended(self, outputs)

    monkeypatch.setattr(RecordedSegments, "ended", counted)
    torch._dynamo.reset()
    recorded, _ = run(loop, "cuda", mode="reduce-overhead")
    torch._dynamo.reset()
    plain, _ = run(loop, "cuda")
    assert sum(replayed) > 0
    for a, b in zip(recorded, plain, strict=True):
        assert torch.equal(a, b)


def test_their_memory_is_what_was_planned():
    torch._dynamo.reset()
    before = torch.cuda.memory_allocated()
    out, step = run(simple, "cuda", mode="reduce-overhead")
    memory = zero.inspect(step).memory
    del out
    assert memory.recorded > 0
    assert torch.cuda.max_memory_allocated() - before <= memory.peak * 1.1 + (
        64 << 20
    )  # workspaces of libraries
