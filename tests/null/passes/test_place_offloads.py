"""Tensors that wait on another tier leave and come back where segments end."""

from __future__ import annotations

import pytest
from expecttest import TestCase
from null.offloaded import placed

from zero_compiler.ir import dump

pytestmark = pytest.mark.slow


class Goldens(TestCase):
    def test_place_offloads(self):
        forward, backward = placed(("nvme",))
        self.assertExpectedInline(
            dump.text(forward.graph),
            """\
%w1_shard = input                                                        f32[4,1024]                  +16384  live 0
%w2_shard = input                                                        f32[2,8]                        +64  live 64
%primals_1 = input                                                       f32[256,1024]              +1048576  live 1048640
%w1..w2.full = zero.gather [w1, w2]                                      (f32[8,1024], f32[4,8])      +32896  live 1081536
%w1, %w2 = zero.wait %w1..w2.full                                        (f32[8,1024], f32[4,8])              live 1081536
%t_default = aten.t %w1                                                  f32[1024,8]                          live 1081536
%mm_default = aten.mm %primals_1, %t_default                             f32[256,8]                    +8192  live 41152
%tanh_default = aten.tanh %mm_default                                    f32[256,8]                    +8192  live 41152
%t_default_1 = aten.t %w2                                                f32[8,4]                             live 41152
%mm_default_1 = aten.mm %tanh_default, %t_default_1                      f32[256,4]                    +4096  live 12352
%offload_default = zero.offload %tanh_default [tanh_default]             i64[1]                               live 4160
                     zero.offloaded %offload_default                                                          live 4160
return %mm_default_1, %w2_shard, %offload_default
""",
        )
        self.assertExpectedInline(
            dump.text(backward.graph),
            """\
%w2_shard = input                                                        f32[2,8]                        +64  live 0
%ticket_tanh_default = input                                             i64[1]                           +8  live 8
%tangents_1 = input                                                      f32[256,4]                    +4096  live 4104
%restore_default = zero.restore %ticket_tanh_default [tanh_default]      f32[256,8]                    +8192  live 12288
%w2.full = zero.gather [w2]                                              (f32[4,8])                     +128  live 12416
%w2 = zero.wait %w2.full                                                 (f32[4,8])                           live 12416
%restored_default = zero.restored %restore_default                       f32[256,8]                           live 12416
%mm_default = aten.mm %tangents_1, %w2                                   f32[256,8]                    +8192  live 16384
%tanh_backward_default = aten.tanh_backward %mm_default, %restored_default f32[256,8]                    +8192  live 16384
                   zero.discard %restored_default                                                             live 8192
return %tanh_backward_default
""",
        )
