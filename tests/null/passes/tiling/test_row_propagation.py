"""How rows of a value run through operators: what keeps them apart, what sums over them, and what mixes them."""

from __future__ import annotations

from null.graphs import Build, aten

from zero_compiler.passes.tiling.row_propagation import arg, is_pointwise, is_product, shape


def test_kinds_of_operators():
    b = Build()
    x, y = b.input("x", 6, 4), b.input("y", 4, 5)
    product, sum_ = b.op(aten.mm.default, x, y), b.op(aten.add.Tensor, x, x)
    assert (is_product(product), is_pointwise(product)) == (True, False)
    assert (is_product(sum_), is_pointwise(sum_)) == (False, True)


def test_arguments_that_are_not_given_have_their_defaults():
    b = Build()
    x = b.input("x", 6, 4)
    kept, dropped = b.op(aten.sum.dim_IntList, x, [0], True), b.op(aten.sum.dim_IntList, x, [0])
    assert (arg(kept, 2, False), arg(dropped, 2, False)) == (True, False)
    assert (tuple(shape(kept)), tuple(shape(dropped))) == ((1, 4), (4,))
