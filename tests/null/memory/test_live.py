"""The plan's live bytes against a simulation that allocates: small graphs, by brute force."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import thorough
from null.graphs import OWNER, Build, lower, two_layers, two_layers_backward
from null.ir.test_program import planned
from torch import fx, nn

import zero_compiler as zero
from zero_compiler.emit.no_sync_program import most_accumulating
from zero_compiler.ir import facts, ops
from zero_compiler.ir.instructions import Compute, Gather, Reduce, Release, WaitGather, WaitReduce
from zero_compiler.ir.program import Program
from zero_compiler.ir.transfers import GatherDesc, ReduceDesc
from zero_compiler.memory.live import idle_bytes, moments, most, waiting_of
from zero_compiler.memory.peak_check import recount
from zero_compiler.memory.segment_graph import SegmentGraph
from zero_compiler.memory.segment_peak import peak_inside
from zero_compiler.runtime import _C


class Allocations:
    """Bytes of the storages that are alive, each counted once."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.peak = 0

    def seen(self, value: torch.Tensor) -> torch.Tensor:
        storage = value.untyped_storage()
        key = storage._cdata
        if key not in self.live:
            self.live[key] = storage.nbytes()
            weakref.finalize(storage, self.live.pop, key, None)
        self.peak = max(self.peak, self.now)
        return value

    @property
    def now(self) -> int:
        return sum(self.live.values())


class Watching(fx.Interpreter):
    """Runs a segment node by node, dropping values after their last use."""

    def __init__(self, gm: fx.GraphModule, allocations: Allocations, given: set[int]) -> None:
        super().__init__(gm)
        self.allocations, self.given = allocations, given

    def run_node(self, n: fx.Node):
        out = super().run_node(n)
        if n.op == "call_function" and isinstance(out, torch.Tensor):
            storage = out.untyped_storage()
            if storage._cdata not in self.given:
                self.allocations.seen(out)
        return out


def simulate(program: Program, emitted, inputs: list, weights: dict[str, torch.Tensor]) -> list[int]:
    """Most bytes alive during each instruction, with the arena and without inputs and weights."""
    allocations = Allocations()
    env: dict[int, torch.Tensor] = dict(enumerate(inputs))
    given = {t.untyped_storage()._cdata for t in (*inputs, *weights.values())}
    rows = []
    in_flight: dict[int, list] = {}

    def take(desc: GatherDesc) -> list[torch.Tensor]:
        return [weights[n] for n in desc.names]

    for instr in program.instrs:
        allocations.peak = allocations.now
        if isinstance(instr, Compute):
            args = [env[i] for i in instr.ins]
            for i in instr.free:
                env.pop(i, None)
            outs = Watching(emitted.segments[instr.segment].gm, allocations, given).run(*args)
            del args
            env |= dict(zip(instr.outs, outs, strict=True))
            del outs
        elif isinstance(instr, WaitGather):
            env |= dict(zip(instr.outs, take(program.gathers[instr.index]), strict=True))
        elif isinstance(instr, Reduce):
            # The engine reads a lone gradient where it lies; a bucket is copied into the arena.
            in_flight[instr.index] = [env[i] for i in instr.ins] if len(instr.ins) == 1 else []
            for i in instr.free:
                env.pop(i, None)
        elif not isinstance(instr, (Gather, Release)):
            r = program.reduces[instr.index]
            for v, numel in zip(instr.outs, r.chunk_numels, strict=True):
                env[v] = allocations.seen(torch.zeros(numel))
            in_flight.pop(instr.index)
        rows.append(program.transient_bytes + max(allocations.peak, allocations.now))
    return rows


@pytest.mark.parametrize("bucket_bytes", [0, 1 << 20])
@pytest.mark.parametrize(("build", "phase"), [(two_layers, "forward"), (two_layers_backward, "backward")])
def test_live_bytes_bound_what_a_run_allocates(build, phase, bucket_bytes):
    b: Build = build()
    program, emitted = b.program(lower(b, phase, bucket_bytes=bucket_bytes), phase)
    weights = b.weights()
    assert {g.owner for g in program.gathers} == {OWNER}
    shards = [torch.zeros(1) for _ in b.plans]
    measured = simulate(program, emitted, [*shards, *b.batches()[0]], weights)
    saved = 0
    if phase == "backward":  # what forward saved counts; here all inputs stand for it
        saved = sum(t.nbytes for t in b.batches()[0]) + sum(
            b.layout(ref).shard_rows(weights[ref.name], 0).nbytes for ref in b.plans
        )
    counted = [program.buffer_bytes + sum(row) for row in recount(program)]
    lines = program.text().splitlines()
    for line, bound, again, real in zip(lines, program.live, counted, measured, strict=True):
        assert real <= again <= bound, f"{line}: a run has {real}, counted again {again}, planned {bound}"
    # And it is no wild guess: the worst instant is met within what the batch and saved values add.
    assert max(program.live) <= max(measured) + saved + 64, (program.live, measured)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"stage": 2}, {"param_dtype": "bf16"}, {"stage": 0}])
@pytest.mark.parametrize("world", [*thorough(1), 2])
def test_the_plan_and_the_verifier_count_alike(world, fields):
    for frame in planned(world=world, batch=(4, 9), **fields):
        for program in frame.programs.values():
            counted = [program.buffer_bytes + sum(row) for row in recount(program)]
            for line, planned_, again in zip(program.text().splitlines(), program.live, counted, strict=True):
                assert again <= planned_, f"{line}: {again} bytes, planned {planned_}"
            assert max(counted) == max(program.live)


def reducing(phase: str, rows: list[tuple[int, int]]) -> Program:
    """A Program with one reduction for each (elements of the gradient, bytes of all else while it is waited for)."""
    instrs: list = []
    reduces, live, made = [], [], 0
    for k, (numel, others) in enumerate(rows):
        reduces.append(
            ReduceDesc(OWNER, (f"w{k}",), ((numel,),), (numel,), "float32", "float32", False, 0, "", True)
        )
        instrs += [Reduce(k, (), ()), WaitReduce(k, ())]
        live += [others + made, others + made + 4 * numel]
        made += 4 * numel
    return Program(phase, 0, 0, instrs, [], [], reduces, [], 0, live=live)


@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 400)), min_size=1, max_size=5),
)
@settings(max_examples=300, deadline=None)
def test_as_many_storages_of_gradients_wait_as_raise_no_peak(before, rows):
    forward, backward = reducing("forward", []), reducing("backward", rows)
    forward = dataclasses.replace(forward, instrs=[Compute(0, (), (), ())] * len(before), live=before)
    gradients = 4 * sum(numel for numel, _ in rows)
    peak = max(most(p, gradients) for p in (forward, backward))
    made, without = 0, []
    for numel, others in rows:
        without += [(others, made), (others, made + 4 * numel)]
        made += 4 * numel
    assert peak == max(*before, *(others + born for others, born in without))

    def held(idle: int) -> int:
        return max(*(b + idle for b in before), *(o + min(gradients, born + idle) for o, born in without))

    idle = idle_bytes([forward, backward], gradients, peak)
    assert held(idle) <= peak
    assert idle == gradients or held(idle + 1) > peak


@pytest.mark.slow
@given(st.data())
@settings(max_examples=300, deadline=None)
def test_memory_of_results_that_pass_is_counted(data):
    """Beside a pool that gives back what waits before it takes more (``Recycler`` in csrc), one for each owner."""
    tiers, ranks, count = ("nvme",), data.draw(st.sampled_from([1, 2])), data.draw(st.integers(1, 8))
    copies = data.draw(st.sampled_from([1, 2]))
    reduces = [
        ReduceDesc(
            data.draw(st.sampled_from(["a", "b"])),
            (f"w{k}",),
            ((numel,),),
            (numel,),
            data.draw(st.sampled_from(["float32", "bfloat16"])),
            "float32",
            False,
            0,
            "",
            shared=data.draw(st.booleans()),
            tiers=data.draw(st.sampled_from([(), tiers])),
            copies=copies,
        )
        for k in range(count)
        for numel in [data.draw(st.integers(1, 3)) * 100]
    ]
    order = data.draw(st.permutations([k for k in range(count) for _ in range(2)]))
    begun: set[int] = set()
    instrs = [WaitReduce(k, ()) if k in begun or begun.add(k) else Reduce(k, (), ()) for k in order]
    program = Program(
        "backward", 0, 0, instrs, [], [], reduces, [], 0, slots_ranks=ranks, live=[0] * len(instrs)
    )
    live: dict[str, list[int]] = {"a": [], "b": []}
    idle: dict[str, list[int]] = {"a": [], "b": []}
    seen: set[int] = set()
    summing: list[tuple[str, int]] = []  # between ranks with the same rows, until the next wait
    waits = waiting_of(program)
    for at, instr in enumerate(instrs):
        r, first = reduces[instr.index], instr.index not in seen
        seen.add(instr.index)
        cast_last = copies > 1 and r.dtype != r.out_dtype
        early = (r.dtype == "float32" or cast_last) and not r.shared and ranks > 1
        itself = ranks == 1 and copies == 1 and r.dtype == "float32"
        pooled = (bool(r.tiers) or cast_last) and not itself
        nbytes = r.chunk_numels[0] * 2 if cast_last else r.result_bytes
        if not first:
            for owner, summed in summing:
                live[owner].remove(summed)
                idle[owner].append(summed)
            summing.clear()
        if pooled and first == early:
            if nbytes in idle[r.owner]:
                idle[r.owner].remove(nbytes)
            else:
                idle[r.owner].clear()
            live[r.owner].append(nbytes)
        assert sum(map(sum, idle.values())) <= waits[at]
        assert moments(program)[at].others - moments(program, waiting=False)[at].others == waits[at]
        if pooled and not first and copies > 1:
            summing.append((r.owner, nbytes))
        elif pooled and not first:
            live[r.owner].remove(nbytes)
            idle[r.owner].append(nbytes)
    if not any(r.tiers or r.cast_last for r in reduces):
        assert not any(waits)


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 400)), min_size=1, max_size=5),
    st.lists(st.integers(0, 400), min_size=1, max_size=4),
    st.sampled_from(["bfloat16", "float32"]),
)
@settings(max_examples=300, deadline=None)
def test_full_gradients_wait_from_one_backward_to_the_next(rows, before, summed_in):
    forward, backward = reducing("forward", []), reducing("backward", rows)
    forward = dataclasses.replace(forward, instrs=[Compute(0, (), (), ())] * len(before), live=before)
    backward.reduces[:] = [dataclasses.replace(r, dtype=summed_in) for r in backward.reduces]
    item = 2 if summed_in == "bfloat16" else 4
    full, gradients = (sum(n * numel for numel, _ in rows) for n in (item, 4))
    worst = 0
    waits: dict[int, int] = {}
    for last in (False, False, True):  # three micro-batches; the last one reduces
        worst = max(worst, *(b + sum(waits.values()) for b in before))
        made = 0
        for k, (numel, others) in enumerate(rows):
            waits[k] = item * numel
            if last:
                made += 4 * numel
            worst = max(worst, others + sum(waits.values()) + made)
            if last:
                del waits[k]
    assert max(most_accumulating(p, gradients, full) for p in (forward, backward)) == worst


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("transposed", [False, True])
def test_what_a_product_by_onednn_holds_while_it_runs_is_counted(transposed):
    rows = torch.randn(256, 2048).t() if transposed else torch.randn(2048, 256)
    weight = torch.randn(512, 256)
    graph = torch.fx.Graph()
    left, right = graph.placeholder("left"), graph.placeholder("right")
    product = graph.call_function(ops.onednn_linear, (left, right, None))
    graph.output((product,))
    _C.meter_install()
    ops.onednn_linear(rows, weight, None)
    before = _C.meter_current()
    _C.meter_reset_peak()
    out = ops.onednn_linear(rows, weight, None)
    held = _C.meter_peak() - before
    for node, value in ((left, rows), (right, weight), (product, out)):
        facts.set_value(node, value)
    segment = SegmentGraph.of(torch.nn.Module(), graph)
    assert held <= peak_inside(segment, [False, False])
    assert not transposed or held >= rows.nbytes + out.nbytes


class Attend(nn.Module):
    """Saves v, a view of the product that made q, k and v, and of these only what came after."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(4, 128, 3, 1, 64).permute(2, 0, 3, 1, 4)
        q, k = torch.cat((-q[..., 32:], q[..., :32]), -1), torch.cat((-k[..., 32:], k[..., :32]), -1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v)).sum()


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["aten", "inductor"])
def test_a_saved_view_counts_with_the_storage_that_it_keeps(compute):
    model = zero.shard(Attend(), stage=3)
    call = torch.compile(model, backend="zero", options={"compute": compute})
    x = torch.randn(4, 128, 64)
    call(x).backward()  # compiles
    _C.meter_install()
    model.zero_grad()
    before = _C.meter_current()
    loss = call(x)
    held = _C.meter_current() - before
    (frame,) = zero.inspect(model).frames
    backward = frame.programs["backward"]
    piece = x.nbytes
    assert held > 5 * piece  # q, k and the output, and v with what was q and k
    assert isinstance(backward.instrs[0], Gather)
    # The plan counts a view of x as if forward had made it.
    assert held - loss.nbytes <= backward.live[0] - backward.buffer_bytes <= held + piece
    loss.backward()


class Outputs(nn.Module):
    """Returns more than it holds, and has its largest gradient last."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.out = nn.Embedding(1 << 16, 16), nn.Linear(16, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.rows(tokens))


def test_gradients_that_backward_is_given_count_until_it_ends():
    """Autograd holds them for as long."""
    call = torch.compile(zero.shard(Outputs(), stage=3), backend="zero", options={"compute": "aten"})
    tokens = torch.randint(1 << 16, (4096,))

    call(tokens).square().mean().backward()  # compiles
    call.zero_grad()
    _C.meter_install()
    before = _C.meter_current()
    out = call(tokens)
    out.register_hook(lambda grad: _C.meter_reset_peak())  # what eager code took until here is gone
    out.square().mean().backward()
    held = _C.meter_peak() - before - out.nbytes  # the caller's
    (frame,) = zero.inspect(call).frames
    planned = max(frame.programs["backward"].live)
    assert out.nbytes < planned - 4 * call.rows.weight.numel()
    assert planned - (1 << 17) <= held <= planned + 4096


class Cut(nn.Module):
    """Two frames, with ``between`` called on what the first gives."""

    def __init__(self, between) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.between = torch._dynamo.disable(between, reason="a break")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        self.between(h)
        return self.second(h).sum()


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_nothing_keeps_what_a_frame_was_compiled_with(training):
    seen = []
    call = torch.compile(
        zero.shard(Cut(lambda h: seen.append(weakref.ref(h))), stage=3),
        backend="zero",
        options={"compute": "aten"},
    )
    x = torch.randn(4, 8)
    seen.append(weakref.ref(x))
    with torch.set_grad_enabled(training):
        loss = call(x)
    if training:
        loss.backward()
    del x, loss
    gc.collect()  # Dynamo leaves cycles
    assert [ref() for ref in seen] == [None, None]
