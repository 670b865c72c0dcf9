"""Questions that passes ask of nodes: what is pure, what lies where, how many bytes."""

from __future__ import annotations

import pytest
import torch
from null.graphs import Build, aten
from torch import fx
from torch.utils._pytree import tree_leaves

from zero_compiler.ir import facts


def test_views_lie_where_their_base_does():
    b = Build(w=(4, 4))
    x, w = b.input("x", 3, 4), b.weight("w")
    t = b.op(aten.t.default, w)
    y = b.op(aten.mm.default, x, t)
    b.done(y)
    roots = facts.alias_roots(b.graph)
    assert (roots[t], roots[y]) == (frozenset({w}), frozenset({y}))


def test_an_operator_that_writes_names_what_it_writes_to():
    b = Build()
    x, y = b.input("x", 4), b.input("y", 4)
    written = b.op(aten.add_.Tensor, x, y)
    assert facts.written_inputs(written) == [x]
    assert facts.aliased_inputs(written) == [x]
    assert not facts.is_pure(written)
    assert facts.is_pure(b.op(aten.add.Tensor, x, y))


def test_bytes_of_values():
    b = Build()
    x = b.input("x", 3, 4)
    assert facts.bytes_of(facts.value(x)) == 48
    assert facts.bytes_of((facts.value(x), None, [facts.value(x)])) == 96


def test_what_follows_from_tangents():
    b = Build()
    x, g = b.input("x", 4), b.input("tangents_1", 4)
    y = b.op(aten.mul.Tensor, x, g)
    z = b.op(aten.neg.default, x)
    b.done(y, z)
    behind = facts.depends_on_tangents(b.graph)
    assert y in behind
    assert z not in behind


def test_a_fact_of_a_node_comes_back():
    b = Build()
    x = b.input("x", 4)
    facts.set_unit(x, "m:h.0")
    facts.set_note(x, "because")
    facts.set_params(x, [facts.ParamRef("m", "w")])
    assert (facts.unit(x), facts.note(x)) == ("m:h.0", "because")
    assert facts.params(x) == (facts.ParamRef("m", "w"),)
    assert facts.tile(x) is None
    assert torch.is_tensor(facts.value(x))


def test_a_copy_has_the_same_nodes_and_readers_and_takes_new_ones():
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.sum.dim_IntList, (x, [0]), {"dtype": torch.float32})
    graph.output((y, [x]))
    gm = fx.GraphModule({}, graph)
    copy = facts.copy_module(gm).graph
    assert [(n.op, n.name, n.target, str(n.args), str(n.kwargs)) for n in copy.nodes] == [
        (n.op, n.name, n.target, str(n.args), str(n.kwargs)) for n in graph.nodes
    ]
    given, total, out = copy.nodes
    assert [list(n.users) for n in (given, total, out)] == [[total, out], [out], []]
    with copy.inserting_before(out):
        more = copy.call_function(torch.ops.aten.add.Tensor, (total, given), {"alpha": 2})
    assert (more.args, more.kwargs) == ((total, given), {"alpha": 2})
    assert more in given.users
    copy.lint()
    (again,) = facts.copy_module(fx.GraphModule({}, copy)).graph.find_nodes(
        op="call_function", target=torch.ops.aten.add.Tensor
    )
    assert again.name == more.name


@pytest.mark.parametrize("val", [1, (1, 2), [1, [2, (3,)]], {"a": [1], "b": 2}, (None, torch.float32), []])
def test_leaves_are_those_that_torch_finds(val):
    assert list(facts.leaves(val)) == tree_leaves(val)
