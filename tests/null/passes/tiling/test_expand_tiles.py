"""What is done tile by tile becomes its tiles, as many as are cheap and none of them empty."""

from __future__ import annotations

import pytest
from expecttest import TestCase
from null.graphs import Build, head_graph, lower, lower_joint

from zero_compiler.ir import dump
from zero_compiler.passes.tiling.expand_tiles import tiles_of


class Goldens(TestCase):
    def test_expand_tiles(self):
        b = tiled_head(60)
        # What precedes the tiles, and the first of two.
        text = dump.text(lower(b, "forward", "expand-tiles")).splitlines()[6:30]
        self.assertExpectedInline(
            "\n".join(text),
            """\
%t_default = aten.t %w                                                   f32[4,5]                             live 184
%cut_default = zero.cut                                                                                       live 184
%split_tensor = aten.split.Tensor %x, 3, 0                               (f32[3,4], f32[3,4])                 live 184
%getitem_7 = getitem %split_tensor, 0                                    f32[3,4]                             live 184
%getitem_8 = getitem %split_tensor, 1                                    f32[3,4]                             live 184
%full_default_1 = aten.full [], 0, dtype=float32, device=cpu             f32[]                            +4  live 188
%empty_memory_format = aten.empty.memory_format [6, 4], dtype=float32, device=cpu f32[6,4]                        +96  live 284
%full_default_2 = aten.full [5, 4], 0, dtype=float32, device=cpu         f32[5,4]                        +80  live 364
%split_tensor_1 = aten.split.Tensor %empty_memory_format, 3, 0           (f32[3,4], f32[3,4])                 live 364
%getitem_9 = getitem %split_tensor_1, 0                                  f32[3,4]                             live 364
%getitem_10 = getitem %split_tensor_1, 1                                 f32[3,4]                             live 364
%cut_default_1 = zero.cut                                                                                     live 364
%mm_default_3 = aten.mm %getitem_7, %t_default                           f32[3,5]                        +60  live 424
%logsumexp_default_1 = aten.logsumexp %mm_default_3, [1]                 f32[3]                          +12  live 436
%sum_default_1 = aten.sum %logsumexp_default_1                           f32[]                            +4  live 440
%expand_default_1 = aten.expand %full_default, [3]                       f32[3]                               live 440
%unsqueeze_default_2 = aten.unsqueeze %expand_default_1, 1               f32[3,1]                             live 440
%unsqueeze_default_3 = aten.unsqueeze %logsumexp_default_1, 1            f32[3,1]                             live 440
%sub_tensor_1 = aten.sub.Tensor %mm_default_3, %unsqueeze_default_3      f32[3,5]                        +60  live 428
%exp_default_1 = aten.exp %sub_tensor_1                                  f32[3,5]                        +60  live 428
%mul_tensor_3 = aten.mul.Tensor %unsqueeze_default_2, %exp_default_1     f32[3,5]                        +60  live 428
%mm_default_4 = aten.mm %mul_tensor_3, %w                                f32[3,4]                        +48  live 476
%t_default_2 = aten.t %mul_tensor_3                                      f32[5,3]                             live 476
%cut_default_2 = zero.cut                                                                                     live 476""",
        )


def tiled_head(tile_bytes: int) -> Build:
    b = head_graph()
    lower_joint(b, "tag-recompute", tile_bytes=tile_bytes)
    return b


@pytest.mark.parametrize(
    ("total", "rows", "tiles"),
    [(16, 4, 4), (16, 5, 4), (16, 100, 1), (15, 4, 5), (17, 4, 5), (7, 1, 7), (5, 4, 2)],
)
def test_tiles_are_equal_where_that_is_cheap_and_never_empty(total, rows, tiles):
    assert tiles_of(total, rows) == tiles
    size = -(-total // tiles)
    assert size <= rows
    assert size * (tiles - 1) < total
