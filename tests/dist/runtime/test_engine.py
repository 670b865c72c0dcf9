"""The C++ engine on gloo ranks: gathers and reductions against what plain torch makes of the same tensors."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from dist.spawn import run_ranks

from zero_compiler.runtime import _C

pytestmark = [pytest.mark.dist, pytest.mark.alone]

# Even rows, uneven rows, fewer rows than ranks, a vector, and a size at which gloo sends in several pieces.
SHAPES = [(6, 4), (7, 3), (1, 5), (5,), (333, 211)]
CPU = torch.device("cpu")


def chunk_numel(shape, world):
    return -(-shape[0] // world) * torch.Size(shape[1:]).numel()


def cut(full, world, rank):
    """The rank's padded chunk, flat: the layout that FSDP2 uses."""
    chunk = chunk_numel(full.shape, world)
    padded = torch.zeros(world * chunk, dtype=full.dtype)
    padded[: full.numel()] = full.reshape(-1)
    return padded[rank * chunk : (rank + 1) * chunk].clone()


class Planner:
    """Offsets one after the other, each on a 4096-byte boundary."""

    def __init__(self):
        self.end = 0

    def take(self, nbytes):
        offset = self.end
        self.end += -(-nbytes // 4096) * 4096
        return offset


def add_gather(engine, arena, plan, shapes, world, dtype, label="bucket"):
    size = dtype.itemsize
    chunks = [chunk_numel(shape, world) for shape in shapes]
    params = [(chunk, list(shape), plan.take(world * chunk * size)) for chunk, shape in zip(chunks, shapes)]
    total = sum(chunks)
    staging = plan.take((total if len(shapes) == 1 else total * (world + 1)) * size)
    return engine.add_gather(arena, dtype, label, params, staging)


def add_reduce(engine, arena, plan, shapes, world, dtype, out_dtype, label="bucket", divisor=None):
    total = sum(chunk_numel(shape, world) for shape in shapes)
    staging = plan.take(total * (world + 1) * dtype.itemsize)
    params = [(chunk_numel(shape, world), list(shape)) for shape in shapes]
    return engine.add_reduce(arena, dtype, label, params, staging, False, out_dtype, float(divisor or world))


def grads_of(shape, world, dtype, seed=0):
    """Every rank's gradient: each rank knows them all, so that it can compute what must come out."""
    return [
        torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + k)).to(dtype)
        for k in range(world)
    ]


def mean_chunk(grads, rank, world, dtype, out_dtype):
    """The sum in the order of the ranks and one true division, in `dtype`; the cast comes last."""
    total = grads[0].to(dtype)
    for grad in grads[1:]:
        total = total + grad.to(dtype)
    return cut(total / world, world, rank).to(out_dtype)


def gathers(rank, world):
    engine = _C.Engine(dist.group.WORLD, rank, world)
    arena = engine.add_arena(1 << 23, CPU)
    plan = Planner()
    torch.manual_seed(0)
    fulls = [torch.randn(shape) for shape in SHAPES]
    bucket = add_gather(engine, arena, plan, SHAPES, world, torch.float32)
    cast = add_gather(engine, arena, plan, SHAPES, world, torch.bfloat16)
    alone = [add_gather(engine, arena, plan, [shape], world, torch.float32) for shape in SHAPES]
    alone_cast = [add_gather(engine, arena, plan, [shape], world, torch.bfloat16) for shape in SHAPES]
    shards = [cut(full, world, rank) for full in fulls]
    seen = None
    for _ in range(3):
        # All in flight at once, and waited for in another order.
        engine.gather_start(bucket, shards)
        engine.gather_start(cast, shards)
        for number, other, shard in zip(alone, alone_cast, shards):
            engine.gather_start(number, [shard])
            engine.gather_start(other, [shard])
        for number, other, full in reversed(list(zip(alone, alone_cast, fulls))):
            (wide,) = engine.gather_wait(number)
            (narrow,) = engine.gather_wait(other)
            assert torch.equal(wide, full)
            assert torch.equal(narrow, full.to(torch.bfloat16))
        narrow = engine.gather_wait(cast)
        wide = engine.gather_wait(bucket)
        assert all(map(torch.equal, wide, fulls))
        assert all(torch.equal(a, b.to(torch.bfloat16)) for a, b in zip(narrow, fulls))
        assert seen is None or all(a is b for a, b in zip(wide, seen))
        seen = wide
        for number in [bucket, cast, *alone, *alone_cast]:
            engine.release(number)
    counters = engine.counters()
    assert counters["allocations"] == 1
    assert counters["gathers"] == 3 * (2 + 2 * len(SHAPES))
    return counters["bytes_gathered"]


@pytest.mark.parametrize("world", [2, 3])
def test_gathers_equal_the_full_tensors(world):
    sent = sum(chunk_numel(shape, world) for shape in SHAPES) * world * (2 * 4 + 2 * 2) * 3
    assert run_ranks(gathers, world) == [sent] * world


def other_dtypes(rank, world):
    engine = _C.Engine(dist.group.WORLD, rank, world)
    arena = engine.add_arena(1 << 16, CPU)
    plan = Planner()
    for dtype in [torch.float8_e4m3fn, torch.bool, torch.float64, torch.int64, torch.complex64]:
        full = torch.arange(15).reshape(5, 3).to(dtype)
        number = add_gather(engine, arena, plan, [(5, 3)], world, dtype)
        engine.gather_start(number, [cut(full, world, rank)])
        (got,) = engine.gather_wait(number)
        assert torch.equal(got.view(torch.uint8), full.view(torch.uint8))


def test_gathers_any_dtype():
    run_ranks(other_dtypes, 2)


def reductions(rank, world, grad_dtype, dtype, out_dtype):
    engine = _C.Engine(dist.group.WORLD, rank, world)
    arena = engine.add_arena(1 << 23, CPU)
    plan = Planner()
    bucket = add_reduce(engine, arena, plan, SHAPES, world, dtype, out_dtype)
    alone = [add_reduce(engine, arena, plan, [shape], world, dtype, out_dtype) for shape in SHAPES]
    warm = None
    for step in range(4):
        every = [grads_of(shape, world, grad_dtype, step) for shape in SHAPES]
        mine = [grads[rank] for grads in every]
        # The same values in another layout: what a transposed matmul leaves.
        if step == 3:
            mine = [g.t().contiguous().t() if g.dim() == 2 else g for g in mine]
        before = [g.clone() for g in mine]
        engine.reduce_start(bucket, mine)
        for number, grad in zip(alone, mine):
            engine.reduce_start(number, [grad])
        want = [mean_chunk(grads, rank, world, dtype, out_dtype) for grads in every]
        got = engine.reduce_wait(bucket)
        lone = [engine.reduce_wait(number)[0] for number in alone]
        for expected, a, b in zip(want, got, lone):
            assert a.dtype == b.dtype == out_dtype
            assert a.shape == b.shape == expected.shape
            assert torch.equal(a, expected)
            assert torch.equal(b, expected)
        assert all(map(torch.equal, mine, before)), "the gradients were overwritten"
        del got, lone, a, b
        if step == 0:
            warm = engine.counters()["allocations"]
    counters = engine.counters()
    assert counters["allocations"] == warm
    assert counters["recycled"] == 3 * 2 * len(SHAPES)
    assert counters["scratch_bytes"] == 0 or world > 2


# (of the gradients, of the sum, of the result)
DTYPES = [
    (torch.float32, torch.float32, torch.float32),
    (torch.bfloat16, torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
]


def all_reductions(rank, world):
    for dtypes in DTYPES:
        reductions(rank, world, *dtypes)


@pytest.mark.parametrize("world", [2, 3])
def test_reductions_equal_sum_and_true_division(world):
    run_ranks(all_reductions, world)


def replicated(rank, world):
    engine = _C.Engine(dist.group.WORLD, rank, world)
    arena = engine.add_arena(1 << 16, CPU)
    shapes = [(), (3, 2), (0, 4)]
    params = [(torch.Size(shape).numel(), list(shape)) for shape in shapes]
    bucket = engine.add_reduce(arena, torch.float32, "scalars", params, 0, True, torch.bfloat16, float(world))
    alone = engine.add_reduce(
        arena, torch.float32, "scale", params[:1], -1, True, torch.float32, float(world)
    )
    for step in range(2):
        every = [grads_of(shape, world, torch.bfloat16, step) for shape in shapes]
        engine.reduce_start(bucket, [grads[rank] for grads in every])
        engine.reduce_start(alone, [every[0][rank]])
        for shape, grads, out in zip(shapes, every, engine.reduce_wait(bucket)):
            assert out.shape == shape
            assert torch.equal(out, (sum(g.float() for g in grads) / world).to(torch.bfloat16))
        (out,) = engine.reduce_wait(alone)
        assert torch.equal(out, sum(g.float() for g in every[0]) / world)


def test_replicated_gradients_are_all_reduced():
    run_ranks(replicated, 3)


def not_finite(rank, world):
    engine = _C.Engine(dist.group.WORLD, rank, world)
    arena = engine.add_arena(1 << 16, CPU)
    reduce = add_reduce(engine, arena, Planner(), [(4,), (3,)], world, torch.float32, torch.float32)
    grad = torch.tensor([float("inf"), float("nan"), 1.0, -float("inf")]) if rank else torch.ones(4)
    engine.reduce_start(reduce, [grad, torch.ones(3)])
    chunk, rest = engine.reduce_wait(reduce)
    # Three rows on two ranks: the pad row is zero, whatever lay in the staging area before.
    return chunk.tolist(), rest.tolist()


def test_values_that_are_not_finite_pass_through():
    (first, ones), (second, padded) = run_ranks(not_finite, 2)
    assert first[0] == float("inf")
    assert first[1] != first[1]
    assert second == [1.0, -float("inf")]
    assert ones == [1.0, 1.0]
    assert padded == [1.0, 0.0]


def no_memory(rank, world):
    _C.meter_install()
    engine = _C.Engine(dist.group.WORLD, rank, world)
    arena = engine.add_arena(1 << 23, CPU)
    plan = Planner()
    shapes = [(512, 512), (100, 7)]
    gather = add_gather(engine, arena, plan, shapes, world, torch.float32)
    lone_gather = add_gather(engine, arena, plan, shapes[:1], world, torch.float32)
    reduce = add_reduce(engine, arena, plan, shapes, world, torch.float32, torch.float32)
    lone_reduce = add_reduce(engine, arena, plan, shapes[:1], world, torch.float32, torch.float32)
    shards = [torch.ones(chunk_numel(shape, world)) for shape in shapes]
    grads = [torch.ones(shape) for shape in shapes]
    peaks = []
    for _ in range(3):
        start = _C.meter_current()
        _C.meter_reset_peak()
        engine.gather_start(gather, shards)
        engine.gather_start(lone_gather, shards[:1])
        engine.reduce_start(reduce, grads)
        engine.reduce_start(lone_reduce, grads[:1])
        engine.gather_wait(gather)
        engine.gather_wait(lone_gather)
        engine.release(gather)
        engine.release(lone_gather)
        engine.reduce_wait(reduce)
        engine.reduce_wait(lone_reduce)
        peaks.append(_C.meter_peak() - start)
    return peaks


@pytest.mark.parametrize("world", [2, 3])
def test_a_step_allocates_nothing_once_it_is_warm(world):
    for peaks in run_ranks(no_memory, world):
        assert peaks[0] >= 1 << 23
        # A few bytes: the vectors that c10d makes of its arguments hold no tensors' memory.
        assert peaks[1:] == [0, 0]


def two_engines(rank, world):
    """Two models in one process: each has its own arena, numbers and states."""
    torch.manual_seed(0)
    fulls = [torch.randn(7, 3), torch.randn(4, 4)]
    engines = [_C.Engine(dist.group.WORLD, rank, world) for _ in fulls]
    numbers = []
    for engine, full in zip(engines, fulls):
        arena = engine.add_arena(1 << 14, CPU)
        numbers.append(add_gather(engine, arena, Planner(), [full.shape], world, torch.float32))
    for _ in range(2):
        for engine, number, full in zip(engines, numbers, fulls):
            engine.gather_start(number, [cut(full, world, rank)])
        for engine, number, full in reversed(list(zip(engines, numbers, fulls))):
            assert torch.equal(engine.gather_wait(number)[0], full)
            engine.release(number)
    engines[0].close()
    engines[1].gather_start(numbers[1], [cut(fulls[1], world, rank)])
    assert torch.equal(engines[1].gather_wait(numbers[1])[0], fulls[1])


def test_two_engines_in_one_process():
    run_ranks(two_engines, 2)


def lose_a_peer(rank, world):
    engine = _C.Engine(dist.group.WORLD, rank, world)
    arena = engine.add_arena(1 << 16, CPU)
    plan = Planner()
    gather = add_gather(engine, arena, plan, [(6, 4)], world, torch.float32, "layers.0.wq")
    reduce = add_reduce(engine, arena, plan, [(6, 4)], world, torch.float32, torch.float32, "layers.0.wq")
    shard = torch.ones(chunk_numel((6, 4), world))
    engine.gather_start(gather, [shard])
    engine.gather_wait(gather)
    engine.release(gather)
    dist.barrier()
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    messages = []
    for attempt in (
        lambda: (engine.gather_start(gather, [shard]), engine.gather_wait(gather)),
        lambda: engine.reduce_start(reduce, [torch.ones(6, 4)]),
        lambda: engine.leave(),
        lambda: engine.release(gather),
    ):
        try:
            attempt()
        except RuntimeError as error:
            messages.append((type(error).__name__, str(error)))
    seconds = time.monotonic() - begin
    engine.close()
    return messages, seconds


@pytest.mark.parametrize("world", [2, 3])
def test_a_killed_peer_is_an_error_and_not_a_hang(world):
    survivors = run_ranks(lose_a_peer, world, may_die={world - 1}, group_timeout=20.0)[:-1]
    for rank, (messages, seconds) in enumerate(survivors):
        kind, text = messages[0]
        assert kind == "TransferError"
        assert text.startswith(f"gather 'layers.0.wq' failed on rank {rank} of {world} (gloo): ")
        assert messages == [messages[0]] * 4, "the same reason, at once"
        assert seconds < 15.0


def leave_a_peer_alone(rank, world, done):
    engine = _C.Engine(dist.group.WORLD, rank, world)
    arena = engine.add_arena(1 << 16, CPU)
    gather = add_gather(engine, arena, Planner(), [(6, 4)], world, torch.float32, "wq")
    if rank == 0:
        engine.gather_start(gather, [torch.ones(12)])
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match="gather 'wq' failed on rank 0 of 2"):
            engine.gather_wait(gather)
        done.touch()
        return time.monotonic() - begin
    while not done.exists():
        time.sleep(0.05)
    return None


def test_a_peer_that_never_comes_is_a_timeout(tmp_path):
    waited, _ = run_ranks(leave_a_peer_alone, 2, tmp_path / "done", group_timeout=2.0)
    assert waited > 1.0


def close_in_flight(rank, world):
    engine = _C.Engine(dist.group.WORLD, rank, world)
    arena = engine.add_arena(1 << 22, CPU)
    gather = add_gather(engine, arena, Planner(), [(512, 512)], world, torch.float32)
    if rank == 0:
        engine.gather_start(gather, [torch.ones(chunk_numel((512, 512), world))])
        engine.close()  # the memory must outlive what gloo still does with it
        del engine
        time.sleep(0.5)
    return True


def test_closing_with_a_transfer_in_flight():
    assert run_ranks(close_in_flight, 2) == [True, True]


def wait_without_the_gil(rank, world):
    import threading

    engine = _C.Engine(dist.group.WORLD, rank, world)
    arena = engine.add_arena(1 << 16, CPU)
    gather = add_gather(engine, arena, Planner(), [(6, 4)], world, torch.float32)
    if rank == 1:
        time.sleep(1.0)
    ticks = []
    stop = threading.Event()

    def tick():
        while not stop.wait(0.01):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    engine.gather_start(gather, [torch.ones(12)])
    engine.gather_wait(gather)
    stop.set()
    thread.join()
    return len(ticks)


def test_a_wait_lets_other_threads_run():
    assert run_ranks(wait_without_the_gil, 2)[0] > 10
