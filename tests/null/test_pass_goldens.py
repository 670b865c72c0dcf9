"""Each pass: a golden graph before or after it."""

from __future__ import annotations

from expecttest import TestCase
from null import test_activations, test_offload_activations, test_partition_activations, test_tile_mlp
from null.graphs import (
    OWNER,
    Build,
    aten,
    head_graph,
    lower,
    lower_joint,
    tied,
    two_layers,
    two_layers_backward,
)
from null.test_land_products import gradients
from null.test_pick_kernels import ON as FASTER_ONEDNN
from null.test_pick_kernels import three_products

from zero_compiler import passes
from zero_compiler.ir import dump, ops
from zero_compiler.passes import SPLIT, KeepOldValues, TagRecompute, joint_passes, phase_passes


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

    def test_tag_recompute(self):
        b = two_layers()
        TagRecompute(1 << 20).run(b.graph, b.context("joint"))
        rows = [
            f"{n.name}: {n.meta['recompute'].name}" if "recompute" in n.meta else f"{n.name}: -"
            for n in b.graph.nodes
            if n.op == "call_function"
        ]
        self.assertExpectedInline(
            "\n".join(rows),
            """\
h_0_b_full: MUST_RECOMPUTE
h_0_w_full: MUST_RECOMPUTE
t_default: MUST_RECOMPUTE
addmm_default: MUST_SAVE
relu_default: -
h_1_w_full: MUST_RECOMPUTE
t_default_1: MUST_RECOMPUTE
mm_default: MUST_SAVE""",
        )

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


def tiled_head(tile_bytes: int) -> Build:
    b = head_graph()
    lower_joint(b, "tag-recompute", tile_bytes=tile_bytes)
    return b


class Tiles(TestCase):
    def test_tile_loss(self):
        self.assertExpectedInline(
            dump.text(tiled_head(40).graph),
            """\
%w.shard = input                                                         f32[3,4]                        +48  live 48
%x = input                                                               f32[6,4]                        +96  live 144
%tangents_1 = input                                                      f32[]                            +4  live 148
%w_full = zero.unshard %w.shard [w]                                      f32[5,4]                        +80  live 180
%t_default = aten.t %w_full                                              f32[4,5]                             live 180
%full_default = aten.full [], 1, dtype=float32, device=cpu               f32[]                            +4  live 184
%tiled_default = zero.tiled [%x, %w_full, %full_default, %t_default], 'loss0' (f32[], f32[6,4], f32[5,4])       +180  live 184
%getitem = getitem %tiled_default, 0                                     f32[]                                live 184
%getitem_1 = getitem %tiled_default, 1                                   f32[6,4]                             live 184
%getitem_2 = getitem %tiled_default, 2                                   f32[5,4]                             live 184
%mul_tensor_2 = aten.mul.Tensor %getitem_2, %tangents_1                  f32[5,4]                        +80  live 264
%reduce_grad_default = zero.reduce_grad %mul_tensor_2 [w]                f32[3,4]                        +48  live 232
%mul_tensor_1 = aten.mul.Tensor %getitem_1, %tangents_1                  f32[6,4]                        +96  live 324
return %getitem, %mul_tensor_1, %reduce_grad_default
""",
        )

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

    def test_tile_operators(self):
        b = Build(world=2, tile_rows={"w": 1}, w=(4, 3))
        x = b.input("x", 2, 3)
        b.done(b.op(aten.mm.default, x, b.op(aten.t.default, b.weight("w"))))
        self.assertExpectedInline(
            dump.text(lower(b, "forward", "tile-operators")),
            """\
%w_shard = input                                                         f32[2,3]                        +24  live 0
%x = input                                                               f32[2,3]                        +24  live 24
%cut_default = zero.cut                                                                                       live 24
%empty_memory_format = aten.empty.memory_format [2, 4], dtype=float32, device=cpu f32[2,4]                        +32  live 56
%view_default = aten.view %empty_memory_format, [2, 2, 2]                f32[2,2,2]                           live 56
%split_tensor = aten.split.Tensor %view_default, 1, 2                    (f32[2,2,1], f32[2,2,1])             live 56
%getitem_1 = getitem %split_tensor, 0                                    f32[2,2,1]                           live 56
%getitem_2 = getitem %split_tensor, 1                                    f32[2,2,1]                           live 56
%w.full = zero.gather [w] tile 1 of 2                                    (f32[2,3])                      +24  live 80
%w = zero.wait %w.full                                                   (f32[2,3])                           live 80
%t_default_1 = aten.t %w                                                 f32[3,2]                             live 80
%mm_default_1 = aten.mm %x, %t_default_1                                 f32[2,2]                        +16  live 72
%cut_default_1 = zero.cut                                                                                     live 72
%view_default_1 = aten.view %mm_default_1, [2, 2, 1]                     f32[2,2,1]                           live 72
%copy__default = aten.copy_ %getitem_1, %view_default_1                  f32[2,2,1]                           live 56
%cut_default_2 = zero.cut                                                                                     live 56
%w.full_2 = zero.gather [w] tile 2 of 2                                  (f32[2,3])                      +24  live 80
%w_2 = zero.wait %w.full_2                                               (f32[2,3])                           live 80
%t_default_2 = aten.t %w_2                                               f32[3,2]                             live 80
%mm_default_2 = aten.mm %x, %t_default_2                                 f32[2,2]                        +16  live 48
%cut_default_3 = zero.cut                                                                                     live 48
%view_default_2 = aten.view %mm_default_2, [2, 2, 1]                     f32[2,2,1]                           live 48
%copy__default_1 = aten.copy_ %getitem_2, %view_default_2                f32[2,2,1]                           live 32
%cut_default_4 = zero.cut                                                                                     live 32
%cut_default_5 = zero.cut                                                                                     live 32
return %empty_memory_format
""",
        )


class Kernels(TestCase):
    def test_land_products(self):
        graph = lower(gradients(), "backward", "land-products")
        text = dump.text(graph)
        self.assertExpectedInline(
            text[text.index("%g = input") :],
            """\
%g = input                                                               f32[4,512]                    +8192  live 16384
%t_default = aten.t %g                                                   f32[512,4]                           live 16384
%land_mm_default = zero.land_mm %t_default, %x, 'm'                      f32[512,512]               +1048576  live 1064960
%t_default_1 = aten.t %x                                                 f32[512,4]                           live 1064960
%land_mm_default_1 = zero.land_mm %t_default_1, %g, 'm'                  f32[512,512]               +1048576  live 2105344
%t_default_2 = aten.t %land_mm_default_1                                 f32[512,512]                         live 2105344
%t_default_3 = aten.t %t_default_2                                       f32[512,512]                         live 2105344
%sum_dim_int_list = aten.sum.dim_IntList %g, [0]                         f32[512]                      +2048  live 2099200
%b.sum = zero.reduce %sum_dim_int_list                                   (f32[512])                    +2048  live 2099200
%v.sum = zero.reduce %land_mm_default                                    (f32[512,512])             +1048576  live 2099200
%w.sum = zero.reduce %t_default_3                                        (f32[512,512])             +1048576  live 2099200
%b.grad = zero.wait %b.sum                                               (f32[512])                           live 2099200
%v.grad = zero.wait %v.sum                                               (f32[512,512])                       live 2099200
%w.grad = zero.wait %w.sum                                               (f32[512,512])                       live 2099200
return %b.grad, %v.grad, %w.grad
""",
        )

    def test_pick_kernels(self):
        b = three_products()
        graph = lower(b, "forward", "pick-kernels", **FASTER_ONEDNN)
        text = dump.text(graph)
        self.assertExpectedInline(
            text[text.index("%permute") :],
            """\
%permute_default_1 = aten.permute %onednn_linear_default, [1, 0]         f32[16,16]                           live 2240
%onednn_linear_default_1 = zero.onednn_linear %t_default, %permute_default_1, None f32[16,16]                    +1024  live 3264
%mm_default_1 = aten.mm %onednn_linear_default, %w                       f32[16,2]                      +128  live 1152
return %onednn_linear_default_1, %mm_default_1
""",
        )


def test_every_pass_has_a_golden():
    tested = {
        name.removeprefix("test_").replace("_", "-")
        for cls in (
            Goldens,
            Tiles,
            Kernels,
            test_activations.Goldens,
            test_offload_activations.Goldens,
            test_tile_mlp.Goldens,
        )
        for name in vars(cls)
        if name.startswith("test_")
    }
    assert {p.name for p, _ in (*joint_passes(), *phase_passes())} <= tested
    # Of passes over a partition: both graphs, and all that happens to what is handed over.
    assert SPLIT == [passes.OffloadActivations, passes.PartitionActivations]
    assert hasattr(test_offload_activations.Goldens, "test_place_offloads")
    assert hasattr(test_partition_activations, "test_the_graphs_before_and_after")
