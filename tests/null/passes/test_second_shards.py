"""Second shards: forward keeps a part of each weight on every rank of a host, and backward gathers these alone."""

from __future__ import annotations

import pytest
import torch
from expecttest import TestCase
from marks import slow
from null.graphs import OWNER, Build, aten, lower, names_of, two_layers, two_layers_backward

from zero_compiler.errors import TransferError
from zero_compiler.ir import dump, ops
from zero_compiler.ir.facts import ParamRef
from zero_compiler.passes import second_sharded

NAMES = ("h.0.w", "h.0.b", "h.1.w")
REFS = tuple(ParamRef(OWNER, name) for name in NAMES)


def forward(second_of=frozenset(REFS), **fields):
    b = two_layers(**({"world": 4, "second": 2} | fields))
    return b, lower(b, "forward", bucket_bytes=0, second=second_of)


def backward(second_of=frozenset(REFS), **fields):
    b = two_layers_backward(**({"world": 4, "second": 2} | fields))
    return b, lower(b, "backward", bucket_bytes=0, reads=REFS, second=second_of)


class Goldens(TestCase):
    def test_second_shards(self):
        _, graph = forward(frozenset(REFS[2:]))
        self.assertExpectedInline(
            dump.text(graph),
            """\
%h__0__w_shard = input                                                   f32[1,4]                        +16  live 0
%h__0__b_shard = input                                                   f32[1]                           +4  live 0
%h__1__w_shard = input                                                   f32[2,4]                        +32  live 0
%x = input                                                               f32[3,4]                        +48  live 48
%h.0.b.full = zero.gather [h.0.b]                                        (f32[4])                        +16  live 64
%h.0.w.full = zero.gather [h.0.w]                                        (f32[4,4])                      +64  live 128
%h.0.b = zero.wait %h.0.b.full                                           (f32[4])                             live 128
%h.0.w = zero.wait %h.0.w.full                                           (f32[4,4])                           live 128
%h.1.w.full = zero.gather [h.1.w]                                        (f32[5,4])                      +80  live 208
%t_default = aten.t %h.0.w                                               f32[4,4]                             live 208
%addmm_default = aten.addmm %h.0.b, %x, %t_default                       f32[3,4]                        +48  live 208
%relu_default = aten.relu %addmm_default                                 f32[3,4]                        +48  live 208
zero.release %h.0.b                                                                                      -16  live 192
zero.release %h.0.w                                                                                      -64  live 128
%h.1.w = zero.wait %h.1.w.full                                           (f32[5,4])                           live 128
%t_default_1 = aten.t %h.1.w                                             f32[4,5]                             live 128
%mm_default = aten.mm %relu_default, %t_default_1                        f32[3,5]                        +60  live 188
zero.keep_part %h.1.w                                                                                         live 188
zero.release %h.1.w                                                                                      -80  live 108
return %mm_default, %relu_default
""",
        )

    def test_backward_gathers_them_within_the_host(self):
        _, graph = backward()
        self.assertExpectedInline(
            dump.text(graph),
            """\
%h__0__w_shard = input                                                   f32[1,4]                        +16  live 0
%h__0__b_shard = input                                                   f32[1]                           +4  live 0
%h__1__w_shard = input                                                   f32[2,4]                        +32  live 0
%x = input                                                               f32[3,4]                        +48  live 48
%act = input                                                             f32[3,4]                        +48  live 96
%tangents_1 = input                                                      f32[3,5]                        +60  live 156
%h.1.w.full = zero.gather [h.1.w] over host                              (f32[5,4])                      +80  live 236
%t_default = aten.t %tangents_1                                          f32[5,3]                             live 236
%mm_default = aten.mm %t_default, %act                                   f32[5,4]                        +80  live 268
%h.1.w.sum = zero.reduce %mm_default                                     (f32[2,4])                      +32  live 220
%h.1.w = zero.wait %h.1.w.full                                           (f32[5,4])                           live 220
%mm_default_1 = aten.mm %tangents_1, %h.1.w                              f32[3,4]                        +48  live 208
%t_default_1 = aten.t %mm_default_1                                      f32[4,3]                             live 208
%mm_default_2 = aten.mm %t_default_1, %x                                 f32[4,4]                        +64  live 224
%sum_dim_int_list = aten.sum.dim_IntList %mm_default_1, [0]              f32[4]                          +16  live 192
zero.release %h.1.w                                                                                      -80  live 112
%h.0.w.sum = zero.reduce %mm_default_2                                   (f32[1,4])                      +16  live 64
%h.0.b.sum = zero.reduce %sum_dim_int_list                               (f32[1])                         +4  live 52
%h.1.w.grad = zero.wait %h.1.w.sum                                       (f32[2,4])                           live 52
%h.0.w.grad = zero.wait %h.0.w.sum                                       (f32[1,4])                           live 52
%h.0.b.grad = zero.wait %h.0.b.sum                                       (f32[1])                             live 52
return %h.0.w.grad, %h.0.b.grad, %h.1.w.grad
""",
        )


def test_a_program_says_how_much_stays_and_what_is_gathered_within_the_host():
    (b, graph), (c, back) = forward(), backward()
    program = b.program(graph, "forward")[0]
    assert (
        "keep part       h.1.w, 48 bytes a rank" in program.text()
    )  # three of five rows of four, padded to six
    assert "of which 12 stay for backward on 2 ranks of a host" in program.collectives()
    later = c.program(back, "backward")[0]
    assert "gather          h.1.w float32[5, 4] within 2 ranks of a host" in later.text()
    assert "12 elements a rank within 2 ranks of a host" in later.collectives()


# Of 4 ranks on 2 hosts, whose chunks of five rows have padding; of 6 ranks on 2 hosts; in tiles.
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"world": 6, "second": 3},
        *slow(
            {"world": 6, "second": 2},
            {"tile_rows": {"h__1__w": 1}},
            {"world": 2, "second": 1, "tile_rows": {"h__1__w": 2, "h__0__w": 1}},
        ),
    ],
    ids=str,
)
def test_backward_has_the_weights_that_forward_had(fields):
    plain = {k: v for k, v in fields.items() if k != "second"} | {"second": 0}
    (b, graph), (c, back) = forward(**fields), backward(**fields)
    ranks = b.ranks()
    b.by_reference(graph, "forward", ranks)
    for rank in ranks:  # what rests is read by no gather of backward
        for chunk in rank.chunks.values():
            chunk.fill_(torch.nan)
    want = backward(**plain)
    assert names_of(back) == names_of(want[1])
    torch.testing.assert_close(
        c.by_reference(back, "backward", ranks), want[0].by_reference(want[1], "backward"), rtol=0, atol=0
    )


def test_backward_takes_tiles_of_what_forward_gathered_whole():
    """Of a weight in tiles that forward reads by an operator which is not done in tiles."""
    fields = {"world": 4, "second": 2, "tile_rows": {"h__1__w": 1}}
    b = Build(h__0__w=(4, 4), h__0__b=(4,), h__1__w=(5, 4), **fields)
    x = b.input("x", 3, 4)
    b.done(b.op(aten.mm.default, x, b.op(aten.t.default, b.op(aten.sin.default, b.weight("h.1.w")))))
    graph = lower(b, "forward", bucket_bytes=0, second=frozenset(REFS))
    (g,) = b.program(graph, "forward")[0].gathers
    assert (g.tile, g.parts, g.part_tiles) == (
        None,
        (16,),
        (4,),
    )  # four rows of two ranks' chunks, one row in a tile
    ranks = b.ranks()
    b.by_reference(graph, "forward", ranks)
    (c, back), (d, want) = backward(**fields), backward(**(fields | {"second": 0}))
    tiles = c.program(back, "backward")[0].gathers
    assert [g.from_second for g in tiles] == [True, True]
    torch.testing.assert_close(
        c.by_reference(back, "backward", ranks), d.by_reference(want, "backward"), rtol=0, atol=0
    )


def test_what_forward_does_not_gather_comes_from_all_ranks():
    _, graph = backward(frozenset(REFS[:2]))
    (gather,) = graph.find_nodes(op="call_function", target=ops.gather)
    assert len(gather.args) == 5
    _, kept = forward(stage=2)
    assert not list(kept.find_nodes(op="call_function", target=ops.keep_part))


def test_a_backward_without_its_forward_says_so():
    b, graph = backward()
    with pytest.raises(TransferError, match="no forward has kept a part of 'h.1.w'"):
        b.by_reference(graph, "backward")


def test_second_shards_are_of_what_both_phases_gather():
    """Backward by its own reads, of regions that it runs again, or whatever it reads; forward by its reads alone."""
    params = two_layers(world=4, second=2).plans
    both = two_layers().graph, two_layers_backward().graph
    assert second_sharded(*both, frozenset(), params) == frozenset(REFS[2:])
    assert second_sharded(*both, frozenset(REFS[:1]), params) == {REFS[0], REFS[2]}
    assert second_sharded(both[1], both[1], frozenset(REFS), params) == frozenset(REFS[2:])
    assert second_sharded(*both, frozenset(REFS), two_layers().plans) == frozenset()
