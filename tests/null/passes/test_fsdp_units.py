"""Which weights are gathered together, in which order, and which of them again in backward."""

from __future__ import annotations

from null.graphs import (
    Build,
    aten,
)

from zero_compiler.passes import (
    assign_units,
    gathered_in_backward,
    order_of_use,
)


def test_regathered_weights_do_not_depend_on_activations():
    seen = set()
    for rows in (1, 4096):
        b = Build(w=(64, 64), scale=(64,))
        x, tangent = b.input("x", rows, 64), b.input("tangents_1", rows, 64)
        scaled = b.op(aten.mul.Tensor, x, b.weight("scale"))
        out = b.op(aten.mm.default, scaled, b.weight("w"))
        b.done(out, b.reduced("scale", b.op(aten.sum.dim_IntList, b.op(aten.mul.Tensor, tangent, x), [0])))
        seen.add(gathered_in_backward(b.graph, b.plans, 1 << 20))
    assert len(seen) == 1


def test_a_gradient_whose_weight_nothing_reads():
    """As of a weight without elements, whose readers fold to constants: its reduction has a place all the same."""
    b = Build(a=(4, 4), b=(0, 4))
    x, tangent = b.input("x", 3, 4), b.input("tangents_1", 3, 4)
    y = b.op(aten.mm.default, x, b.weight("a"))
    none = b.op(aten.new_zeros.default, tangent, [0, 4])
    grads = b.op(aten.mm.default, b.op(aten.t.default, x), tangent)
    b.done(y, b.reduced("a", grads), b.reduced("b", none))
    order = order_of_use(b.graph)
    assert [ref.name for ref in order] == ["a", "b"]
    assert set(assign_units(order, b.plans, 1 << 20)) == set(b.plans)
