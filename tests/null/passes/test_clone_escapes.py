"""Views of gathered weights that leave a Program are copied."""

from __future__ import annotations

from expecttest import TestCase
from null.graphs import (
    Build,
    aten,
    check_numbers,
    lower,
)

from zero_compiler.ir import dump, facts


class Goldens(TestCase):
    def test_clone_escapes(self):
        b = Build(w=(4, 4))
        x = b.input("x", 3, 4)
        w = b.weight("w")
        view = b.op(aten.slice.Tensor, w, 0, 0, 2)
        b.done(b.op(aten.mm.default, x, w), view)
        self.assertExpectedInline(
            dump.text(lower(b, "forward", "clone-escapes")),
            """\
%w_shard = input                                                         f32[2,4]                        +32  live 0
%x = input                                                               f32[3,4]                        +48  live 48
%w.full = zero.gather [w]                                                (f32[4,4])                      +64  live 112
%w = zero.wait %w.full                                                   (f32[4,4])                           live 112
%slice_tensor = aten.slice.Tensor %w, 0, 0, 2                            f32[2,4]                             live 112
%mm_default = aten.mm %x, %w                                             f32[3,4]                        +48  live 112
%clone_default = aten.clone %slice_tensor, memory_format=torch.preserve_format f32[2,4]                        +32  live 80
return %mm_default, %clone_default
""",
        )


def test_a_view_that_leaves_is_a_copy():
    b = Build(w=(4, 4))
    x = b.input("x", 3, 4)
    w = b.weight("w")
    b.done(b.op(aten.mm.default, x, w), b.op(aten.t.default, w), w)
    check_numbers(b, "forward")
    notes = [facts.note(n) for n in b.graph.nodes if facts.note(n)]
    assert notes == ["a view of a gathered weight leaves the program: copied"] * 2
