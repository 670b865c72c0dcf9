"""The C++ engine on one rank without a process group, and the allocator meter."""

from __future__ import annotations

import gc
import sys
import threading

import pytest
import torch

from zero_compiler.errors import TransferError
from zero_compiler.runtime import _C

CPU = torch.device("cpu")


@pytest.fixture
def engine():
    made = _C.Engine(None, 0, 1)
    yield made
    made.close()


@pytest.fixture
def meter():
    _C.meter_install()
    yield _C
    _C.meter_uninstall()


def gather_of(engine, shape, dtype=torch.float32, label="layers.0.wq"):
    numel = torch.Size(shape).numel()
    arena = engine.add_arena(4096, CPU)
    return engine.add_gather(arena, dtype, label, [(numel, list(shape), 0)], -1)


def reduce_of(engine, shape, *, dtype=torch.float32, out=torch.float32, divisor=1.0, replicated=False):
    numel = torch.Size(shape).numel()
    arena = engine.add_arena(4096, CPU)
    return engine.add_reduce(
        arena, dtype, "layers.0.wq", [(numel, list(shape))], -1, replicated, out, divisor
    )


def test_one_rank_gathers_by_looking_at_the_shard(engine):
    shard = torch.arange(12.0)
    gather = gather_of(engine, (4, 3))
    engine.gather_start(gather, [shard])
    (full,) = engine.gather_wait(gather)
    assert full.shape == (4, 3)
    assert full.data_ptr() == shard.data_ptr()
    engine.release(gather)
    counters = engine.counters()
    assert (counters["allocations"], counters["arena_bytes"]) == (0, 0)
    assert counters["bytes_gathered"] == 0


def test_one_rank_casts_into_the_arena(engine):
    shard = torch.arange(12.0)
    gather = gather_of(engine, (4, 3), torch.bfloat16)
    seen = set()
    for _ in range(3):
        engine.gather_start(gather, [shard])
        (full,) = engine.gather_wait(gather)
        assert torch.equal(full, shard.view(4, 3).bfloat16())
        seen.add(id(full))
        engine.release(gather)
    assert len(seen) == 1
    assert engine.counters()["allocations"] == 1


def test_a_view_of_a_parameter_is_no_part_of_its_graph(engine):
    shard = torch.nn.Parameter(torch.arange(12.0))
    gather = gather_of(engine, (4, 3))
    engine.gather_start(gather, [shard])
    (full,) = engine.gather_wait(gather)
    assert not full.requires_grad
    assert full.data_ptr() == shard.data_ptr()


def test_one_rank_reduces_by_handing_the_gradient_on(engine):
    grad = torch.randn(4, 3)
    reduce = reduce_of(engine, (4, 3))
    engine.reduce_start(reduce, [grad])
    (chunk,) = engine.reduce_wait(reduce)
    assert chunk.shape == (12,)
    assert chunk.data_ptr() == grad.data_ptr()
    assert engine.counters()["allocations"] == 0


@pytest.mark.parametrize("replicated", [False, True])
def test_one_rank_converts_what_has_to_be_converted(engine, replicated):
    for grad in (torch.randn(4, 3, dtype=torch.bfloat16), torch.randn(3, 4).t()):
        for divisor in (1.0, 3.0):
            reduce = reduce_of(engine, (4, 3), divisor=divisor, replicated=replicated)
            engine.reduce_start(reduce, [grad])
            (chunk,) = engine.reduce_wait(reduce)
            want = grad.float() / divisor
            assert torch.equal(chunk, want if replicated else want.reshape(-1))
            narrow = reduce_of(engine, (4, 3), divisor=divisor, out=torch.bfloat16, replicated=replicated)
            engine.reduce_start(narrow, [grad])
            assert torch.equal(engine.reduce_wait(narrow)[0].view(4, 3), want.bfloat16())


def test_gradients_are_recycled_once_nobody_holds_them(engine):
    reduce = reduce_of(engine, (4, 3), dtype=torch.float32)
    grad = torch.ones(4, 3, dtype=torch.bfloat16)

    def step():
        engine.reduce_start(reduce, [grad])
        return engine.reduce_wait(reduce)[0]

    first = step()
    address = first.data_ptr()
    view = first[2:]
    del first
    second = step()  # a view still holds the first storage
    assert second.data_ptr() != address
    del view
    third = step()
    assert third.data_ptr() == address
    assert engine.counters()["allocations"] == 2
    assert engine.counters()["recycled"] == 1


def test_storages_of_gradients_are_given_back(engine, meter):
    reduce = reduce_of(engine, (512, 2), dtype=torch.float32)
    grad = torch.ones(512, 2, dtype=torch.bfloat16)
    before = meter.meter_current()
    engine.reduce_start(reduce, [grad])
    (chunk,) = engine.reduce_wait(reduce)
    engine.trim(0)  # it is held
    assert meter.meter_current() - before == 4096
    del chunk
    engine.trim(4096)
    assert meter.meter_current() - before == 4096
    engine.trim(4095)
    assert meter.meter_current() == before


@pytest.mark.slow
def test_gradients_held_for_ever_are_forgotten(engine, meter):
    reduce = reduce_of(engine, (512, 2), dtype=torch.float32)
    grad = torch.ones(512, 2, dtype=torch.bfloat16)
    before = meter.meter_current()
    held = []
    for _ in range(50):
        engine.reduce_start(reduce, [grad])
        held.append(engine.reduce_wait(reduce)[0])
    del held
    gc.collect()
    assert meter.meter_current() - before <= 2 * 4096, "the pool keeps two steps' worth at most"


def test_a_released_gather_can_be_scribbled_on():
    engine = _C.Engine(None, 0, 1, scribble_on_release=True)
    gather = gather_of(engine, (4, 3), torch.bfloat16)
    engine.gather_start(gather, [torch.ones(12)])
    (full,) = engine.gather_wait(gather)
    engine.release(gather)
    assert full.isnan().all()


def test_the_lock_and_the_gil_do_not_wait_for_each_other(engine):
    """The engine drops tensors that Python knows, which takes the GIL, while other threads call into it."""
    gather = gather_of(engine, (4, 3), torch.bfloat16)
    reduce = reduce_of(engine, (4, 3))
    done = threading.Event()
    interval = sys.getswitchinterval()

    def watch():
        while not done.is_set():
            engine.counters()
            engine.add_arena(0, CPU)

    watchers = [threading.Thread(target=watch, daemon=True) for _ in range(3)]
    for watcher in watchers:
        watcher.start()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(2000):
            engine.gather_start(gather, [torch.ones(12)])
            engine.reduce_start(reduce, [torch.ones(4, 3).bfloat16()])
            engine.gather_wait(gather)
            engine.release(gather)
            engine.reduce_wait(reduce)
    finally:
        sys.setswitchinterval(interval)
        done.set()
    for watcher in watchers:
        watcher.join(timeout=10)
        assert not watcher.is_alive()


# --- misuse ---


def test_calls_in_the_wrong_order_name_the_parameters(engine):
    gather = gather_of(engine, (4, 3), label="layers.0.wq, layers.0.wk")
    shard = torch.ones(12)
    name = "gather 'layers.0.wq, layers.0.wk': "
    with pytest.raises(TransferError, match=name + "waited for, but it was not started"):
        engine.gather_wait(gather)
    with pytest.raises(TransferError, match=name + "released, but it was not started"):
        engine.release(gather)
    engine.gather_start(gather, [shard])
    with pytest.raises(TransferError, match=name + "started again, but it is in flight"):
        engine.gather_start(gather, [shard])
    with pytest.raises(TransferError, match=name + "released, but it is in flight"):
        engine.release(gather)
    engine.gather_wait(gather)
    with pytest.raises(TransferError, match=name + "waited for, but it was waited for already"):
        engine.gather_wait(gather)
    with pytest.raises(TransferError, match=name + "started again, but it was not released"):
        engine.gather_start(gather, [shard])
    engine.release(gather)
    engine.gather_start(gather, [shard])

    reduce = reduce_of(engine, (4, 3))
    with pytest.raises(TransferError, match=r"reduce 'layers.0.wq': waited for, but it was not started"):
        engine.reduce_wait(reduce)
    engine.reduce_start(reduce, [torch.ones(4, 3)])
    with pytest.raises(TransferError, match=r"reduce 'layers.0.wq': started again, but it is in flight"):
        engine.reduce_start(reduce, [torch.ones(4, 3)])
    engine.reduce_wait(reduce)
    engine.reduce_start(reduce, [torch.ones(4, 3)])


def test_inputs_that_do_not_fit_the_plan(engine):
    gather = gather_of(engine, (4, 3))
    with pytest.raises(TransferError, match="got 0 shards for 1 parameters"):
        engine.gather_start(gather, [])
    with pytest.raises(TransferError, match="shard 0 must be contiguous and have 12 elements, and has 11"):
        engine.gather_start(gather, [torch.ones(11)])
    with pytest.raises(TransferError, match="shard 0 must be contiguous"):
        engine.gather_start(gather, [torch.ones(3, 4).t()])
    with pytest.raises(TransferError, match="shard 0 is not a plain tensor"):
        engine.gather_start(gather, [torch.ones(12).to_sparse()])
    reduce = reduce_of(engine, (4, 3))
    with pytest.raises(TransferError, match="gradient 0 has the wrong shape"):
        engine.reduce_start(reduce, [torch.ones(3, 4)])
    with pytest.raises(TransferError, match="gradient 0 is not floating point"):
        engine.reduce_start(reduce, [torch.ones(4, 3, dtype=torch.int64)])
    # A refused start leaves it idle.
    engine.gather_start(gather, [torch.ones(12)])
    engine.reduce_start(reduce, [torch.ones(4, 3)])


def test_plans_that_do_not_fit_are_refused(engine):
    arena = engine.add_arena(64, CPU)
    with pytest.raises(TransferError, match="no arena has the number 7"):
        engine.add_gather(7, torch.float32, "w", [(4, [4], 0)], -1)
    with pytest.raises(TransferError, match="do not hold 5 elements"):
        engine.add_gather(arena, torch.float32, "w", [(4, [5], 0)], -1)
    with pytest.raises(TransferError, match="do not cut 12 elements by rows"):
        engine.add_reduce(arena, torch.float32, "w", [(10, [4, 3])], -1, False, torch.float32, 1.0)
    with pytest.raises(TransferError, match="the divisor must be positive"):
        engine.add_reduce(arena, torch.float32, "w", [(12, [4, 3])], -1, False, torch.float32, 0.0)
    with pytest.raises(TransferError, match="no gather has the number 0"):
        engine.gather_wait(0)
    with pytest.raises(TransferError, match="rank 0 of 1"):
        _C.Engine(None, 0, 2)
    gather = engine.add_gather(arena, torch.bfloat16, "w", [(64, [64], 0)], -1)
    with pytest.raises(TransferError, match="does not fit an arena of 64 bytes"):
        engine.gather_start(gather, [torch.ones(64)])


def test_a_closed_engine_says_so():
    engine = _C.Engine(None, 0, 1)
    gather = gather_of(engine, (4, 3), torch.bfloat16)
    engine.gather_start(gather, [torch.ones(12)])
    (full,) = engine.gather_wait(gather)
    engine.close()
    engine.close()
    with pytest.raises(TransferError, match="the engine is closed"):
        engine.release(gather)
    assert torch.equal(full, torch.ones(4, 3).bfloat16()), "tensors handed out keep their memory"


# --- the meter ---


def test_the_meter_counts_live_bytes(meter):
    start = meter.meter_current()
    a = torch.empty(1000, dtype=torch.uint8)
    assert meter.meter_current() - start == 1000
    meter.meter_reset_peak()
    b = torch.empty(77, dtype=torch.float32)
    assert meter.meter_current() - start == 1000 + 308
    view = b[3:]
    del b
    assert meter.meter_current() - start == 1308, "a view holds the storage"
    del view
    assert meter.meter_current() - start == 1000
    assert meter.meter_peak() - start == 1308
    a.untyped_storage().resize_(10)
    assert meter.meter_current() - start == 10
    del a
    assert meter.meter_current() == start


def test_blocks_keep_their_alignment(meter):
    kept = [torch.empty(n, dtype=torch.uint8) for n in (1, 63, 64, 65, 4097)]
    assert all(t.data_ptr() % 64 == 0 for t in kept)


def test_blocks_outlive_the_meter():
    before = torch.ones(100)
    _C.meter_install()
    start = _C.meter_current()
    during = torch.ones(100)
    del before  # allocated before the meter came: not counted, so not subtracted
    assert _C.meter_current() - start == 400
    _C.meter_uninstall()
    after = torch.ones(100)
    assert _C.meter_current() - start == 400
    _C.meter_install()
    _C.meter_install()
    again = torch.ones(50)
    assert _C.meter_current() - start == 600
    _C.meter_uninstall()
    assert torch.equal(during, after)
    del during, again
    assert _C.meter_current() == start
    _C.meter_uninstall()
    del after
    assert _C.meter_current() == start


def test_frees_from_any_thread_are_counted(meter):
    start = meter.meter_current()

    def churn(tensors):
        for _ in range(300):
            tensors.append(torch.empty(1000, dtype=torch.uint8))
            if len(tensors) > 5:
                tensors.pop(0)
        tensors.clear()

    mine = [torch.empty(1000, dtype=torch.uint8) for _ in range(20)]
    threads = [threading.Thread(target=churn, args=(mine if k == 0 else [],)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meter.meter_current() == start


def test_the_meter_sees_arenas(meter):
    start = meter.meter_current()
    engine = _C.Engine(None, 0, 1)
    arena = engine.add_arena(1 << 20, CPU)
    assert meter.meter_current() == start, "planned, not yet needed"
    gather = engine.add_gather(arena, torch.bfloat16, "w", [(4, [4], 0)], -1)
    engine.gather_start(gather, [torch.ones(4)])
    (full,) = engine.gather_wait(gather)
    assert meter.meter_current() - start == 1 << 20
    assert full.data_ptr() % 4096 == 0
    engine.close()
    assert meter.meter_current() - start == 1 << 20, "a tensor handed out holds it"
    del full
    assert meter.meter_current() == start


def test_the_allocator_stays_usable_by_the_rest_of_torch(meter):
    x = torch.randn(64, 64, requires_grad=True)
    (x @ x).relu().sum().backward()
    assert torch.equal(x.detach().clone(), x)
    shared = torch.ones(8).share_memory_()
    assert shared.sum() == 8
    assert torch._lazy_clone(torch.ones(8)).add_(1).sum() == 16
    assert torch.from_numpy(torch.ones(8).numpy()).sum() == 8
