"""The printer of graphs: one line a node, names of parameters, bytes that come and go."""

from __future__ import annotations

from null.graphs import Build, aten, lower, two_layers

from zero_compiler.ir import dump


def test_a_line_says_what_a_node_is_and_what_lives_after_it():
    b = Build(w=(4, 4))
    x = b.input("x", 3, 4)
    b.done(b.op(aten.mm.default, x, b.weight("w")))
    lines = dump.text(lower(b, "forward")).splitlines()
    assert len(lines) == len(b.graph.nodes) - sum(
        n.target.__class__.__name__ == "builtin_function_or_method"
        for n in b.graph.nodes
        if n.op == "call_function"
    )
    assert any(line.startswith("%w.full = zero.gather") for line in lines)
    assert lines[-1].startswith("return ")


def test_dumps_are_the_same_for_equal_graphs():
    assert dump.text(lower(two_layers(), "forward")) == dump.text(lower(two_layers(), "forward"))
