"""Blocks from which results go to files: what lies where it is written from, how much at a time, and after faults."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from faults import Interrupt

from zero_compiler.alignment import block_aligned
from zero_compiler.errors import StorageError
from zero_compiler.storage import aio, stores
from zero_compiler.storage.writeback_buffers import Landing

K = 1024


@pytest.fixture
def nvme(tmp_path):
    tier = stores.Nvme(str(tmp_path), 0, keep=False)
    yield tier
    tier.close()


def regions(nvme, count, numel):
    store = nvme.store("gradients", count * block_aligned(4 * numel))
    return [store.allocate(f"g{k}", (numel,), torch.float32) for k in range(count)]


def made(landing, numel, value):
    return landing.take(4 * numel).view(torch.float32).fill_(value)


@pytest.fixture
def starts(monkeypatch):
    """Addresses from which writes started, and how many bytes each took."""
    seen, write = [], aio.Engine.write

    def noting(self, file, memory, offset, **kw):
        seen.append((memory.data_ptr(), memory.numel()))
        return write(self, file, memory, offset, **kw)

    monkeypatch.setattr(aio.Engine, "write", noting)
    return seen


@pytest.mark.parametrize("numel", [K, 1000, 5 * K, 1])
def test_what_is_made_here_is_written_from_where_it_lies(nvme, starts, numel):
    (region,) = regions(nvme, 1, numel)
    landing = Landing(1 << 20, 8 * K)
    starts.clear()
    g = made(landing, numel, 3.0)
    assert g.data_ptr() % aio.ALIGN == 0
    landing.write(region, g)
    landing.drain()
    assert starts == [(g.data_ptr(), block_aligned(4 * numel))]
    assert torch.equal(region.tensor, torch.full((numel,), 3.0))


@pytest.mark.parametrize("of", ["elsewhere", "not from the beginning", "with gaps"])
def test_what_lies_otherwise_is_copied_in_parts(nvme, starts, of):
    (region,) = regions(nvme, 1, 6 * K)
    landing = Landing(1 << 20, 8 * K)
    whole = made(landing, 12 * K, 0.0).copy_(torch.arange(12 * K))
    g = {
        "elsewhere": whole.clone()[: 6 * K],
        "not from the beginning": whole[K : 7 * K],
        "with gaps": whole[::2],
    }[of]
    want = g.clone()
    starts.clear()
    landing.write(region, g)
    landing.drain()
    assert [n for _, n in starts] == [8 * K] * 3
    inside = range(g.data_ptr(), g.data_ptr() + 48 * K)
    assert all(at not in inside for at, _ in starts)
    assert torch.equal(region.tensor, want)


def test_a_part_is_written_to_its_place(nvme):
    (region,) = regions(nvme, 1, 3 * K)
    landing = Landing(1 << 20, 8 * K)
    for k in range(3):
        landing.write(region, made(landing, K, k + 1.0), 4 * K * k)
    landing.drain()
    assert torch.equal(region.tensor, torch.tensor([1.0, 2.0, 3.0]).repeat_interleave(K))


def test_a_block_is_used_again_when_nothing_holds_it(nvme):
    (region,) = regions(nvme, 1, K)
    landing = Landing(1 << 20, 8 * K)
    g = made(landing, K, 1.0)
    at = g.data_ptr()
    landing.write(region, g)
    landing.drain()
    view = g[7:]  # holds it as g does
    del g
    other = made(landing, K, 2.0)
    assert other.data_ptr() != at
    assert torch.equal(view, torch.ones(K - 7))
    del view
    assert made(landing, K, 3.0).data_ptr() == at


class Slow:
    """Writes that are done when they are waited for."""

    def __init__(self, monkeypatch):
        self.pending, write = [], aio.Engine.write
        outer = self

        class Late:
            def __init__(self, request, nbytes):
                self.request, self.nbytes = request, nbytes
                outer.pending.append(self)

            def done(self):
                return False

            def wait(self):
                self.request.wait()
                outer.pending.remove(self)

        monkeypatch.setattr(
            aio.Engine,
            "write",
            lambda engine, file, memory, offset, **kw: Late(
                write(engine, file, memory, offset, **kw), memory.numel()
            ),
        )

    def nbytes(self):
        return sum(p.nbytes for p in self.pending)


@pytest.mark.slow
@pytest.mark.parametrize("here", [True, False])
def test_no_more_than_the_limit_is_under_way_or_idle(nvme, monkeypatch, here):
    count, numel = 12, 4 * K
    all_ = regions(nvme, count, numel)
    slow = Slow(monkeypatch)
    gc.collect()  # what tests before left in cycles
    limit, before = 5 * 8 * K, aio.live_bytes()
    landing, most, held = Landing(limit, 8 * K), 0, 0
    for k, region in enumerate(all_):
        g = made(landing, numel, k) if here else torch.full((numel,), float(k))
        landing.write(region, g)
        del g
        most, held = max(most, slow.nbytes()), max(held, aio.live_bytes() - before)
    landing.drain()
    assert most == (32 if here else 40) * K
    assert held <= limit
    assert slow.pending == []
    for k, region in enumerate(all_):
        assert torch.equal(region.tensor, torch.full((numel,), float(k)))


@pytest.mark.slow
def test_what_is_larger_than_the_limit_goes_alone(nvme, monkeypatch):
    small, large, last = regions(nvme, 3, 16 * K)
    slow = Slow(monkeypatch)
    landing = Landing(16 * K, 8 * K)
    landing.write(small, torch.ones(K))
    landing.write(large, made(landing, 16 * K, 2.0))
    assert slow.nbytes() == 64 * K
    landing.write(last, torch.ones(K))
    assert slow.nbytes() == 4 * K
    landing.drain()
    gc.collect()
    assert sum(b.numel() for b in landing._idle.values()) <= 16 * K
    assert torch.equal(large.tensor, torch.full((16 * K,), 2.0))


@pytest.mark.parametrize("when", ["starts", "is waited for"])
@pytest.mark.parametrize("error", [StorageError("no"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_after_an_error_nothing_is_under_way_and_it_goes_on(nvme, monkeypatch, when, error):
    first, second = regions(nvme, 2, K)
    landing, write, wait = Landing(1 << 20, 8 * K), aio.Engine.write, aio.Request.wait

    def broken(self, *args, **kw):
        (write if when == "starts" else wait)(self, *args, **kw)  # it has begun, and nobody knows of it
        raise error

    monkeypatch.setattr(*((aio.Engine, "write") if when == "starts" else (aio.Request, "wait")), broken)

    def both():
        landing.write(first, made(landing, K, 1.0))
        landing.drain()

    with pytest.raises(type(error)):
        both()
    monkeypatch.undo()
    assert not landing._writes
    landing.write(second, made(landing, K, 2.0))
    landing.drain()
    assert torch.equal(second.tensor, torch.full((K,), 2.0))


@pytest.mark.slow
def test_results_outlive_it(nvme):
    gc.collect()  # what tests before left in cycles
    landing = Landing(1 << 20, 8 * K)
    g, before = made(landing, K, 5.0), aio.live_bytes()
    del landing
    gc.collect()
    assert torch.equal(g, torch.full((K,), 5.0))
    del g
    gc.collect()
    assert aio.live_bytes() == before - 4 * K


_FILES = ("zero_compiler/storage/writeback_buffers.py", "zero_compiler/storage/interruptible_io.py")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # where a block comes back
def test_ctrl_c_before_any_line(nvme):
    first, second = regions(nvme, 2, 5 * K)

    def both(landing, value):
        landing.write(first, made(landing, 5 * K, value))
        landing.write(second, torch.full((5 * K,), value + 0.5))
        landing.drain()

    landing = Landing(24 * K, 8 * K)
    lines = Interrupt(1 << 40, _FILES)
    with lines:
        both(landing, 0.0)
    count = (1 << 40) - lines.left
    assert count > 100
    for k in range(1, count + 1):
        with contextlib.suppress(KeyboardInterrupt), Interrupt(k, _FILES):
            both(landing, float(k))
        # What is under way is known, or given up by the next call.
        assert landing._torn or landing._writes or nvme.engine.counters()["in_flight"] == 0, k
        both(landing, k + 0.25)
        assert nvme.engine.counters()["in_flight"] == 0
        assert not landing._writes
        assert torch.equal(first.tensor, torch.full((5 * K,), k + 0.25)), k
        assert torch.equal(second.tensor, torch.full((5 * K,), k + 0.75)), k


def test_blocks_may_come_back_while_one_is_taken(nvme, monkeypatch):
    """The collector of cycles runs where it likes, and another thread may drop a result."""
    landing = Landing(1 << 20, 8 * K)
    held = [made(landing, K * (1 + k), float(k)) for k in range(8)]
    del held[4:]

    class Drops(dict):
        def __iter__(self):
            for at in list(super().keys()):
                held[:1] = []
                yield at

    landing._idle = Drops(landing._idle)
    g = made(landing, K, 9.0)
    assert len(held) == 0
    assert torch.equal(g, torch.full((K,), 9.0))
    assert len(landing._idle) == 8
