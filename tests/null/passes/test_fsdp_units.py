"""Which weights are gathered together, in which order, and which of them again in backward."""

from __future__ import annotations

from null.graphs import (
    Build,
    aten,
)

from zero_compiler.passes import (
    assign_units,
    forward_reads,
    gathered_in_backward,
    order_of_use,
)
from zero_compiler.passes.fsdp_units import MOST_BLOCKS


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


def test_reads_of_forward_are_those_of_the_captured_joint_graph():
    """Each of them, but for one of which nothing is made, and for what backward reads."""
    b = Build(a=(4, 4), b=(4, 4), c=(4, 4))
    x, tangent = b.input("x", 3, 4), b.input("tangents_1", 3, 4)
    for name in ("a", "b", "c", "a"):
        x = b.op(aten.mm.default, x, b.weight(name))
    b.weight("c")
    back = b.op(aten.mm.default, b.op(aten.neg.default, tangent), b.weight("b"))
    b.done(x, b.reduced("a", b.op(aten.mm.default, b.op(aten.t.default, x), back)))
    assert [ref.name for ref in forward_reads(b.graph)] == ["a", "b", "c", "a"]


def units_of(join_bytes: int, *blocks: str, **tile_rows: int) -> list[str]:
    """Names of the units of blocks with a weight of 64 bytes each, blocks joined."""
    names = [name.replace(".", "__") + "__w" for name in blocks]
    b = Build(tile_rows=tile_rows, **dict.fromkeys(names, (4, 4)))
    units = assign_units(list(b.plans), b.plans, 0, join_bytes)
    assert list(units) == list(b.plans)
    return [unit.rpartition(":")[2] for unit in dict.fromkeys(units.values())]


def test_blocks_share_a_unit_within_so_many_bytes():
    blocks = [f"h.{i}" for i in range(5)]
    assert units_of(1 << 20, *blocks) == ["h.0-4"]
    assert units_of(129, *blocks) == ["h.0-1", "h.2-3", "h.4"]
    assert units_of(64, *blocks) == blocks


def test_a_unit_has_so_many_blocks_at_most():
    """Those of a deep model stay alike, and are compiled once."""
    named = units_of(1 << 20, *[f"h.{i}" for i in range(2 * MOST_BLOCKS)])
    assert named == [f"h.0-{MOST_BLOCKS - 1}", f"h.{MOST_BLOCKS}-{2 * MOST_BLOCKS - 1}"]


def test_only_blocks_of_one_list_share_a_unit():
    assert units_of(1 << 20, "emb", "h.0", "h.1", "g.0", "norm") == ["emb", "h.0-1", "g.0", "norm"]


def test_what_is_gathered_in_tiles_shares_no_unit():
    assert units_of(1 << 20, "h.0", "h.1", "h.2", h__1__w=1) == ["h.0", "h.1.w", "h.2"]
