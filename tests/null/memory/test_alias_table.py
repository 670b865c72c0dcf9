"""Values that lie in one storage are counted once, and weights in none."""

from __future__ import annotations

from null.graphs import Build, aten

from zero_compiler.memory.alias_table import storages_of


def test_a_view_lies_where_its_base_does():
    b = Build(w=(4, 4))
    x = b.input("x", 3, 4)
    y = b.op(aten.mm.default, x, b.weight("w"))
    view, z = b.op(aten.t.default, y), b.op(aten.neg.default, y)
    b.done(view, z)
    numbers = {node: k for k, node in enumerate((x, y, view, z))}
    nbytes, lies_in = storages_of(b.graph, numbers, "forward")
    assert nbytes == [48, 48]
    assert lies_in == [(), (0,), (0,), (1,)]  # the caller keeps its input
