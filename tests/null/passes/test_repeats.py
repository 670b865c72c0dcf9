"""Nodes of a list that repeats itself stand for one another, and what differs in one layer does not."""

from __future__ import annotations

from null.compile.test_compile_time import joint

from zero_compiler.passes.repeats import stand_ins


def test_what_differs_in_one_layer_is_not_taken_for_alike():
    b = joint(24)
    nodes = [n for n in b.graph.nodes if n.op == "call_function"]
    plain = stand_ins(nodes, {n: n.target for n in nodes})
    odd = nodes[10 * 12 + 4]
    marked = stand_ins(nodes, {n: (n.target, n is odd) for n in nodes})
    assert odd in plain
    assert odd not in marked
    assert odd not in marked.values()
