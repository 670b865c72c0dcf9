"""Inputs that forward writes to: backward is given a copy of the old value."""

from __future__ import annotations

from expecttest import TestCase
from null.graphs import (
    Build,
    aten,
)

from zero_compiler.ir import dump, ops
from zero_compiler.passes import KeepOldValues


class Goldens(TestCase):
    def test_keep_old_values(self):
        b = Build(w=(4, 4))
        steps, mean, x, tangent = (
            b.input("steps"),
            b.input("mean"),
            b.input("x", 4, 4),
            b.input("tangents_1", 4, 4),
        )
        more = b.op(aten.add.Tensor, steps, 1)
        other = b.op(aten.mul.Tensor, mean, 2)  # nothing of it is needed in backward
        y = b.op(aten.mul.Tensor, b.op(aten.mm.default, x, b.weight("w")), more)
        grad = b.op(aten.mm.default, b.op(aten.t.default, x), b.op(aten.mul.Tensor, tangent, more))
        reduced = b.reduced("w", grad)
        b.op(aten.copy_.default, steps, more)
        b.op(aten.copy_.default, mean, other)
        b.done(y, reduced)
        KeepOldValues().run(b.graph, b.context("joint"))
        rows = [f"%{n.name} = {dump.target_text(n)} {', '.join(map(str, n.args))}" for n in b.graph.nodes if n.op == "call_function" and n.target is not ops.unshard]  # fmt: skip
        self.assertExpectedInline(
            "\n".join(rows),
            """\
%clone_default = aten.clone steps
%add_tensor = aten.add.Tensor clone_default, 1
%mul_tensor = aten.mul.Tensor mean, 2
%mm_default = aten.mm x, w_full
%mul_tensor_1 = aten.mul.Tensor mm_default, add_tensor
%t_default = aten.t x
%mul_tensor_2 = aten.mul.Tensor tangents_1, add_tensor
%mm_default_1 = aten.mm t_default, mul_tensor_2
%reduce_grad_default = zero.reduce_grad mm_default_1, [2, 4], torch.float32, m, w
%copy__default = aten.copy_ steps, add_tensor
%copy__default_1 = aten.copy_ mean, mul_tensor""",
        )
        (clone,) = b.graph.find_nodes(op="call_function", target=aten.clone.default)
        assert clone.meta["recompute"].name == "MUST_SAVE"
