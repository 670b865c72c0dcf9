"""What shares a bucket: random weights, with properties that say what a bucket is and nothing of how it is made."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from expecttest import TestCase
from hypothesis import given, settings
from hypothesis import strategies as st
from null.graphs import (
    Build,
    aten,
    lower,
    two_layers_backward,
)

from zero_compiler.ir import dump, facts, ops
from zero_compiler.ir.facts import ParamRef
from zero_compiler.passes import (
    Context,
    ParamPlan,
)
from zero_compiler.passes.bucket_transfers import buckets


class Goldens(TestCase):
    def test_bucket_transfers(self):
        self.assertExpectedInline(
            dump.text(lower(two_layers_backward(), "backward", "bucket-transfers")),
            """\
%h__0__w_shard = input                                                   f32[2,4]                        +32  live 0
%h__0__b_shard = input                                                   f32[2]                           +8  live 0
%h__1__w_shard = input                                                   f32[3,4]                        +48  live 0
%x = input                                                               f32[3,4]                        +48  live 48
%act = input                                                             f32[3,4]                        +48  live 96
%tangents_1 = input                                                      f32[3,5]                        +60  live 156
%t_default = aten.t %tangents_1                                          f32[5,3]                             live 156
%mm_default = aten.mm %t_default, %act                                   f32[5,4]                        +80  live 188
%h.1.w.sum = zero.reduce %mm_default                                     (f32[3,4])                      +48  live 156
%h.1.w.grad = zero.wait %h.1.w.sum                                       (f32[3,4])                           live 156
%h.1.w.full = zero.gather [h.1.w]                                        (f32[5,4])                      +80  live 236
%h.1.w = zero.wait %h.1.w.full                                           (f32[5,4])                           live 236
%mm_default_1 = aten.mm %tangents_1, %h.1.w                              f32[3,4]                        +48  live 144
%t_default_1 = aten.t %mm_default_1                                      f32[4,3]                             live 144
%mm_default_2 = aten.mm %t_default_1, %x                                 f32[4,4]                        +64  live 160
%sum_dim_int_list = aten.sum.dim_IntList %mm_default_1, [0]              f32[4]                          +16  live 128
%h.0.w..h.0.b.sum = zero.reduce %mm_default_2, %sum_dim_int_list         (f32[2,4], f32[2])              +40  live 88
%h.0.w.grad, %h.0.b.grad = zero.wait %h.0.w..h.0.b.sum                   (f32[2,4], f32[2])                   live 88
return %h.0.w.grad, %h.0.b.grad, %h.1.w.grad
""",
        )


LIMIT = 400  # bytes

weights = st.lists(
    st.tuples(
        st.integers(1, 120),  # elements
        st.sampled_from([torch.float32, torch.bfloat16]),
        st.sampled_from(["m", "n"]),  # whose it is
    ),
    max_size=30,
)


def _context(rows) -> Context:
    plans = {}
    for i, (numel, dtype, owner) in enumerate(rows):
        ref = ParamRef(owner, f"w{i}")
        plans[ref] = ParamPlan(ref, (numel,), torch.float32, dtype, torch.float32, True, 2, 3)
    return Context(plans, "forward")


@given(weights)
@settings(max_examples=300, deadline=None)
def test_buckets_are_pure_in_order_and_no_larger_than_they_may_be(rows):
    ctx = _context(rows)
    refs = list(ctx.params)

    def key(ref):
        return ctx.params[ref].gather_dtype, ref.owner

    def size(ref):
        return ctx.params[ref].gather_bytes

    made = buckets(refs, ctx, LIMIT, key)
    assert sorted(r.name for b in made for r in b) == sorted(r.name for r in refs)
    for bucket in made:
        assert len({key(ref) for ref in bucket}) == 1
        assert sum(map(size, bucket)) <= LIMIT or len(bucket) == 1
    large = [ref for ref in refs if size(ref) >= LIMIT]
    assert [b for b in made if b[0] in large] == [[ref] for ref in large]
    for k in {key(ref) for ref in refs}:
        shared = [b for b in made if key(b[0]) == k and b[0] not in large]
        assert [r for b in shared for r in b] == [r for r in refs if key(r) == k and r not in large]
        # None is closed before the next weight would have passed the limit.
        for one, following in itertools.pairwise(shared):
            assert sum(map(size, one)) + size(following[0]) > LIMIT


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_transfers_of_a_graph_mix_no_pools_and_no_dtypes(phase):
    """Of one layer: weights that stay and weights that are released, in memory and in files, summed in two dtypes."""
    names = [f"h__0__w{i}" for i in range(6)]
    b = Build(**{name: (4, 4) for name in names})
    x, outs = b.input("x", 3, 4), []
    for i, ref in enumerate(b.plans):
        own = {"kept": i == 1}
        own |= {"path": ("nvme",) * (i in (2, 3)), "grad_path": ("nvme",) * (i in (3, 4))}
        if i == 5:
            own["reduce_dtype"] = torch.float64
        b.plans[ref] = dataclasses.replace(b.plans[ref], **own)
        if phase == "forward":
            x = b.op(aten.mm.default, x, b.weight(ref.name))
        else:
            outs.append(b.reduced(ref.name, b.op(aten.mm.default, b.op(aten.t.default, x), x)))
    b.done(*(outs or [x]))
    target = ops.gather if phase == "forward" else ops.reduce
    moved = [
        [b.plans[ref] for ref in facts.params(node)]
        for node in lower(b, phase, "bucket-transfers").find_nodes(op="call_function", target=target)
    ]
    assert sum(map(len, moved)) == len(names)
    assert max(map(len, moved)) > 1
    for plans in moved:
        if phase == "forward":
            assert len({(p.gather_dtype, p.released, p.path) for p in plans}) == 1
        else:
            assert len({(p.reduce_dtype, p.grad_path) for p in plans}) == 1
