"""One gather per weight and one reduction per gradient: what the pass makes of a joint graph, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from expecttest import TestCase
from null.graphs import Build, aten, lower_joint, names_of, tied

from zero_compiler.errors import PassRefused
from zero_compiler.ir import dump
from zero_compiler.passes import (
    MergeMarkers,
)


class Goldens(TestCase):
    def test_merge_markers(self):
        b = tied()
        lower_joint(b, "merge-markers")
        self.assertExpectedInline(
            dump.text(b.graph),
            """\
%w.shard = input                                                         f32[2,4]                        +32  live 32
%x = input                                                               f32[3,4]                        +48  live 80
%tangents_1 = input                                                      f32[3,4]                        +48  live 128
%w_full = zero.unshard %w.shard [w]                                      f32[4,4]                        +64  live 160
%mm_default = aten.mm %x, %w_full                                        f32[3,4]                        +48  live 208
%mm_default_1 = aten.mm %mm_default, %w_full                             f32[3,4]                        +48  live 144
%t_default = aten.t %x                                                   f32[4,3]                             live 144
%mm_default_2 = aten.mm %t_default, %tangents_1                          f32[4,4]                        +64  live 208
%t_default_1 = aten.t %x                                                 f32[4,3]                             live 208
%mm_default_3 = aten.mm %t_default_1, %tangents_1                        f32[4,4]                        +64  live 176
%add_tensor_1 = aten.add.Tensor %mm_default_2, %mm_default_3             f32[4,4]                        +64  live 112
%reduce_grad_default_2 = zero.reduce_grad %add_tensor_1 [w]              f32[2,4]                        +32  live 80
return %mm_default_1, %reduce_grad_default_2
""",
        )


@pytest.mark.parametrize("adds", [1, 3])
def test_merge_markers_keeps_the_numbers(adds):
    b = tied(adds)
    want = b.by_markers(b.graph)
    lower_joint(b, "merge-markers")
    torch.testing.assert_close(b.by_markers(b.graph), want)


def test_sums_of_sums_become_one_reduction():
    b = Build(w=(4,))
    grads = [b.input(f"tangents_{i}", 4) for i in range(4)]
    r = [b.reduced("w", g) for g in grads]
    left, right = b.op(aten.add.Tensor, r[0], r[1]), b.op(aten.add.Tensor, r[3], r[2])
    b.done(b.op(aten.add.Tensor, left, right))
    want = b.by_markers(b.graph)
    lower_joint(b, "merge-markers")
    assert names_of(b.graph) == ["aten.add.Tensor"] * 3 + ["zero.reduce_grad"]
    torch.testing.assert_close(b.by_markers(b.graph), want)


def test_merge_refuses_a_weight_from_two_inputs():
    b = Build(w=(4, 4))
    other = b.input("other", 2, 4)
    first, second = b.weight("w"), b.weight("w")
    second.args = (other, *second.args[1:])
    b.done(b.op(aten.mm.default, first, second))
    with pytest.raises(
        PassRefused,
        match="weight 'w' is read from two different inputs, %w_shard and %other: the parameter was replaced between "
        "two forwards of one graph",
    ):
        MergeMarkers().run(b.graph, b.context("joint"))


@pytest.mark.parametrize("kind", ["returned apart", "multiplied", "scaled sum"])
def test_merge_refuses_what_is_no_sum(kind):
    b = Build(w=(4,))
    t = b.input("tangents_1", 4)
    one, two = b.reduced("w", t), b.reduced("w", b.op(aten.neg.default, t))
    if kind == "returned apart":
        b.done(one, two)
    elif kind == "multiplied":
        b.done(b.op(aten.mul.Tensor, one, two))
    else:
        b.done(b.op(aten.add.Tensor, one, two, alpha=2))
    with pytest.raises(
        PassRefused, match="the gradient of 'w' is reduced 2 times and the results are not only summed"
    ):
        MergeMarkers().run(b.graph, b.context("joint"))
