"""The cost model: arithmetic by hand on one node, and what a fused region leaves out."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import pytest
import sympy
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from zero_compiler.cost import hardware
from zero_compiler.cost.cost import (
    CostModel,
    at_hints,
    bucket_bytes,
    hints,
    launch_bytes,
    smaller_buckets,
    tile_rows,
)
from zero_compiler.memory.segment_graph import SegmentGraph

aten = torch.ops.aten
SPEC = dataclasses.replace(
    hardware.load("laptop"),
    matmul_flops_per_us={"float32": 1000.0, "bfloat16": 2000.0},
    memory_bytes_per_us=100.0,
    vector_per_us=50.0,
    special_per_us=5.0,
    kernel_us=1.0,
)
COST = CostModel(SPEC)


def whole(graph: fx.Graph) -> tuple[Sequence[fx.Node], Sequence[fx.Node]]:
    """What a graph computes and gives, as a segment."""
    segment = SegmentGraph.of(nn.Module(), graph)
    return segment.body, segment.outs


def graph_of(fn, *inputs, symbolic=False):
    return make_fx(fn, tracing_mode="symbolic" if symbolic else "fake")(*inputs).graph


def nodes(graph, *targets):
    return [n for n in graph.nodes if getattr(n.target, "overloadpacket", None) in targets]


def test_a_matrix_product_is_bound_by_arithmetic_or_by_memory():
    (big,) = nodes(graph_of(torch.mm, torch.ones(64, 64), torch.ones(64, 64)), aten.mm)
    assert COST.flops(big) == 2 * 64**3
    assert COST.node_us(big) == pytest.approx(2 * 64**3 / 1000 + 1)
    (thin,) = nodes(graph_of(torch.mm, torch.ones(64, 1), torch.ones(1, 64)), aten.mm)
    assert COST.node_us(thin) == pytest.approx(4 * (64 + 64 + 64 * 64) / 100 + 1)
    half = torch.ones(64, 64, dtype=torch.bfloat16)
    (fast,) = nodes(graph_of(torch.mm, half, half), aten.mm)
    assert COST.node_us(fast) == pytest.approx(2 * 64**3 / 2000 + 1)


def test_elementwise_operators_take_the_rate_of_their_dtype():
    shares = {
        "vector_share": {"float32": 1.0, "bfloat16": 0.5},
        "special_share": {"float32": 1.0, "bfloat16": 0.8},
    }
    cost = CostModel(dataclasses.replace(SPEC, **shares))
    for dtype, add, exp in (
        (torch.float32, 50.0, 5.0),
        (torch.bfloat16, 25.0, 4.0),
        (torch.float64, 50.0, 5.0),
    ):
        graph = graph_of(lambda x: (x + 1).exp(), torch.ones(1000, dtype=dtype))
        (plus,), (power,) = nodes(graph, aten.add), nodes(graph, aten.exp)
        assert cost.vector_us(plus) == pytest.approx(1000 / add)
        assert cost.vector_us(power) == pytest.approx(1000 / exp)


def test_collectives_are_symbolic_in_the_number_of_ranks():
    ranks = sympy.Symbol("ranks", positive=True, integer=True)
    for kind in hardware.KINDS:
        us = SPEC.collective(kind, ranks).us(1 << 20)
        assert us.free_symbols == {ranks}
        largest = max(c.world for c in SPEC.collectives if (c.kind, c.transport) == (kind, "c10d"))
        for world in (largest, 4 * largest, 512):
            assert float(us.subs(ranks, world)) == pytest.approx(SPEC.collective(kind, world).us(1 << 20))


COPIES = CostModel(dataclasses.replace(SPEC, matmul_traffic=2.5))


def test_libraries_that_copy_operands_take_products_traffic_beside_arithmetic():
    graph = graph_of(lambda a, b: (a @ b).relu(), torch.ones(8, 64), torch.ones(64, 64))
    (mm,), (relu,) = nodes(graph, aten.mm), nodes(graph, aten.relu)
    arithmetic, traffic = 2 * 8 * 64**2 / 1000, 4 * (64**2 + 2 * 8 * 64) / 100
    assert COST.node_us(mm) == pytest.approx(max(arithmetic, traffic) + 1)
    assert COPIES.node_us(mm) == pytest.approx(arithmetic + 2.5 * traffic + 1)
    assert COPIES.node_us(relu) == COST.node_us(relu)
    more = COPIES.region_us(*whole(graph), fused=True) - COST.region_us(*whole(graph), fused=True)
    assert more == pytest.approx(COPIES.node_us(mm) - COST.node_us(mm))


@given(st.integers(1, 200), st.floats(0, 5), st.floats(0, 5))
def test_more_copies_never_take_less_and_little_more_takes_little_more(rows, share, more):
    (mm,) = nodes(graph_of(torch.mm, torch.ones(rows, 16), torch.ones(16, 16)), aten.mm)
    few, many = (
        CostModel(dataclasses.replace(SPEC, matmul_traffic=s)).node_us(mm) for s in (share, share + more)
    )
    traffic = 4 * (2 * rows * 16 + 16 * 16) / 100
    assert few >= COST.node_us(mm)
    assert few <= many <= few + more * traffic + 1e-9


def test_rows_of_a_tile_count_traffic_as_products_do():
    rows = tile_rows(SPEC, "float32")
    assert rows == math.ceil(16 / 100 * 1000 / (6 * 0.1))
    assert tile_rows(dataclasses.replace(SPEC, matmul_traffic=0.5), "float32") == rows  # once at least
    assert tile_rows(COPIES.spec, "float32") == pytest.approx(2.5 * rows, abs=2)


def test_a_view_costs_nothing():
    (t,) = nodes(graph_of(lambda x: x.t(), torch.ones(8, 4)), aten.t)
    assert COST.node_us(t) == 0


def test_special_functions_cost_more_than_sums():
    graph = graph_of(lambda x: torch.erf(x) + x, torch.ones(1000))
    (erf,), (add,) = nodes(graph, aten.erf), nodes(graph, aten.add)
    assert COST.node_us(erf) == pytest.approx(1000 / 5 + 1)  # memory alone would take 80
    assert COST.node_us(add) == pytest.approx(3 * 4000 / 100 + 1)  # memory: two are read, one is written


def test_attention_on_cpu_counts_its_products():
    q = torch.ones(2, 3, 16, 8)
    graph = graph_of(lambda q: aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[0], q)
    (node,) = nodes(graph, aten._scaled_dot_product_flash_attention_for_cpu)
    assert COST.flops(node) == 2 * (2 * 2 * 3 * 16 * 16 * 8)


def test_a_users_collective_takes_the_time_of_its_link():
    """As tensor parallelism has them; what is element-wise around it runs beside, in a fused region as well."""
    functional = torch.ops._c10d_functional
    calls = {
        "all_reduce": lambda x, group: functional.all_reduce(x, "sum", group),
        "all_gather": lambda x, group: functional.all_gather_into_tensor(x, 2, group),
        "reduce_scatter": lambda x, group: functional.reduce_scatter_tensor(x, "sum", 2, group),
    }
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        pair = dist.new_group([0, 1]).group_name
        for kind, call in calls.items():

            def between(x, call):
                return functional.wait_tensor(call(x * 2, pair)).relu()

            graph = graph_of(functools.partial(between, call=call), torch.ones(1000, 2))
            (sent,) = (n for n in graph.nodes if COST.heavy(n))
            link = SPEC.collective(kind, 2)
            us = link.latency_us + (16_000 if kind == "all_gather" else 8_000) / link.bytes_per_us
            assert COST.node_us(sent) == pytest.approx(us)
            light = [n for n in graph.nodes if n.op == "call_function" and n is not sent]
            assert COST.region_us(*whole(graph), fused=False) == pytest.approx(
                us + sum(map(COST.node_us, light))
            )
            assert (
                us < COST.region_us(*whole(graph), fused=True) <= COST.region_us(*whole(graph), fused=False)
            )
        alone = dist.new_group([0]).group_name
        graph = graph_of(lambda x: functional.all_reduce(x, "sum", alone), torch.ones(1000))
        (kept,) = (n for n in graph.nodes if COST.heavy(n))
        assert COST.node_us(kept) == pytest.approx(8000 / 100 + 1)  # a copy in memory
    finally:
        dist.destroy_process_group()


def test_a_fused_region_reads_and_writes_its_border_once():
    graph = graph_of(lambda x: ((x + 1) * 2 - 3).relu(), torch.ones(1000))
    each = sum(COST.node_us(n) for n in graph.nodes if n.op == "call_function")
    fused = COST.region_us(*whole(graph), fused=True)
    assert fused == pytest.approx(max(2 * 4000 / 100, 4 * 1000 / 50) + 1)
    assert COST.region_us(*whole(graph), fused=False) == pytest.approx(each)
    assert fused < each


TABLE, FEW = torch.ones(50_000, 64), torch.zeros(10, dtype=torch.int64)
ROWS = 10 * 64 * 4 + 10 * 8  # bytes of what is looked up, and of where


@pytest.mark.parametrize(
    ("fn", "more"),
    [
        (lambda t, i: aten.embedding(t, i), 10 * 64 * 4),
        (lambda t, i: t[i], 10 * 64 * 4),
        (lambda t, i: t.index_select(0, i), 10 * 64 * 4),
        # Reads rows, values and indices, and writes rows where they lie, with the indices counted again.
        (lambda t, i: t.index_put_((i,), torch.ones(10, 64), True), 2 * ROWS),
    ],
)
def test_a_lookup_costs_what_it_finds_and_not_the_table(fn, more):
    graph = graph_of(fn, TABLE, FEW)
    node = nodes(graph, aten.embedding, aten.index, aten.index_select, aten.index_put_)[-1]
    moved = COST.moved_bytes(node)
    assert moved == ROWS + more
    assert COST.node_us(node) <= moved / 100 + 10 * 64 / 50 + 1
    assert COST.region_us(*whole(graph), True) < 10 * moved / 100 < COST.spec.kernel_us + TABLE.nbytes / 100


@pytest.mark.slow
def test_sums_of_a_region_have_one_order():
    """Sets of nodes are in the order of their addresses, which differs between ranks."""

    def many(x):
        for n in range(1, 20):
            x = torch.relu(x[:, :n] @ x.new_ones(n, n + 1)) * 1.1
        return x

    said = {COST.region_us(*whole(graph_of(many, torch.ones(7, 1))), True) for _ in range(30)}
    assert len(said) == 1


def test_costs_are_symbolic_where_sizes_are():
    graph = graph_of(torch.mm, torch.ones(6, 4), torch.ones(4, 5), symbolic=True)
    (mm,) = nodes(graph, aten.mm)
    flops = COST.flops(mm)
    assert isinstance(flops, sympy.Expr)
    assert at_hints(flops, hints(graph)) == 2 * 6 * 4 * 5
    assert at_hints(COST.region_us(*whole(graph), fused=True), hints(graph)) > 0
    seen = at_hints(COPIES.node_us(mm), hints(graph))
    (fixed,) = nodes(graph_of(torch.mm, torch.ones(6, 4), torch.ones(4, 5)), aten.mm)
    assert seen == pytest.approx(COPIES.node_us(fixed))


def test_buckets_are_sized_by_latency_times_bandwidth():
    # The preset: 200 us and 1200 bytes/us over the process group, 20 us and 10,000 bytes/us over shared memory.
    assert bucket_bytes(SPEC, 2) == 8 * 200 * 1200
    assert bucket_bytes(SPEC, 2, shared=True) == 8 * 20 * 10_000
    # A ring of four has three steps for one, and moves three quarters of the bytes for half of them.
    assert bucket_bytes(SPEC, 4) == pytest.approx(8 * (3 * 200) * (1200 * 2 / 3), abs=1)
    assert bucket_bytes(SPEC, 1) == 1 << 20  # nothing moves
    link = SPEC.collective("all_gather", 2)
    assert link.latency_us * 9 == pytest.approx(link.us(bucket_bytes(SPEC, 2)))


def test_buckets_over_shared_memory_are_sized_by_reductions():
    # Gathers there read shards where they lie: a bandwidth without bound must not make buckets without bound.
    fast = hardware.Link(latency_us=20.0, bytes_per_us=1e9)
    links = [
        dataclasses.replace(c, link=fast) if (c.kind, c.transport) == ("all_gather", "shared") else c
        for c in SPEC.collectives
    ]
    spec = dataclasses.replace(SPEC, collectives=tuple(links))
    assert spec.collective("all_gather", 2, shared=True) == fast
    assert bucket_bytes(spec, 2, shared=True) == bucket_bytes(SPEC, 2, shared=True)


def test_smaller_buckets_end_where_half_of_the_time_is_latency():
    sizes = smaller_buckets(SPEC, 2)
    assert sizes == [960_000, 480_000, 240_000]
    link = SPEC.collective("all_gather", 2)
    assert link.us(sizes[-1]) == pytest.approx(2 * link.latency_us)
    assert smaller_buckets(SPEC, 1) == []


def test_what_memory_reads_while_kernels_are_launched():
    assert launch_bytes(dataclasses.replace(SPEC, kernel_us=5.0, memory_bytes_per_us=1000.0)) == 40_000
