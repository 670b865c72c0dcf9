"""Each pass: a golden graph, its numbers on N simulated ranks, and what it refuses."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
from expecttest import TestCase
from null import test_activations, test_offload_activations, test_partition_activations, test_tile_mlp
from null.graphs import OWNER, Build, aten, check_numbers, head_graph, lower, names_of
from null.test_pick_kernels import ON as FASTER_ONEDNN
from null.test_pick_kernels import three_products

from zero_compiler import passes
from zero_compiler.errors import PassRefused, VerifyError
from zero_compiler.ir import dump, facts, ops, spec
from zero_compiler.ir.facts import ParamRef
from zero_compiler.passes import (
    INFERENCE,
    JOINT,
    PHASE,
    SPLIT,
    KeepOldValues,
    MergeMarkers,
    TagRecompute,
    assign_units,
    gathered_in_backward,
    order_of_use,
    run_passes,
    run_split,
)


def two_layers(**kw) -> Build:
    """Forward of two layers; the first has a bias."""
    b = Build(h__0__w=(4, 4), h__0__b=(4,), h__1__w=(5, 4), **kw)
    x = b.input("x", 3, 4)
    first = b.op(aten.addmm.default, b.weight("h.0.b"), x, b.op(aten.t.default, b.weight("h.0.w")))
    act = b.op(aten.relu.default, first)
    out = b.op(aten.mm.default, act, b.op(aten.t.default, b.weight("h.1.w")))
    b.done(out, act)
    return b


def two_layers_backward(**kw) -> Build:
    """Backward of two layers: activations and tangents come in, gradients go out."""
    b = Build(h__0__w=(4, 4), h__0__b=(4,), h__1__w=(5, 4), **kw)
    x, act, tangent = b.input("x", 3, 4), b.input("act", 3, 4), b.input("tangents_1", 3, 5)
    w1 = b.weight("h.1.w")
    grad1 = b.op(aten.mm.default, b.op(aten.t.default, tangent), act)
    back = b.op(aten.mm.default, tangent, w1)
    grad0 = b.op(aten.mm.default, b.op(aten.t.default, back), x)
    bias0 = b.op(aten.sum.dim_IntList, back, [0])
    b.done(b.reduced("h.0.w", grad0), b.reduced("h.0.b", bias0), b.reduced("h.1.w", grad1))
    return b


def tied(adds: int = 1) -> Build:
    """A weight read twice, with a gradient for each use that are summed afterwards."""
    b = Build(w=(4, 4))
    x, tangent = b.input("x", 3, 4), b.input("tangents_1", 3, 4)
    first, second = b.weight("w"), b.weight("w")
    y = b.op(aten.mm.default, b.op(aten.mm.default, x, first), second)
    grads = [b.op(aten.mm.default, b.op(aten.t.default, x), tangent) for _ in range(adds + 1)]
    total = b.reduced("w", grads[0])
    for g in grads[1:]:
        total = b.op(aten.add.Tensor, total, b.reduced("w", g))
    b.done(y, total)
    return b


class Goldens(TestCase):
    def test_merge_markers(self):
        b = tied()
        run_passes(b.graph, JOINT[:1], b.context("joint"))
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
        TagRecompute().run(b.graph, b.context("joint"))
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
    run_passes(b.graph, JOINT[:-1], b.context("joint", tile_bytes=tile_bytes))
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
    assert {p.name for p, _ in (*JOINT, *PHASE)} <= tested
    # Of passes over a partition: both graphs, and all that happens to what is handed over.
    assert SPLIT == [passes.OffloadActivations, passes.PartitionActivations]
    assert hasattr(test_offload_activations.Goldens, "test_place_offloads")
    assert hasattr(test_partition_activations, "test_the_graphs_before_and_after")


def test_every_pass_stands_on_the_screen():
    """No pass runs beside the managers, which verify, time and dump."""
    every = {
        c
        for n in passes.__all__
        if hasattr(c := getattr(passes, n), "run") and not vars(c).get("_is_protocol")
    }
    assert every == {*(type(p) for p, _ in (*JOINT, *INFERENCE, *PHASE)), *SPLIT}


class Careless:
    """Hands over something else than backward takes."""

    name = "careless"

    def run(self, forward, backward, num_outputs, ctx):
        (output,) = forward.find_nodes(op="output")
        output.args = ((output.args[0][0], *reversed(output.args[0][1:])),)


def test_a_careless_pass_over_a_partition_is_caught(tmp_path):
    b, back = Build(), Build()
    x, y = b.input("x", 3, 4), b.input("y", 4)
    b.done(x, x, y)
    back.done(back.input("x", 3, 4), back.input("y", 4))
    trace = passes.Trace()
    with pytest.raises(VerifyError, match="is saved for backward as"):
        run_split(Careless(), b.graph, back.graph, 1, b.context("joint"), trace, str(tmp_path))
    run_split(Careless(), b.graph, back.graph, 1, b.context("joint"), trace, str(tmp_path))  # and back again
    assert [row[0] for row in trace.rows] == ["split/careless"]
    assert sorted(p.name for p in (tmp_path / "careless").iterdir()) == ["00-forward.txt", "01-backward.txt"]


def test_every_pass_says_what_it_refuses():
    every = [
        c
        for name in passes.__all__
        if hasattr(c := getattr(passes, name), "run") and c not in (passes.Pass, passes.SplitPass)
    ]
    assert {type(p) for p, _ in (*JOINT, *PHASE)} <= set(every)
    assert [c.__name__ for c in every if "    Refuses: " not in c.__doc__] == []


# Numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_bytes", [0, 70, 1 << 20])
@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 3), (3, 3), (4, 2), (2, 0)])
def test_passes_of_a_phase_keep_the_numbers(world, stage, bucket_bytes):
    check_numbers(two_layers(world=world, stage=stage), "forward", bucket_bytes=bucket_bytes)
    check_numbers(two_layers_backward(world=world, stage=stage), "backward", bucket_bytes=bucket_bytes)


@pytest.mark.parametrize("adds", [1, 3])
def test_merge_markers_keeps_the_numbers(adds):
    b = tied(adds)
    want = b.by_markers(b.graph)
    run_passes(b.graph, JOINT[:1], b.context("joint"))
    torch.testing.assert_close(b.by_markers(b.graph), want)


def test_sums_of_sums_become_one_reduction():
    b = Build(w=(4,))
    grads = [b.input(f"tangents_{i}", 4) for i in range(4)]
    r = [b.reduced("w", g) for g in grads]
    left, right = b.op(aten.add.Tensor, r[0], r[1]), b.op(aten.add.Tensor, r[3], r[2])
    b.done(b.op(aten.add.Tensor, left, right))
    want = b.by_markers(b.graph)
    run_passes(b.graph, JOINT[:1], b.context("joint"))
    assert names_of(b.graph) == ["aten.add.Tensor"] * 3 + ["zero.reduce_grad"]
    torch.testing.assert_close(b.by_markers(b.graph), want)


@pytest.mark.parametrize("distance", [1, 2, 3])
def test_starts_further_ahead_keep_the_numbers(distance):
    ahead = {f"{OWNER}:h.{i}": distance for i in range(2)}
    check_numbers(two_layers(), "forward", bucket_bytes=20, distances=ahead)
    check_numbers(two_layers_backward(), "backward", bucket_bytes=20, distances=ahead)


def test_a_view_that_leaves_is_a_copy():
    b = Build(w=(4, 4))
    x = b.input("x", 3, 4)
    w = b.weight("w")
    b.done(b.op(aten.mm.default, x, w), b.op(aten.t.default, w), w)
    check_numbers(b, "forward")
    notes = [facts.note(n) for n in b.graph.nodes if facts.note(n)]
    assert notes == ["a view of a gathered weight leaves the program: copied"] * 2


def test_a_frozen_weight_gets_no_reduction():
    b = Build(w=(4, 4), frozen=(4, 4))
    act, tangent = b.input("act", 3, 4), b.input("tangents_1", 3, 4)
    back = b.op(aten.mm.default, tangent, b.weight("frozen"))
    b.done(b.reduced("w", b.op(aten.mm.default, b.op(aten.t.default, act), back)), None)
    program, _ = b.program(lower(b, "backward"), "backward")
    assert [r.names for r in program.reduces] == [("w",)]
    assert [g.names for g in program.gathers] == [("frozen",)]


# Order -----------------------------------------------------------------------------------------------------


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


# Refusals --------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("part", ["run", "lint", "verify"])
def test_the_time_of_a_pass_has_its_checks_in_it(monkeypatch, part):
    b = two_layers()
    (one, level) = JOINT[0]
    now = [0.0]
    spend = lambda *_: now.__setitem__(0, now[0] + 2.0)  # noqa: E731
    monkeypatch.setattr("zero_compiler.passes.base.time.perf_counter", lambda: now[0])
    where = {"run": type(one), "lint": torch.fx.Graph, "verify": spec}[part]
    monkeypatch.setattr(where, part, spend)
    trace = run_passes(b.graph, [(one, level)], b.context("joint"))
    assert trace.seconds == 2.0


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
