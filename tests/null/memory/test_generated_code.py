"""What the code that Inductor writes holds: read from its text, and beside the allocator's meter."""

import gc
from dataclasses import replace

import pytest
import torch
import torch._inductor.inductor_prims
import torch.nn.functional as F
from marks import thorough
from torch import fx, nn
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import zero_compiler as zero
from zero_compiler.emit.segments import SegmentCompiler, alike_one_by_one
from zero_compiler.ir import facts
from zero_compiler.memory import generated_code, segment_peak
from zero_compiler.memory.segment_graph import SegmentGraph
from zero_compiler.runtime import _C

HEAD = """
class Runner:
    def call(self, args):
        in_0, in_1, in_2 = args
        args.clear()
"""


def code(*lines: str) -> str:
    return HEAD + "\n".join(f"        {line}" for line in lines)


def graph_of(function, *inputs: torch.Tensor) -> SegmentGraph:
    """A segment, as the compiler would be given it."""
    gm = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)
    (output,) = gm.graph.find_nodes(op="output")
    output.args = (tuple(output.args[0]),)
    return SegmentGraph.of(gm, gm.graph)


def three(*shapes) -> list[torch.Tensor]:
    return [torch.empty(s) for s in shapes]


def empty() -> fx.Graph:
    return fx.Graph()


# The text ---------------------------------------------------------------------------------------------------


def test_buffers_live_as_long_as_a_name_for_them():
    text = code(
        "assert_size_stride(in_0, (8, 4), (4, 1), 'input')",
        "buf0 = empty_strided_cpu((8, 4), (4, 1), torch.float32)",  # 128
        "cpp_fused_mul_0(in_0, in_1, buf0)",
        "del in_0",
        "buf1 = reinterpret_tensor(buf0, (32, ), (1, ), 0); del buf0  # reuse",
        "buf2 = empty_strided_cpu((100, ), (1, ), torch.bfloat16)",  # 200
        "extern_kernels.mm(buf1, in_1, out=buf2)",
        "del buf1",
        "buf3 = empty_strided_cpu((5, 2), (1, 8), torch.int64)",  # 1 + 4 * 1 + 1 * 8 = 13 elements
        "return (buf2, buf3, )",
    )
    inputs = three((8, 4), (7,), (3,))
    held = generated_code.read(text, empty(), inputs)
    # What nobody else holds: 128 at in_0 until its deletion, 12 at in_2, which is never deleted.
    assert held.most(inputs, [False, False, False]) == max(128 + 200, 200 + 104)
    assert held.most(inputs, [True, False, True]) == max(12 + 128 + 128, 12 + 128 + 200, 12 + 200 + 104)
    assert held.most(inputs, [False, True, False]) == 28 + 328


def test_code_for_a_device_sets_it_and_calls_no_operator_by_that():
    text = code(
        "with torch.cuda._DeviceGuard(0):",
        "    torch.cuda.set_device(0)",
        "    buf0 = empty_strided_cuda((8, 4), (4, 1), torch.float32)",
        "    stream0 = get_raw_stream(0)",
        "    triton_poi_fused_mul_0.run(in_0, in_1, buf0, 32, stream=stream0)",
        "    del in_0",
        "    buf1 = empty_strided_cuda((16, ), (1, ), torch.bfloat16)",
        "    extern_kernels.mm(buf0, in_1, out=buf1)",
        "    torch.ops.inductor._mm_plus_mm(buf0, in_1, buf0, in_1, out=buf1)",
        "    del buf0",
        "return (buf1, )",
    )
    inputs = three((8, 4), (7,), (3,))
    held = generated_code.read(text, empty(), inputs)
    assert held.operators == {"mm", "_mm_plus_mm"}
    assert held.most(inputs, [False] * 3) == 128 + 32


def test_results_of_operators_have_their_size_from_the_check_behind_them():
    g = fx.Graph()
    node = g.call_function(torch.ops.aten.topk.default, ())
    facts.set_value(node, (torch.empty(4, 2, dtype=torch.float16), torch.empty(4, 2, dtype=torch.int64)))
    text = code(
        "buf0 = torch.ops.aten.topk.default(in_0, 2)",
        "buf1 = buf0[0]",
        "assert_size_stride(buf1, (4, 2), (2, 1), 'torch.ops.aten.topk.default')",
        "buf2 = buf0[1]",
        "assert_size_stride(buf2, (4, 2), (2, 1), 'torch.ops.aten.topk.default')",
        "assert_alignment(buf2, 16, 'torch.ops.aten.topk.default')",
        "del buf0",
        "return (buf1, buf2, )",
    )
    inputs = three((4, 8), (1,), (1,))
    held = generated_code.read(text, g, inputs)
    assert held.most(inputs, [False] * 3) == 8 * 2 + 8 * 8
    assert held.most(inputs, [False] * 3, beside={"topk": 1000}) == 80 + 1000


def test_the_one_result_of_an_operator_is_checked_under_its_second_name():
    g = fx.Graph()
    facts.set_value(g.call_function(torch.ops.aten.cumsum.default, ()), torch.empty(10))
    text = code(
        "buf0 = torch.ops.aten.cumsum.default(in_0, 0)",
        "buf1 = buf0",
        "assert_size_stride(buf1, (10, ), (1, ), 'torch.ops.aten.cumsum.default')",
        "del buf0",
        "buf2 = empty_strided_cpu((5, ), (1, ), torch.float32)",
        "del buf1",
        "buf3 = empty_strided_cpu((20, ), (1, ), torch.float32)",
        "return (buf2, buf3, )",
    )
    inputs = three((1,), (1,), (1,))
    assert generated_code.read(text, g, inputs).most(inputs, [False] * 3) == max(40 + 20, 20 + 80)


def test_a_list_holds_what_was_taken_from_it():
    g = fx.Graph()
    values = tuple(torch.empty(n) for n in (10, 20, 30))
    facts.set_value(g.call_function(torch.ops.aten.convolution_backward.default, ()), values)
    text = code(
        "buf0 = torch.ops.aten.convolution_backward.default(in_0)",
        "buf1 = buf0[2]",
        "assert_size_stride(buf1, (30, ), (1, ), 'torch.ops.aten.convolution_backward.default')",
        "del buf1",
        "buf2 = buf0[0]",
        "assert_size_stride(buf2, (10, ), (1, ), 'torch.ops.aten.convolution_backward.default')",
        "buf3 = empty_strided_cpu((100, ), (1, ), torch.float32)",
        "del buf0",
        "buf4 = empty_strided_cpu((150, ), (1, ), torch.float32)",
        "return (buf2, buf3, buf4, )",
    )
    inputs = three((1,), (1,), (1,))
    # All three until the list goes, the second too, which nothing takes; then what was taken and still has a name.
    assert generated_code.read(text, g, inputs).most(inputs, [False] * 3) == max(60 + 100, 10 + 100 + 150) * 4


def test_results_that_are_given_have_their_names_already():
    g = fx.Graph()
    facts.set_value(g.call_function(torch.ops.aten.topk.default, ()), (torch.empty(4), torch.empty(4)))
    text = code(
        "buf1 = empty_strided_cpu((4, ), (1, ), torch.float32)",
        "buf2 = empty_strided_cpu((4, ), (1, ), torch.int64)",
        "buf0 = torch.ops.aten.topk.default(in_0, 2, out0=buf1, out1=buf2)",
        "del buf0",
        "return (buf1, buf2, )",
    )
    inputs = three((1,), (1,), (1,))
    assert generated_code.read(text, g, inputs).most(inputs, [False] * 3) == 16 + 32


def test_sizes_may_be_symbols_that_an_input_gives():
    text = code(
        "s33 = in_2",
        "ps0 = 2 * s33",
        "with torch.cuda._DeviceGuard(0):",
        "    buf0 = empty_strided_cuda((s33, ps0), (ps0, 1), torch.float32)",
        "    triton_0_xnumel = 2 * s33 * s33",
        "    stream0 = get_raw_stream(0)",
        "    triton_0.run(in_0, buf0, s33, stream=stream0)",
        "return (buf0, )",
    )
    inputs = [*three((1,), (1,)), 3]
    held = generated_code.read(text, empty(), inputs)
    assert held.most(inputs, [False] * 3) == 3 * 6 * 4
    assert held.most([*inputs[:2], 5], [False] * 3) == 5 * 10 * 4


@pytest.mark.parametrize(
    "line",
    [
        "if in_0 is None: pass",
        "buf0 = torch.ops.aten.topk.default(in_0, 2)",  # no size
        "buf0 = empty_strided_cpu((n, ), (1, ), torch.float32)",  # of a size from elsewhere
        "buf0 = empty_strided_cpu((2, ), (1, ))",  # no dtype
        "buf0 = torch.ops.aten.view_as_real.default(in_0)",  # may be what it is given
        "buf0 = in_0 if in_1 else in_2",
        "(buf0, buf1) = self.partitions[0]([in_0])",
        "return (",
    ],
)
def test_what_cannot_be_followed_is_not_known(line):
    assert generated_code.read(code(line), empty(), three((1,), (1,), (1,))) is None


def test_numbers_that_no_size_is_made_of_are_passed_over():
    """And cost no guard: a float that changes from call to call stays one."""
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        free = env.create_unbacked_symfloat()
    text = code("zf0 = in_2", "buf0 = empty_strided_cpu((3, ), (1, ), torch.float32)", "return (buf0, )")
    inputs = [*three((1,), (1,)), free]
    assert generated_code.read(text, empty(), inputs).most(inputs, [False] * 3) == 12
    assert not env.guards


def test_code_of_another_form_is_not_known():
    assert generated_code.read("", empty(), []) is None
    assert generated_code.read("def call(self, args): pass\ndef call(self, args): pass", empty(), []) is None


# Beside the meter -------------------------------------------------------------------------------------------


def shared_sum(x, y, w):
    """A sum with two readers: computed in both, from x and y, which live on in its place."""
    z = x + y
    return (z * (torch.tanh(z) @ w),)


def norm_and_product(x, scale, w):
    return (F.rms_norm(x, (x.shape[-1],), scale) @ w,)


def loss(x, w, t):
    return (F.cross_entropy(x @ w, t),)


def sort(x, y):
    return (torch.sort(x * y)[0],)


CASES = {
    "shared": (shared_sum, lambda: [torch.randn(64, 32), torch.randn(64, 32), torch.randn(32, 32)], 0),
    "norm": (norm_and_product, lambda: [torch.randn(64, 128), torch.randn(128), torch.randn(128, 32)], 0),
    "loss": (loss, lambda: [torch.randn(64, 16), torch.randn(16, 1000), torch.randint(1000, (64,))], 0),
    "cumsum": (
        lambda x, y: (torch.cumsum(x * y, 0) * 2,),
        lambda: [torch.randn(64, 32), torch.randn(64, 32)],
        0,
    ),
    "fused": (
        lambda x, w: ((torch.sin(x) * torch.cos(x)) @ w,),
        lambda: [torch.randn(64, 32), torch.randn(32, 32)],
        0,
    ),
    "sort": (sort, lambda: [torch.randn(64, 32), torch.randn(64, 32)], 1024),  # a row of it
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shared", "loss", "sort", *thorough("norm", "cumsum", "fused")])
def test_the_meter_measures_what_was_read(name):
    function, make, beside = CASES[name]
    seg = graph_of(function, *make())
    artifact = SegmentCompiler("inductor").compile(seg, True, False)
    assert artifact.generated is not None
    artifact.run(make())  # loads the kernels
    _C.meter_install()
    try:
        gc.collect()
        base = _C.meter_current()
        inputs = make()
        _C.meter_reset_peak()
        out = artifact.run(inputs)
        measured = _C.meter_peak() - base
    finally:
        _C.meter_uninstall()
    assert inputs == []
    assert out
    most = artifact.generated.most(seg.inputs, [True] * len(seg.inputs))
    assert most <= measured <= most + beside, "operators may have memory of their own while they run"


def counted(name: str) -> tuple[int, int, int]:
    """Of a segment: by its operators one by one, by its code, and as it counts."""
    function, make, _ = CASES[name]
    seg = graph_of(function, *make())
    code = SegmentCompiler("inductor").compile(seg, True, False).generated
    dying = [True] * len(seg.inputs)
    alone = segment_peak.peak_inside(seg, dying)
    both = segment_peak.peak_inside(replace(seg, generated=code), dying)
    return alone, code.most(seg.inputs, dying), both


@pytest.mark.slow
def test_a_segment_counts_as_its_code_does():
    alone, code, both = counted("shared")
    assert both == code == alone + 64 * 32 * 4
    alone, code, both = counted("fused")
    assert both == code == alone - 64 * 32 * 4  # of what is multiplied nothing is laid down


def test_code_that_calls_what_is_not_known_counts_at_least_as_its_operators(monkeypatch):
    monkeypatch.setattr(segment_peak, "workspaces", lambda graph, sizes: {})
    alone, code, both = counted("fused")
    assert both == alone > code


@pytest.mark.slow
def test_the_planned_peak_is_near_in_half_precision():
    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm, self.up, self.down = (
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.Linear(4 * width, width),
            )

        def forward(self, x):
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    x = torch.randn(1024, 128)
    _C.meter_install()
    try:
        model = zero.shard(nn.Sequential(*(Block(128) for _ in range(3))), param_dtype="bf16")
        step = torch.compile(model, backend="zero")
        for _ in range(2):
            gc.collect()
            _C.meter_reset_peak()
            step(x).square().mean().backward()
            measured = _C.meter_peak()
            model.zero_grad()
    finally:
        _C.meter_uninstall()
    memory = zero.inspect(model).memory
    planned = memory.peak - memory.optimizer
    assert measured <= planned + 2 * x.nbytes  # of the loss, in eager code
    assert planned <= 1.2 * measured


def test_what_may_run_operator_by_operator():
    """Not what draws by a seed, which eager kernels do not read, nor a region, of which its graph does not tell."""
    seg = graph_of(shared_sum, *CASES["shared"][1]())
    assert alike_one_by_one(seg)
    for target in (torch.ops.prims.inductor_random.default, torch.ops.higher_order.flex_attention):
        other = fx.GraphModule({}, fx.Graph())
        other.graph.output((other.graph.call_function(target, ()),))
        assert not alike_one_by_one(SegmentGraph.of(other, other.graph))


@pytest.mark.slow
def test_operators_one_by_one_give_the_strides_that_the_graph_has():
    seg = graph_of(shared_sum, *CASES["shared"][1]())
    (output,) = seg.graph.find_nodes(op="output")
    (out,) = output.args[0]
    facts.set_value(out, facts.value(out).t().contiguous().t())
    compiler = SegmentCompiler("inductor")
    (got,) = compiler.compile(seg, True, False, fuse=False).run(inputs := CASES["shared"][1]())
    assert inputs == []
    assert got.stride() == (1, 64)
    torch.manual_seed(0)
    given = CASES["shared"][1]()
    torch.testing.assert_close(
        compiler.compile(seg, True, False, fuse=False).run(list(given))[0], shared_sum(*given)[0]
    )
