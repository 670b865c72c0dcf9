"""Pa of ZeRO-R: what tensor-parallel ranks would save alike is saved in parts."""

from __future__ import annotations

import copy
import operator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from machines import machine
from torch import fx
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

from zero_compiler.cost.hardware import HardwareSpec
from zero_compiler.errors import ConfigError
from zero_compiler.ir import dump, facts, ops
from zero_compiler.passes import Context, OffloadActivations, PartitionActivations, offloaded, run_split
from zero_compiler.passes.partition_activations import common
from zero_compiler.passes.place_offloads import PlaceOffloads

aten, functional = torch.ops.aten, torch.ops._c10d_functional
ROWS, WIDTH = 7, 151  # an odd number of elements: parts are padded


class Graphs:
    """A forward and a backward graph under construction; ``saved`` values enter backward under their names."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode()
        self.forward, self.backward = fx.Graph(), fx.Graph()

    def input(self, graph: fx.Graph, name: str, *shape: int) -> fx.Node:
        node = graph.placeholder(name)
        with self.mode:
            facts.set_value(node, torch.empty(shape))
        return node

    def op(self, graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        with self.mode:
            facts.set_value(node, target(*tree_map_only(fx.Node, facts.value, args)))
        return node

    def reduced(self, node: fx.Node, group: str = "tp") -> fx.Node:
        start = self.op(self.forward, functional.all_reduce.default, node, "sum", group)
        return self.op(self.forward, functional.wait_tensor.default, start)

    def end(self, out: fx.Node, *saved: fx.Node) -> None:
        """Backward multiplies the gradient of ``out`` with everything that is saved."""
        self.forward.output((out, *saved))
        grad = [self.input(self.backward, n.name, *facts.value(n).shape) for n in saved]
        at = self.input(self.backward, "tangents_1", *facts.value(out).shape)
        for node in grad:
            at = self.op(self.backward, aten.mul.Tensor, at, node)
        self.backward.output((at,))

    def run(self, show: Any = lambda text: [text]) -> None:
        with self.mode:
            cut = PartitionActivations("tp", 2, show)
            run_split(cut, self.forward, self.backward, 1, Context({}, "joint"))

    def parts(self) -> list[str]:
        return [n.args[0].name for n in self.forward.find_nodes(op="call_function", target=ops.part)]


def small_model(shape: tuple[int, ...] = (ROWS, WIDTH)) -> Graphs:
    g = Graphs()
    x = g.input(g.forward, "x", *shape)
    alike = g.op(g.forward, aten.tanh.default, g.reduced(x))
    own = g.op(g.forward, aten.mul.Tensor, alike, x)
    g.end(g.op(g.forward, aten.exp.default, own), alike, own)
    return g


def simulate(graph: fx.Graph, inputs: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Outputs of every rank of a group for the inputs of every rank, in lock step."""
    ranks = len(inputs)
    env: dict[fx.Node, list[Any]] = {}
    given = iter(zip(*inputs, strict=True))
    for node in graph.nodes:
        args = [tree_map_only(fx.Node, lambda n, k=k: env[n][k], node.args) for k in range(ranks)]
        if node.op == "placeholder":
            env[node] = list(next(given))
        elif node.op == "output":
            return [list(a[0]) for a in args]
        elif node.target is functional.all_reduce.default:
            env[node] = [sum(a[0] for a in args)] * ranks
        elif node.target is functional.all_gather_into_tensor.default:
            env[node] = [torch.cat([a[0] for a in args])] * ranks
        elif node.target is functional.wait_tensor.default:
            env[node] = [a[0] for a in args]
        elif node.target is ops.part:
            env[node] = [ops.part_of(a[0], k, ranks) for k, a in enumerate(args)]
        else:
            env[node] = [node.target(*a) for a in args]
    raise AssertionError("a graph without output")


def test_the_graphs_before_and_after():
    g = small_model()
    g.run()
    assert_expected_inline(
        dump.text(g.forward),
        """\
%x = input                                                               f32[7,151]                    +4228  live 4228
%all_reduce_default = _c10d_functional.all_reduce %x, 'sum', 'tp'        f32[7,151]                    +4228  live 8456
%wait_tensor_default = _c10d_functional.wait_tensor %all_reduce_default  f32[7,151]                           live 8456
%tanh_default = aten.tanh %wait_tensor_default                           f32[7,151]                    +4228  live 8456
%mul_tensor = aten.mul.Tensor %tanh_default, %x                          f32[7,151]                    +4228  live 8456
%tanh_default_part = zero.part %tanh_default, 'tp', 2                    f32[529]                      +2116  live 6344
%exp_default = aten.exp %mul_tensor                                      f32[7,151]                    +4228  live 10572
return %exp_default, %tanh_default_part, %mul_tensor
""",
    )
    assert_expected_inline(
        dump.text(g.backward),
        """\
%tanh_default_part = input                                               f32[529]                      +2116  live 2116
%mul_tensor = input                                                      f32[7,151]                    +4228  live 6344
%tangents_1 = input                                                      f32[7,151]                    +4228  live 10572
%tanh_default_gather = _c10d_functional.all_gather_into_tensor %tanh_default_part, 2, 'tp' f32[1058]                     +4232  live 12688
%tanh_default_padded = _c10d_functional.wait_tensor %tanh_default_gather f32[1058]                            live 12688
%tanh_default_flat = aten.slice.Tensor %tanh_default_padded, 0, 0, 1057  f32[1057]                            live 12688
%tanh_default_whole = aten.view %tanh_default_flat, [7, 151]             f32[7,151]                           live 12688
%mul_tensor_1 = aten.mul.Tensor %tangents_1, %tanh_default_whole         f32[7,151]                    +4228  live 8456
%mul_tensor_2 = aten.mul.Tensor %mul_tensor_1, %mul_tensor               f32[7,151]                    +4228  live 4228
return %mul_tensor_2
""",
    )


def test_every_rank_computes_what_it_did():
    plain, parted = small_model(), small_model()
    parted.run()
    inputs = [[torch.randn(ROWS, WIDTH)] for _ in range(2)]
    tangents = [torch.randn(ROWS, WIDTH) for _ in range(2)]
    results = []
    for g in (plain, parted):
        outs = simulate(g.forward, copy.deepcopy(inputs))
        results.append(
            (
                [out[0] for out in outs],
                simulate(g.backward, [[*o[1:], t] for o, t in zip(outs, tangents, strict=True)]),
            )
        )
    for mine, theirs in zip(results[1][0], results[0][0], strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(results[1][1], results[0][1], strict=True):
        assert torch.equal(mine[0], theirs[0])


def test_the_part_is_taken_behind_the_last_reader():
    g = small_model()
    g.run()
    (part,) = g.forward.find_nodes(op="call_function", target=ops.part)
    assert part.prev.target is aten.mul.Tensor
    assert facts.bytes_of(facts.value(part)) == 4 * 529
    assert facts.note(part) == "2,116 of 4,228 bytes are saved: one part of 2, the others are equal"


@pytest.fixture
def tp_group():
    """A group of that name, of two ranks: the cost of its collectives depends on how many they are."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    _register_process_group("tp", dist.group.WORLD)
    yield
    _unregister_process_group("tp")
    dist.destroy_process_group()


def test_a_part_waits_elsewhere_and_is_back_until_it_has_been_sent(tp_group):
    """Rajbhandari et al. 2020, section 6.1: parts may be parked on the host."""
    fast = {"latency_us": 1e-6, "bytes_per_us": 1e9}
    graphs = Graphs()
    x = graphs.input(graphs.forward, "x", 64, WIDTH)
    alike = graphs.op(graphs.forward, aten.tanh.default, graphs.reduced(x))
    own = graphs.op(graphs.forward, aten.mul.Tensor, alike, x)
    graphs.end(
        graphs.op(graphs.forward, aten.exp.default, own), own, alike
    )  # backward is busy when it wants the part
    graphs.run()
    spec = HardwareSpec.from_dict(machine(host_device=fast))
    context = Context({}, "joint", machine=spec)
    with graphs.mode:
        run_split(OffloadActivations((), frozenset(), ("host",)), graphs.forward, graphs.backward, 1, context)
        PlaceOffloads().run(graphs.backward, context)
    (moved,) = offloaded(graphs.backward)
    part = 4 * 64 * WIDTH // 2
    assert (moved.name, moved.tier, moved.nbytes) == ("tanh_default_part", "host", part)
    order = [n.target for n in graphs.backward.nodes if n.op == "call_function"]
    places = [order.index(t) for t in (ops.restored, functional.wait_tensor.default, ops.discard)]
    assert places == sorted(places)


def rows_of(rank: int) -> Graphs:
    """The rows that a rank takes of an equal tensor are its own: the number of the part stands in its graph."""
    g = Graphs()
    whole = g.reduced(g.input(g.forward, "x", 2 * ROWS, WIDTH))
    split = g.op(g.forward, aten.split.Tensor, whole, ROWS)
    mine = g.op(g.forward, aten.exp.default, g.op(g.forward, operator.getitem, split, rank))
    g.end(g.op(g.forward, aten.mul.Tensor, mine, mine), mine)
    return g


def behind_an_offset(rank: int) -> Graphs:
    """The first rank has nothing to subtract: names of nodes behind it, and how many there are, differ."""
    g = Graphs()
    x = g.input(g.forward, "x", ROWS, WIDTH)
    if rank > 0:
        x = g.op(g.forward, aten.tanh.default, g.op(g.forward, aten.sub.Tensor, x, 3.0))
    first = g.op(g.forward, aten.tanh.default, g.reduced(x))
    second = g.op(g.forward, aten.exp.default, g.reduced(g.op(g.forward, aten.mul.Tensor, first, x)))
    g.end(g.op(g.forward, aten.mul.Tensor, second, x), first, second)
    return g


def shown_by(graphs: list[Graphs]) -> list[str]:
    """Let the ranks of a group show each other their graphs."""
    said: list[str] = []
    for g in graphs:
        copy.deepcopy(g).run(lambda text: said.append(text) or [text, ""])
    for g in graphs:
        g.run(lambda text: said)
    return said


def test_ranks_compare_how_it_was_made():
    graphs = [rows_of(rank) for rank in (0, 1)]
    said = shown_by(graphs)
    assert [len(text.splitlines()) for text in said] == [1, 1]
    assert said[0] != said[1]
    assert [g.parts() for g in graphs] == [[], []]


def test_names_of_nodes_need_not_be_equal():
    graphs = [behind_an_offset(rank) for rank in (0, 1)]
    said = shown_by(graphs)
    assert said[0] == said[1]
    assert [g.parts() for g in graphs] == [["tanh_default", "exp_default"], ["tanh_default_1", "exp_default"]]


def test_what_ranks_would_gather_in_another_order_is_left_whole():
    assert common([["a", "b", "own"], ["a", "b"]]) == ["a", "b"]
    assert common([["a", "b"], ["b", "a"]]) == []
    assert common([["a"], []]) == []


def left_whole(kind: str) -> Graphs:
    g = Graphs()
    x = g.input(g.forward, "x", *((1, 8) if kind == "small" else (ROWS, WIDTH)))
    alike = g.op(g.forward, aten.tanh.default, g.reduced(x, "dp" if kind == "another group" else "tp"))
    out = g.op(g.forward, aten.mul.Tensor, alike, x)
    if kind == "given to the user":
        g.end(alike, alike)
    elif kind == "saved twice":
        g.end(out, alike, g.op(g.forward, aten.slice.Tensor, alike, 0, 0, ROWS))
    elif kind == "out of order":
        g.end(g.op(g.forward, aten.t.default, out), g.op(g.forward, aten.t.default, alike))
    elif kind == "random":
        noise = g.op(g.forward, aten.rand_like.default, alike)
        g.end(out, noise)
    elif kind == "not alike":
        g.end(alike, out)
    else:
        g.end(out, alike)
    return g


@pytest.mark.parametrize(
    "kind",
    ["small", "another group", "given to the user", "saved twice", "out of order", "random", "not alike"],
)
def test_what_is_left_whole(kind):
    g = left_whole(kind)
    before = dump.text(g.forward), dump.text(g.backward)
    g.run()
    assert (dump.text(g.forward), dump.text(g.backward)) == before


def test_a_value_that_is_no_bool_is_refused():
    import zero_compiler as zero

    with pytest.raises(ConfigError, match="partition_activations must be True or False, not 1"):
        zero.Config(partition_activations=1)
