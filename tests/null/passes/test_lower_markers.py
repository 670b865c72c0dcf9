"""Markers become transfers, each with its wait."""

from __future__ import annotations

from expecttest import TestCase
from null.graphs import (
    lower,
    two_layers_backward,
)

from zero_compiler.ir import dump


class Goldens(TestCase):
    def test_lower_markers(self):
        self.assertExpectedInline(
            dump.text(lower(two_layers_backward(), "backward", "lower-markers")),
            """\
%h__0__w_shard = input                                                   f32[2,4]                        +32  live 0
%h__0__b_shard = input                                                   f32[2]                           +8  live 0
%h__1__w_shard = input                                                   f32[3,4]                        +48  live 0
%x = input                                                               f32[3,4]                        +48  live 48
%act = input                                                             f32[3,4]                        +48  live 96
%tangents_1 = input                                                      f32[3,5]                        +60  live 156
%h.1.w.full = zero.gather [h.1.w]                                        (f32[5,4])                      +80  live 236
%h.1.w = zero.wait %h.1.w.full                                           (f32[5,4])                           live 236
%t_default = aten.t %tangents_1                                          f32[5,3]                             live 236
%mm_default = aten.mm %t_default, %act                                   f32[5,4]                        +80  live 268
%mm_default_1 = aten.mm %tangents_1, %h.1.w                              f32[3,4]                        +48  live 176
%t_default_1 = aten.t %mm_default_1                                      f32[4,3]                             live 176
%mm_default_2 = aten.mm %t_default_1, %x                                 f32[4,4]                        +64  live 192
%sum_dim_int_list = aten.sum.dim_IntList %mm_default_1, [0]              f32[4]                          +16  live 160
%h.0.w.sum = zero.reduce %mm_default_2                                   (f32[2,4])                      +32  live 128
%h.0.w.grad = zero.wait %h.0.w.sum                                       (f32[2,4])                           live 128
%h.0.b.sum = zero.reduce %sum_dim_int_list                               (f32[2])                         +8  live 120
%h.0.b.grad = zero.wait %h.0.b.sum                                       (f32[2])                             live 120
%h.1.w.sum = zero.reduce %mm_default                                     (f32[3,4])                      +48  live 88
%h.1.w.grad = zero.wait %h.1.w.sum                                       (f32[3,4])                           live 88
return %h.0.w.grad, %h.0.b.grad, %h.1.w.grad
""",
        )
