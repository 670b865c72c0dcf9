"""Small graphs by hand, with markers, for tests of passes; and what they compute on N ranks."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._pytree import tree_map

from zero_compiler.emit.emit import emit
from zero_compiler.emit.segments import _aten
from zero_compiler.ir import dump, facts, ops
from zero_compiler.ir.facts import ParamRef
from zero_compiler.ir.program import Program
from zero_compiler.layout import Layout
from zero_compiler.passes import (
    Context,
    ParamPlan,
    PassOptions,
    assign_units,
    joint_passes,
    order_of_use,
    phase_passes,
    run_passes,
)
from zero_compiler.quantised_blocks import round_trip
from zero_compiler.runtime.reference import Rank, Reference

aten = torch.ops.aten
OWNER = "m"


class Build:
    """A graph under construction.

    Args:
        params: full shape of each managed parameter; a scalar ``()`` is held whole by every rank.
        tile_rows: of those that are gathered in tiles, rows of a rank's chunk in a tile.
        wire: of those that travel in 8 bits, the dtype that they travel in.
        second: ranks of a host that share second shards.
        sum_hosts: on how many hosts the ranks are, between which sums of gradients go in blocks of int8; 1: as they are.
    """

    def __init__(
        self,
        world: int = 2,
        stage: int = 3,
        *,
        gather_dtype=None,
        tile_rows: Mapping[str, int] | None = None,
        wire: Mapping[str, torch.dtype] | None = None,
        second: int = 0,
        sum_hosts: int = 1,
        **params: tuple[int, ...],
    ) -> None:
        self.world = world
        self.mode = FakeTensorMode()
        self.graph = fx.Graph()
        self.plans: dict[ParamRef, ParamPlan] = {}
        self.inputs: list[tuple[int, ...]] = []
        self.shards: dict[str, fx.Node] = {}
        dtype = gather_dtype or torch.float32
        for name, shape in params.items():
            ref = ParamRef(OWNER, name.replace("__", "."))
            sharded = bool(shape) and stage > 0
            rows = (tile_rows or {}).get(name, 0)
            self.plans[ref] = ParamPlan(
                ref, shape, torch.float32, dtype, dtype, sharded, world, stage, tile_rows=rows
            )
            self.plans[ref] = replace(
                self.plans[ref], wire=(wire or {}).get(name), second=second if sharded else 0
            )
            if sum_hosts > 1 and sharded:
                self.plans[ref] = replace(self.plans[ref], sum_wire=torch.int8, sum_hosts=sum_hosts)
            node = self.graph.placeholder(f"{name}_shard")
            facts.set_value(node, self._fake(self.layout(ref).local_shape(0)))
            self.shards[ref.name] = node

    def layout(self, ref: ParamRef) -> Layout:
        plan = self.plans[ref]
        return Layout(plan.shape, plan.dtype, plan.world, plan.sharded)

    def _fake(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        with self.mode:
            return torch.empty(tuple(shape), dtype=dtype)

    def input(self, name: str, *shape: int) -> fx.Node:
        node = self.graph.placeholder(name)
        facts.set_value(node, self._fake(shape))
        self.inputs.append(shape)
        return node

    def op(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        given = tree_map(lambda a: facts.value(a) if isinstance(a, fx.Node) else a, (args, kwargs))
        with self.mode:
            facts.set_value(node, target(*given[0], **given[1]))
        return node

    def weight(self, name: str) -> fx.Node:
        """A marker that reads the full weight."""
        plan = self.plans[ParamRef(OWNER, name)]
        args = (self.shards[name], list(plan.shape), plan.gather_dtype, OWNER, name)
        node = self.graph.create_node(
            "call_function", ops.unshard, args, name=f"{name.replace('.', '_')}_full"
        )
        facts.set_value(node, self._fake(plan.shape, plan.gather_dtype))
        return node

    def reduced(self, name: str, grad: fx.Node) -> fx.Node:
        """A marker that reduces a gradient."""
        ref = ParamRef(OWNER, name)
        local = self.layout(ref).local_shape(0)
        node = self.graph.call_function(ops.reduce_grad, (grad, list(local), torch.float32, OWNER, name))
        facts.set_value(node, self._fake(local))
        return node

    def done(self, *outputs: fx.Node | None) -> fx.Graph:
        self.graph.output(tuple(outputs))
        return self.graph

    def context(self, phase: str = "forward", bucket_bytes: int = 1 << 20, **fields: Any) -> Context:
        # The joint graph gives a backward its units: here, the order in which parameters were declared.
        order = list(self.plans) if phase == "backward" else order_of_use(self.graph)
        units = assign_units(order, self.plans, bucket_bytes)
        for ref in self.plans:
            units.setdefault(ref, f"{OWNER}:{ref.name.rpartition('.')[0]}")
        return Context(self.plans, phase, units, **fields)

    # Values ------------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, torch.Tensor]:
        gen = torch.Generator().manual_seed(7)
        return {ref.name: torch.randn(plan.shape, generator=gen) for ref, plan in self.plans.items()}

    def batches(self) -> list[list[torch.Tensor]]:
        gen = torch.Generator().manual_seed(11)
        return [[torch.randn(s, generator=gen) for s in self.inputs] for _ in range(self.world)]

    def by_markers(self, graph: fx.Graph) -> list[list[Any]]:
        """What a graph with markers computes on every rank, by what markers mean."""
        full, given = self.weights(), self.batches()
        envs: list[dict[fx.Node, Any]] = [{} for _ in range(self.world)]
        results: list[list[Any]] = []
        takes = [iter(batch) for batch in given]
        for node in graph.nodes:
            if node.op == "placeholder":
                name = str(node.target)
                for env, take in zip(envs, takes, strict=True):
                    env[node] = None if name.endswith("_shard") else next(take).clone()
            elif node.op == "output":
                results = [[None if n is None else env[n] for n in node.args[0]] for env in envs]
            elif node.target is ops.unshard:
                weight, wire = full[node.args[4]], self.plans[ParamRef(OWNER, node.args[4])].wire
                for env in envs:
                    whole = weight if wire is None else round_trip(weight, wire, node.args[2])
                    env[node] = whole.to(node.args[2])
            elif node.target is ops.reduce_grad:
                plan = self.plans[ParamRef(OWNER, node.args[4])]
                layout = self.layout(plan.ref)
                grads = [env[node.args[0]].to(plan.reduce_dtype) for env in envs]
                for k, env in enumerate(envs):
                    start = layout.start(k)
                    mean = self._sum(plan, grads, k) / self.world
                    env[node] = (mean[start : start + layout.rows(k)] if plan.sharded else mean).to(
                        plan.dtype
                    )
            else:
                for env in envs:
                    args, kwargs = tree_map(
                        lambda a, env=env: env[a] if isinstance(a, fx.Node) else a, (node.args, node.kwargs)
                    )
                    env[node] = node.target(*args, **kwargs)
        return results

    def _sum(self, plan: ParamPlan, grads: Sequence[torch.Tensor], k: int) -> Any:
        """Of full gradients, right in the rows of rank ``k``: those of other hosts as they arrive, where they are packed."""
        if plan.sum_wire is None:
            return sum(grads)
        layout, ranks = self.layout(plan.ref), self.world // plan.sum_hosts
        mine = slice(layout.start(k), layout.start(k) + layout.rows(k))
        total = sum(grads[k - k % ranks :][:ranks]).float()
        for host in range(plan.sum_hosts):
            if host != k // ranks and layout.rows(k):
                there = sum(grads[host * ranks :][:ranks])[mine]
                total[mine] += round_trip(there.reshape(1, -1), plan.sum_wire, torch.float32).view(
                    there.shape
                )
        return total.to(plan.reduce_dtype)

    def program(self, graph: fx.Graph, phase: str) -> tuple[Program, Any]:
        kept: dict[str, dict[str, int]] = {OWNER: {}}
        # As what is lowered is: no code is written for the whole of it.
        emitted = emit(_LazyGraphModule(torch.nn.Module(), graph), self.plans, phase, kept)
        return emitted.program, emitted

    def ranks(self) -> list[Rank]:
        """The ranks with their chunks at rest."""
        full = self.weights()
        return [
            Rank({ref: self.layout(ref).shard_rows(full[ref.name], k).view(-1) for ref in self.plans})
            for k in range(self.world)
        ]

    def by_reference(
        self, graph: fx.Graph, phase: str, ranks: Sequence[Rank] | None = None
    ) -> list[list[Any]]:
        """What a scheduled graph computes on every rank, through its Program.

        Args:
            ranks: with what earlier Programs have left there; None: new ones.
        """
        program, emitted = self.program(graph, phase)
        full = self.weights()
        layouts = {ref: self.layout(ref) for ref in self.plans}
        ranks = self.ranks() if ranks is None else ranks
        inputs = []
        for k, batch in enumerate(self.batches()):
            # Shards come first: they are placeholders before the inputs.
            rows = [
                lay.shard_rows(full[ref.name], k)[: lay.rows(k)] if lay.sharded else full[ref.name]
                for ref, lay in layouts.items()
            ]
            inputs.append([*rows, *batch])
        return Reference(program, [_aten(s) for s in emitted.segments], layouts, ranks).run(inputs)


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


def two_products() -> tuple[Build, Build]:
    """Forward and backward of two products with a tanh between, of which both hand something on."""
    forward = Build(w1=(8, 1024), w2=(4, 8))
    v = forward.input("primals_1", 256, 1024)
    a = forward.op(aten.mm.default, v, forward.op(aten.t.default, forward.weight("w1")))
    act = forward.op(aten.tanh.default, a)
    y = forward.op(aten.mm.default, act, forward.op(aten.t.default, forward.weight("w2")))
    forward.done(y, forward.shards["w2"], act)
    backward = Build(w2=(4, 8))
    back, tangent = backward.input(act.name, 256, 8), backward.input("tangents_1", 256, 4)
    dact = backward.op(aten.mm.default, tangent, backward.weight("w2"))
    backward.done(backward.op(aten.tanh_backward.default, dact, back))
    return forward, backward


def head_graph(**kw) -> Build:
    """Joint graph of a head: the sum over tokens of logsumexp, and its gradient."""
    b = Build(w=(5, 4), **kw)
    x, tangent = b.input("x", 6, 4), b.input("tangents_1")
    w = b.weight("w")
    logits = b.op(aten.mm.default, x, b.op(aten.t.default, w))
    lse = b.op(aten.logsumexp.default, logits, [1])
    total = b.op(aten.sum.default, lse)
    each = b.op(aten.unsqueeze.default, b.op(aten.expand.default, tangent, [6]), 1)
    p = b.op(aten.exp.default, b.op(aten.sub.Tensor, logits, b.op(aten.unsqueeze.default, lse, 1)))
    grad = b.op(aten.mul.Tensor, each, p)
    dx = b.op(aten.mm.default, grad, w)
    dw = b.op(aten.mm.default, b.op(aten.t.default, grad), x)
    b.done(total, dx, b.reduced("w", dw))
    return b


def columns_first_graph(**kw) -> Build:
    """The same of [batch, columns, tokens]."""
    b = Build(w=(5, 4), **kw)
    x, tangent = b.input("x", 6, 4), b.input("tangents_1")
    w = b.weight("w")
    logits = b.op(aten.view.default, b.op(aten.mm.default, x, b.op(aten.t.default, w)), [2, 3, 5])
    columns = b.op(aten.transpose.int, logits, 1, 2)
    lse = b.op(aten.logsumexp.default, columns, [1])
    total = b.op(aten.sum.default, lse)
    each = b.op(aten.unsqueeze.default, b.op(aten.expand.default, tangent, [2, 3]), 1)
    p = b.op(aten.exp.default, b.op(aten.sub.Tensor, columns, b.op(aten.unsqueeze.default, lse, 1)))
    grad = b.op(aten.mul.Tensor, each, p)
    flat = b.op(aten.reshape.default, b.op(aten.transpose.int, grad, 1, 2), [6, 5])
    dx = b.op(aten.mm.default, flat, w)
    dw = b.op(aten.mm.default, b.op(aten.t.default, flat), x)
    b.done(total, dx, b.reduced("w", dw))
    return b


def linear_graph(world: int, rows: int, form: str = "linear", out: int = 8, inner: int = 6) -> Build:
    """Forward and backward of one linear layer in one graph; ``form`` names how its operators are written."""
    b = Build(
        world=world, tile_rows={"w": rows}, w=(inner, out) if form == "conv1d" else (out, inner), b=(out,)
    )
    x, g = b.input("x", 4, inner), b.input("g", 4, out)
    w, bias = b.weight("w"), b.weight("b")
    wt = w if form == "conv1d" else b.op(aten.t.default, w)
    if form == "mm":
        y = b.op(aten.mm.default, x, wt)
    else:
        y = b.op(aten.addmm.default, bias, x, wt)
    dx = b.op(aten.mm.default, g, b.op(aten.t.default, wt))
    if form == "conv1d":
        dw = b.op(aten.mm.default, b.op(aten.t.default, x), g)
    elif form == "linear":
        dw = b.op(aten.t.default, b.op(aten.mm.default, b.op(aten.t.default, x), g))
    else:
        dw = b.op(aten.mm.default, b.op(aten.t.default, g), x)
    b.done(y, dx, b.reduced("w", dw))
    return b


def lower(build: Build, phase: str, upto: str | None = None, **fields: Any) -> fx.Graph:
    """Run the passes of a phase, through the one named ``upto``; the verifier runs after each."""
    options, context = told(build, phase, fields)
    run_passes(build.graph, upto_pass(phase_passes(options), upto), context)
    return build.graph


def lower_joint(build: Build, upto: str | None = None, **fields: Any) -> fx.Graph:
    """The same with the passes of a joint graph."""
    options, context = told(build, "joint", fields)
    run_passes(build.graph, upto_pass(joint_passes(options), upto), context)
    return build.graph


def told(build: Build, phase: str, fields: dict[str, Any]) -> tuple[PassOptions, Context]:
    """``fields`` as options of passes, and the facts of the graph."""
    chosen = {n for n in PassOptions.__dataclass_fields__ if n in fields}
    options = PassOptions(**{n: fields[n] for n in chosen})
    rest = {n: v for n, v in fields.items() if n not in chosen}
    return options, build.context(phase, options.bucket_bytes, **rest)


def upto_pass(pipeline: Any, upto: str | None) -> Any:
    """``pipeline`` through the pass named ``upto``; None: all of it."""
    names = [p.name for p, _ in pipeline]
    return pipeline if upto is None else pipeline[: names.index(upto) + 1]


def find(b: Build, target: Any, k: int = 0) -> fx.Node:
    """The call number ``k`` of an operator."""
    return list(b.graph.find_nodes(op="call_function", target=target))[k]


def check_numbers(build: Build, phase: str, **fields: Any) -> None:
    """The graph means the same on every rank before and after all passes."""
    want = build.by_markers(build.graph)
    got = build.by_reference(lower(build, phase, **fields), phase)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def names_of(graph: fx.Graph) -> list[str]:
    """Operators in order, without placeholders and elements."""
    out = []
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            out.append(dump.target_text(node))
    return out
