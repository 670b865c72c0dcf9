"""What shares a bucket: random weights, with properties that say what a bucket is and nothing of how it is made."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from expecttest import TestCase
from harness import SimulatedModel
from hypothesis import given, settings
from hypothesis import strategies as st
from null.graphs import (
    Build,
    aten,
    check_numbers,
    lower,
    two_layers,
    two_layers_backward,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from zero_compiler.ir import dump, facts, ops
from zero_compiler.ir.facts import ParamRef
from zero_compiler.passes import (
    BucketTransfers,
    Context,
    ParamPlan,
)
from zero_compiler.passes.bucket_transfers import buckets
from zero_compiler.tools.planning import plan


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

    def test_weights_that_travel_in_8_bits_do_so_together(self):
        self.assertExpectedInline(
            dump.text(lower(three_weights(), "forward", "bucket-transfers")),
            """\
%h__0__w_shard = input                                                   f32[2,4]                        +32  live 0
%h__0__b_shard = input                                                   f32[3]                          +12  live 0
%h__0__v_shard = input                                                   f32[3,4]                        +48  live 0
%x = input                                                               f32[3,4]                        +48  live 48
%h.0.w..h.0.v.full = zero.gather [h.0.w, h.0.v]                          (f32[4,4], f32[5,4])           +144  live 192
%h.0.w, %h.0.v = zero.wait %h.0.w..h.0.v.full                            (f32[4,4], f32[5,4])                 live 192
%h.0.b.full = zero.gather [h.0.b]                                        (f32[5])                        +20  live 212
%h.0.b = zero.wait %h.0.b.full                                           (f32[5])                             live 212
%mm_default = aten.mm %x, %h.0.w                                         f32[3,4]                        +48  live 212
%t_default = aten.t %h.0.v                                               f32[4,5]                             live 212
%addmm_default = aten.addmm %h.0.b, %mm_default, %t_default              f32[3,5]                        +60  live 60
return %addmm_default
""",
        )


def three_weights() -> Build:
    """Two weights of a layer travel in 8 bits, its bias does not."""
    b = Build(
        h__0__w=(4, 4), h__0__b=(5,), h__0__v=(5, 4), wire={"h__0__w": torch.int8, "h__0__v": torch.int8}
    )
    x = b.op(aten.mm.default, b.input("x", 3, 4), b.weight("h.0.w"))
    b.done(b.op(aten.addmm.default, b.weight("h.0.b"), x, b.op(aten.t.default, b.weight("h.0.v"))))
    return b


@pytest.mark.parametrize("wire", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("bucket_bytes", [0, 1 << 20])
def test_weights_in_8_bits_are_those_that_eager_code_has(wire, tiled, bucket_bytes):
    """On three ranks, of which the last has fewer rows, or none."""
    rows = {"h__1__w": 1} if tiled else {}
    for build in (two_layers, two_layers_backward):
        b = build(world=3, wire={"h__0__w": wire, "h__1__w": wire}, tile_rows=rows)
        check_numbers(b, "backward" if build is two_layers_backward else "forward", bucket_bytes=bucket_bytes)


def _gathered(reads: str, units: list[str], gathered: str | None = None, phase: str = "backward") -> str:
    """Weights in the order in which a phase gathers them."""
    names = [name for unit in units for name in unit]
    b = Build(**dict.fromkeys(names, (2, 2)))
    (b.input("tangents_1", 2, 2) if phase == "backward" else b.input("x", 2, 2))
    ref = {r.name: r for r in b.plans}
    context = Context(
        b.plans,
        phase,
        {ref[name]: f"m:{unit}" for unit in units for name in unit},
        tuple(ref[name] for name in reads),
        frozenset(ref[name] for name in (gathered if gathered is not None else names)),
    )
    b.done(b.op(aten.zeros.default, [1]))
    BucketTransfers(1 << 20).run(b.graph, context)
    found = b.graph.find_nodes(op="call_function", target=ops.gather)
    return " ".join("".join(r.name for r in facts.params(node)) for node in found)


@pytest.mark.parametrize(
    ("reads", "units", "gathered", "order"),
    [
        ("abcd", ["a", "b", "c", "d"], None, "d c b a"),
        ("abcda", ["a", "b", "c", "d"], None, "a d c b"),  # a tied embedding and head
        ("abcdaf", ["a", "b", "c", "d", "f"], None, "f a d c b"),
        ("aabbcc", ["a", "b", "c"], None, "c b a"),  # each twice in one place
        ("ababab", ["a", "b"], None, "b a"),  # layers that are called again and again
        ("abcabd", ["a", "b", "c", "d"], None, "d b a c"),
        ("abacb", ["a", "b", "c"], None, "b c a"),
        ("aebcda", ["ae", "b", "c", "d"], None, "ae d c b"),  # positions share the bucket of the embedding
        ("aebcda", ["ae", "b", "c", "d"], "ebcd", "d c b e"),
        ("abce", ["ae", "b", "c"], None, "c b ae"),  # read once each: as ever
        ("", ["a", "b"], None, "b a"),
    ],
)
def test_backward_gathers_by_the_last_read_of_what_forward_reads_again(reads, units, gathered, order):
    assert _gathered(reads, units, gathered) == order
    if gathered is None:
        assert _gathered(reads, units, phase="forward") == " ".join(units)


class TiedEnds(nn.Module):
    """An embedding that is the head too, with layers between that backward computes again."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.head = nn.Linear(8, 23, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        h = self.embedding(x)
        for layer in self.layers:
            h = h + checkpoint(lambda layer, h: torch.tanh(layer(h)), layer, h, use_reentrant=False)
        return self.head(h)


def _tokens() -> list[tuple[torch.Tensor]]:
    gen = torch.Generator().manual_seed(3)
    return [(torch.randint(23, (2, 3), generator=gen),) for _ in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"bucket_bytes": 0}, {}, {"bucket_bytes": 0, "tile_bytes": 128}], ids=str)
def test_tied_ends_have_the_numbers_of_plain_pytorch(fields):
    torch.manual_seed(5)
    model = SimulatedModel(TiedEnds(3), 2, **fields)
    model.check(_tokens(), lambda out: out.square().mean())


@pytest.mark.slow
def test_arenas_of_tied_ends_do_not_grow_with_the_layers():
    frames = []
    for layers in (4, 8):
        torch._dynamo.reset()
        frames += plan(TiedEnds(layers), _tokens()[0], 2, compute="aten", bucket_bytes=0)
    few, many = (frame.programs for frame in frames)
    assert {p: few[p].buffer_bytes for p in few} == {p: many[p].buffer_bytes for p in many}
    backward = few["backward"]
    units = list(dict.fromkeys(g.unit for g in backward.gathers))
    assert units == ["embedding", "layers.3", "layers.2", "layers.1", "layers.0"]
    # The gradient of the tied weight is whole when the embedding has its own.
    assert list(dict.fromkeys(r.unit for r in backward.reduces)) == [*units[1:], "embedding"]


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
