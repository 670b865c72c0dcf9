"""The order that passes give to transfers: which start before which compute, and in which buckets."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
from expecttest import TestCase
from null.graphs import (
    OWNER,
    Build,
    aten,
    check_numbers,
    lower,
    names_of,
    two_layers,
    two_layers_backward,
)

from zero_compiler.ir import dump, facts, ops
from zero_compiler.ir.facts import ParamRef


class Goldens(TestCase):
    def test_place_starts(self):
        self.assertExpectedInline(
            dump.text(lower(two_layers(), "forward", "place-starts")),
            """\
%h__0__w_shard = input                                                   f32[2,4]                        +32  live 0
%h__0__b_shard = input                                                   f32[2]                           +8  live 0
%h__1__w_shard = input                                                   f32[3,4]                        +48  live 0
%x = input                                                               f32[3,4]                        +48  live 48
%h.0.b..h.0.w.full = zero.gather [h.0.b, h.0.w]                          (f32[4], f32[4,4])              +80  live 128
%h.0.b, %h.0.w = zero.wait %h.0.b..h.0.w.full                            (f32[4], f32[4,4])                   live 128
%h.1.w.full = zero.gather [h.1.w]                                        (f32[5,4])                      +80  live 208
%t_default = aten.t %h.0.w                                               f32[4,4]                             live 208
%addmm_default = aten.addmm %h.0.b, %x, %t_default                       f32[3,4]                        +48  live 128
%relu_default = aten.relu %addmm_default                                 f32[3,4]                        +48  live 128
%h.1.w = zero.wait %h.1.w.full                                           (f32[5,4])                           live 128
%t_default_1 = aten.t %h.1.w                                             f32[4,5]                             live 128
%mm_default = aten.mm %relu_default, %t_default_1                        f32[3,5]                        +60  live 108
return %mm_default, %relu_default
""",
        )

    def test_place_starts_further_ahead(self):
        b = Build(h__0__w=(4, 4), h__1__w=(4, 4), h__2__w=(4, 4), h__3__w=(4, 4))
        x = b.input("x", 3, 4)
        for i in range(4):
            x = b.op(aten.mm.default, x, b.weight(f"h.{i}.w"))
        b.done(x)
        ahead = {f"{OWNER}:h.1": 9, f"{OWNER}:h.3": 3}
        # h.2 may not start behind h.3; what is further ahead than there are units starts at the top.
        graph = lower(b, "forward", "place-starts", distances=ahead)
        rows = [line.split("  ")[0] for line in dump.text(graph).splitlines() if " input" not in line]
        self.assertExpectedInline(
            "\n".join(rows),
            """\
%h.0.w.full = zero.gather [h.0.w]
%h.1.w.full = zero.gather [h.1.w]
%h.0.w = zero.wait %h.0.w.full
%h.2.w.full = zero.gather [h.2.w]
%h.3.w.full = zero.gather [h.3.w]
%mm_default = aten.mm %x, %h.0.w
%h.1.w = zero.wait %h.1.w.full
%mm_default_1 = aten.mm %mm_default, %h.1.w
%h.2.w = zero.wait %h.2.w.full
%mm_default_2 = aten.mm %mm_default_1, %h.2.w
%h.3.w = zero.wait %h.3.w.full
%mm_default_3 = aten.mm %mm_default_2, %h.3.w
return %mm_default_3""",
        )

    def test_insert_releases(self):
        self.assertExpectedInline(
            dump.text(lower(two_layers(), "forward", "insert-releases")),
            """\
%h__0__w_shard = input                                                   f32[2,4]                        +32  live 0
%h__0__b_shard = input                                                   f32[2]                           +8  live 0
%h__1__w_shard = input                                                   f32[3,4]                        +48  live 0
%x = input                                                               f32[3,4]                        +48  live 48
%h.0.b..h.0.w.full = zero.gather [h.0.b, h.0.w]                          (f32[4], f32[4,4])              +80  live 128
%h.0.b, %h.0.w = zero.wait %h.0.b..h.0.w.full                            (f32[4], f32[4,4])                   live 128
%h.1.w.full = zero.gather [h.1.w]                                        (f32[5,4])                      +80  live 208
%t_default = aten.t %h.0.w                                               f32[4,4]                             live 208
%addmm_default = aten.addmm %h.0.b, %x, %t_default                       f32[3,4]                        +48  live 208
%relu_default = aten.relu %addmm_default                                 f32[3,4]                        +48  live 208
zero.release %h.0.b, %h.0.w                                                                              -80  live 128
%h.1.w = zero.wait %h.1.w.full                                           (f32[5,4])                           live 128
%t_default_1 = aten.t %h.1.w                                             f32[4,5]                             live 128
%mm_default = aten.mm %relu_default, %t_default_1                        f32[3,5]                        +60  live 188
zero.release %h.1.w                                                                                      -80  live 108
return %mm_default, %relu_default
""",
        )


def test_waits_of_the_first_unit_come_after_all_of_its_starts():
    # A large weight goes alone, its bias in a bucket of its own: two gathers in one unit.
    b = two_layers()
    assert names_of(lower(b, "forward", "place-starts", bucket_bytes=20))[:4] == [
        "zero.gather",
        "zero.gather",
        "zero.wait",
        "zero.wait",
    ]


def test_gathers_start_before_what_reads_no_weight():
    b = Build(w=(4, 4))
    x = b.op(aten.relu.default, b.input("x", 3, 4))
    b.done(b.op(aten.mm.default, x, b.weight("w")))
    assert names_of(lower(b, "forward")) == [
        "zero.gather",
        "aten.relu",
        "zero.wait",
        "aten.mm",
        "zero.release",
    ]


def test_units_keep_their_order_where_one_operator_reads_several():
    b = Build(h__0__w=(4, 4), h__1__w=(4, 4), h__2__w=(4, 4))
    x = b.input("x", 4, 4)
    w = [b.weight(f"h.{i}.w") for i in range(3)]
    y = b.op(aten.addcmul.default, w[0], w[2], w[1])
    b.done(b.op(aten.mm.default, x, y))
    program, _ = b.program(lower(b, "forward"), "forward")
    assert [g.names for g in program.gathers] == [("h.0.w",), ("h.1.w",), ("h.2.w",)]


def test_reductions_in_shared_memory_hold_as_much_as_the_largest():
    b = two_layers_backward()
    b.plans |= {ref: replace(plan, shared=True) for ref, plan in b.plans.items()}
    order = []
    for node in lower(b, "backward", bucket_bytes=0).nodes:
        start = node.args[0] if node.target is ops.wait else node
        if getattr(start, "target", None) is ops.reduce:
            order.append((node.target is ops.wait, facts.params(start)[0].name))
    start, wait = False, True
    # 80 bytes, and then 16 and 64 beside each other.
    assert order == [
        (start, "h.1.w"),
        (wait, "h.1.w"),
        (start, "h.0.b"),
        (start, "h.0.w"),
        (wait, "h.0.b"),
        (wait, "h.0.w"),
    ]


def five_gradients() -> Build:
    b = Build(h__0__a=(4, 2), h__0__b=(4, 2), h__0__c=(4, 4), h__0__d=(2,), h__0__e=(4, 4))
    t = b.input("tangents_1", 4, 4)
    halves = b.op(aten.slice.Tensor, t, 1, 0, 2)
    grads = {"e": b.op(aten.neg.default, t), "d": b.op(aten.sum.dim_IntList, halves, [0])}
    grads |= {"c": b.op(aten.abs.default, t), "b": b.op(aten.neg.default, halves)}
    grads |= {"a": b.op(aten.abs.default, halves)}
    b.done(*(b.reduced(f"h.0.{k}", g) for k, g in grads.items()))
    return b


@pytest.mark.parametrize("shared", [True, False])
def test_large_gradients_of_a_unit_do_not_wait_for_its_end(shared):
    """Weights of 64 and 32 bytes, as in a block; those that wait never pass the largest. Small ones close with it.
    Where nothing of them waits in the arena, no segment is cut for it."""
    b = five_gradients()
    b.plans |= {ref: replace(plan, shared=shared) for ref, plan in b.plans.items()}
    graph = lower(b, "backward", "bucket-transfers", bucket_bytes=16)
    order = [
        facts.params(n)[0].name[-1] if n.target is ops.reduce else n.target
        for n in graph.nodes
        if n.target is ops.reduce or n.target in (aten.neg.default, aten.abs.default)
    ]
    neg, abs_ = aten.neg.default, aten.abs.default
    if shared:
        assert order == [neg, "e", abs_, "c", neg, abs_, "b", "a", "d"]
    else:
        assert order == [neg, abs_, neg, abs_, "a", "b", "c", "d", "e"]


def test_results_of_one_operator_stay_together():
    """The gradient of a convolution's weight is complete before that of its bias has a name."""
    b = Build(h__0__v=(4, 4, 3, 3), h__0__w=(4, 4, 3, 3), h__0__b=(4,))
    b.plans |= {ref: replace(plan, shared=True) for ref, plan in b.plans.items()}
    x, v, t = b.input("x", 2, 4, 5, 5), b.input("v", 4, 4, 3, 3), b.input("tangents_1", 2, 4, 5, 5)
    grads = {}
    for name in ("w", "v"):
        both = b.op(
            aten.convolution_backward.default,
            t,
            x,
            v,
            [4],
            [1, 1],
            [1, 1],
            [1, 1],
            False,
            [0, 0],
            1,
            [True] * 3,
        )
        t, grads[name], bias = (b.op(operator.getitem, both, i) for i in range(3))
        grads.setdefault("b", bias)
    b.done(t, *(b.reduced(f"h.0.{k}", g) for k, g in grads.items()))
    graph = lower(b, "backward", "bucket-transfers", bucket_bytes=64)
    first = next(n for n in graph.nodes if n.target is ops.reduce)
    assert facts.params(first)[0].name == "h.0.w"
    both = first.args[0][0].args[0]
    assert all(user < first for user in both.users)


def test_reductions_keep_their_order_where_gradients_come_at_once():
    # The gradients of both units are ready together, before anything else is.
    b = Build(h__0__w=(4,), h__1__w=(4,), h__2__w=(4,))
    t = b.input("tangents_1", 4)
    early = b.op(aten.neg.default, t)
    late = b.op(aten.relu.default, early)
    grads = {"h.0.w": late, "h.1.w": early, "h.2.w": late}
    b.done(*(b.reduced(n, g) for n, g in grads.items()))
    lower(b, "backward")
    order = [facts.params(n)[0].name for n in b.graph.nodes if n.target is ops.reduce]
    assert order == ["h.2.w", "h.1.w", "h.0.w"]


def test_a_derived_weight_stays_before_all_of_its_readers():
    # `cast` is read by its own view and by the operator that reads both.
    b = Build(w=(4, 4))
    x = b.input("x", 4, 4)
    cast = b.op(aten.neg.default, b.weight("w"))
    view = b.op(aten.t.default, cast)
    mask = b.op(aten.gt.Scalar, x, 0.0)
    out = b.op(aten.where.self, mask, cast, view)
    b.done(out)
    # As a partitioner may leave it: the later reader is listed first.
    users = cast.users
    users[view] = users.pop(view)
    check_numbers(b, "forward")


def test_a_phase_gathers_what_it_must_even_if_its_graph_reads_nothing():
    b = Build(w=(4, 4))
    tangent = b.input("tangents_1", 4, 4)
    b.done(b.reduced("w", b.op(aten.neg.default, tangent)))
    ref = ParamRef(OWNER, "w")
    program, _ = b.program(lower(b, "backward", gathered=frozenset({ref})), "backward")
    assert [g.names for g in program.gathers] == [("w",)]


@pytest.mark.parametrize("distance", [1, 2, 3])
def test_starts_further_ahead_keep_the_numbers(distance):
    ahead = {f"{OWNER}:h.{i}": distance for i in range(2)}
    check_numbers(two_layers(), "forward", bucket_bytes=20, distances=ahead)
    check_numbers(two_layers_backward(), "backward", bucket_bytes=20, distances=ahead)
