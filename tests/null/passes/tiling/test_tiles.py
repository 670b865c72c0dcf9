"""What loops over tiles of weights leave behind is erased, and nothing that is read."""

from __future__ import annotations

from null.graphs import Build, aten, names_of

from zero_compiler.passes.tiling.tiles import erase_unread


def test_what_nobody_reads_goes_with_what_only_that_has_read():
    b = Build()
    x = b.input("x", 6, 4)
    kept = b.op(aten.neg.default, x)
    gone = b.op(aten.exp.default, b.op(aten.mul.Tensor, kept, 2))
    b.done(kept)
    erase_unread(b.graph, gone)
    assert names_of(b.graph) == ["aten.neg"]
    erase_unread(b.graph, kept)
    assert names_of(b.graph) == ["aten.neg"]
