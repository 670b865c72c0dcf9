"""A scheduled graph is cut where transfers are: runs of compute nodes between them."""

from __future__ import annotations

import itertools

from null.graphs import lower, two_layers

from zero_compiler.emit.segmentation import impure, steps
from zero_compiler.ir import facts, ops


def test_runs_are_as_long_as_they_can_be():
    b = two_layers()
    graph = lower(b, "forward")
    found = steps(graph)
    for one, two in itertools.pairwise(found):
        assert not (isinstance(one, list) and isinstance(two, list))
    in_order = [n for step in found for n in (step if isinstance(step, list) else [step])]
    assert in_order == [n for n in graph.nodes if n.op == "call_function" and not facts.is_element(n)]
    assert all(step.target in ops.BORDERS for step in found if not isinstance(step, list))


def test_operators_that_write_are_impure():
    b = two_layers()
    graph = lower(b, "forward")
    assert not any(impure(n) for step in steps(graph) if isinstance(step, list) for n in step)
