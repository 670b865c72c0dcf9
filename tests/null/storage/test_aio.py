"""File I/O: what is written is what is read, for any offset, size, alignment, back end and engine shape."""

from __future__ import annotations

import gc
import itertools
import os
import tempfile
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from null.io_common import BACKENDS, descriptors_now, filled

from zero_compiler.errors import ConfigError, StorageError
from zero_compiler.storage import aio

# --- right bytes ---


SIZE = 40_000


edges = st.sampled_from([0, 1, 511, 512, 4095, 4096, 4097, 8192, 12_288, 20_000, SIZE - 4096, SIZE - 1, SIZE])


places = st.one_of(edges, st.integers(0, SIZE))


operations = st.lists(
    st.tuples(
        st.booleans(),  # write
        places,  # offset
        places,  # size, cut to what fits
        st.sampled_from([0, 0, 1, 64, 512, "same"]),  # memory: bytes after a page boundary; or as the offset
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(
    ops=operations,
    backend=st.sampled_from(BACKENDS),
    block_pages=st.integers(1, 4),
    depth=st.integers(1, 5),
    direct=st.booleans(),
    register=st.booleans(),
)
def test_any_request_moves_the_right_bytes(ops, backend, block_pages, depth, direct, register):
    oracle = np.zeros(SIZE, dtype=np.uint8)
    with (
        tempfile.TemporaryDirectory(dir=".") as folder,
        aio.Engine(backend=backend, block_bytes=block_pages * aio.ALIGN, depth=depth) as io,
    ):
        file = io.open(f"{folder}/a", SIZE, create=True, direct=direct)
        memory = aio.buffer(SIZE + aio.ALIGN)
        if register:
            io.register(memory)
        for number, (write, offset, size, shift) in enumerate(ops):
            size = min(size, SIZE - offset)
            begin = offset % aio.ALIGN if shift == "same" else shift
            part = memory[begin : begin + size]
            if write:
                new = np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)
                part.copy_(torch.from_numpy(new))
                io.write(file, part, offset).wait()
                oracle[offset : offset + size] = new
            else:
                memory.fill_(0xAB)
                io.read(file, part, offset).wait()
                assert np.array_equal(part.numpy(), oracle[offset : offset + size])
                assert (memory[:begin] == 0xAB).all(), "bytes before the range were touched"
                assert (memory[begin + size :] == 0xAB).all(), "bytes after the range were touched"
        io.flush(file)
        file.close()
        assert np.array_equal(np.fromfile(f"{folder}/a", dtype=np.uint8), oracle)


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(0, SIZE), max_size=8),
    backend=st.sampled_from(BACKENDS),
    depth=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_requests_at_once_do_not_disturb_each_other(cuts, backend, depth, seed):
    """Neighbours that share a page are written together, then read together."""
    bounds = sorted({0, SIZE, *cuts})
    data = filled(SIZE, seed)
    back = aio.buffer(SIZE)
    with (
        tempfile.TemporaryDirectory(dir=".") as folder,
        aio.Engine(backend=backend, block_bytes=aio.ALIGN, depth=depth) as io,
    ):
        file = io.open(f"{folder}/a", SIZE, create=True)
        parts = list(itertools.pairwise(bounds))
        for one in [io.write(file, data[a:b], a) for a, b in parts]:
            one.wait()
        for one in [io.read(file, back[a:b], a) for a, b in parts]:
            one.wait()
        assert torch.equal(back, data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_of_any_dtype_and_shape(io, tmp_path, dtype):
    values = (torch.randn(37, 11) * 10).to(dtype)
    file = io.open(tmp_path / "a", values.nbytes, create=True)
    io.write(file, torch.nn.Parameter(values) if values.is_floating_point() else values).wait()
    back = torch.empty_like(values)
    io.read(file, back).wait()
    assert torch.equal(back, values)


def test_buffers_of_python_and_numpy(io, tmp_path):
    file = io.open(tmp_path / "a", 10_000, create=True)
    io.write(file, bytes(range(250)) * 40).wait()
    into = bytearray(5000)
    io.read(file, into, 250).wait()
    assert bytes(into) == bytes(range(250)) * 20
    array = np.zeros(100, dtype=np.float64)
    io.read(file, array).wait()
    assert array.tobytes() == (bytes(range(250)) * 4)[:800]
    io.write(file, b"").wait()
    io.read(file, memoryview(into)[:0]).wait()
    assert (tmp_path / "a").read_bytes() == bytes(range(250)) * 40


def test_aligned_requests_bypass_the_page_cache(io, tmp_path):
    file = io.open(tmp_path / "a", 1 << 20, create=True)
    if not file.direct:
        pytest.skip("no O_DIRECT here")
    block = filled(1 << 20)
    io.write(file, block).wait()
    io.read(file, block).wait()
    assert io.counters()["bytes_cached"] == 0
    io.write(file, block[: 10_000 + 4096], 8192).wait()  # 2 whole pages and 1808 bytes
    assert io.counters()["bytes_cached"] == 10_000 + 4096 - 3 * 4096
    counters = io.counters()
    assert (counters["reads"], counters["writes"], counters["in_flight"]) == (1, 2, 0)
    assert counters["bytes_written"] == (1 << 20) + 14_096


def test_what_another_program_wrote_is_read_and_the_other_way_round(io, tmp_path):
    path = tmp_path / "a"
    file = io.open(path, 1 << 20, create=True)
    block = filled(1 << 20, 1)
    for seed in range(3):
        block.copy_(filled(1 << 20, seed))
        io.write(file, block).wait()
        assert path.read_bytes() == block.numpy().tobytes(), "written directly, read through the page cache"
        other = filled(1 << 20, seed + 100)
        with open(path, "r+b") as plain:
            plain.write(other.numpy().tobytes())
        io.read(file, block).wait()
        assert torch.equal(block, other), "written through the page cache, read directly"


def test_a_request_is_over_before_wait_only_when_done(io, tmp_path):
    file = io.open(tmp_path / "a", 32 << 20, create=True)
    block = filled(32 << 20)
    before = time.monotonic_ns()
    requests = [io.write(file, block[k << 20 : (k + 1) << 20], k << 20) for k in range(32)]
    last = requests[-1]
    assert last.wait(timeout=30)
    assert last.done()
    assert last.wait(timeout=0)
    for one in requests:
        one.wait()
    begin, end = last.span_ns
    assert before <= begin <= end <= time.monotonic_ns()


def test_other_python_threads_run_while_one_waits(io, tmp_path):
    file = io.open(tmp_path / "a", 64 << 20, create=True)
    block = aio.buffer(64 << 20)
    ticks = 0
    stop = threading.Event()

    def tick():
        nonlocal ticks
        while not stop.is_set():
            ticks += 1
            time.sleep(0.0005)

    other = threading.Thread(target=tick)
    request = io.write(file, block)
    began = ticks
    other.start()
    request.wait()
    io.flush(file)
    stop.set()
    other.join()
    assert ticks > began


# --- memory ---


@pytest.mark.slow
def test_buffers_that_are_alive_are_counted():
    gc.collect()
    before = aio.live_bytes()
    block = aio.buffer(5000)
    part = block[:10]
    assert aio.live_bytes() == before + (5000 if not torch.accelerator.is_available() else 0)
    del block
    assert aio.live_bytes() > before or torch.accelerator.is_available()
    del part
    assert aio.live_bytes() == before


def test_buffers_are_aligned_zeroed_and_of_the_size():
    for nbytes in (0, 1, 4095, 4096, 5_000_000):
        block = aio.buffer(nbytes)
        assert (block.dtype, block.numel(), block.is_contiguous()) == (torch.uint8, nbytes, True)
        assert nbytes == 0 or block.data_ptr() % aio.ALIGN == 0
        assert not block.any()
    with pytest.raises(ConfigError, match="at least 0, not -1"):
        aio.buffer(-1)


def test_registered_memory_moves_the_same_bytes(io, tmp_path):
    block = filled(1 << 20)
    registered = io.register(block)
    if io.backend == "threads":
        assert not registered
    file = io.open(tmp_path / "a", 2 << 20, create=True)
    io.write(file, block).wait()
    back = aio.buffer(2 << 20)
    io.register(back)
    io.read(file, back[: 1 << 20]).wait()
    assert torch.equal(back[: 1 << 20], block)
    with pytest.raises(StorageError, match="registered already"):
        io.register(back[4096:8192])
    with pytest.raises(StorageError, match="4096 bytes are not registered"):
        io.unregister(back[4096:8192])
    for _ in range(600):  # more often than a table has entries
        io.unregister(back)
        assert io.register(back) == registered
    io.read(file, back).wait()
    assert torch.equal(back[: 1 << 20], block)
    assert not back[1 << 20 :].any()


def test_more_files_than_the_ring_has_places_for(io, tmp_path):
    files = [io.open(tmp_path / str(k), 4096, create=True) for k in range(300)]
    blocks = [filled(4096, k) for k in range(300)]
    for one in [io.write(file, block) for file, block in zip(files, blocks)]:
        one.wait()
    for file in files[::2]:
        file.close()
    again = [io.open(tmp_path / str(k), 4096) for k in range(0, 300, 2)]
    for file, want in zip(again, blocks[::2]):
        back = aio.buffer(4096)
        io.read(file, back).wait()
        assert torch.equal(back, want)


@pytest.mark.slow
def test_memory_of_a_dropped_request_stays_until_it_is_done(io, tmp_path):
    file = io.open(tmp_path / "a", 16 << 20, create=True)
    part = (16 << 20) // 32
    for k in range(32):
        io.write(
            file, torch.full((part,), k + 1, dtype=torch.uint8), k * part
        )  # nobody holds tensor or request
    gc.collect()
    io.flush(file)
    assert not io._live or io._live[0].done()
    back = np.fromfile(tmp_path / "a", dtype=np.uint8)
    assert np.array_equal(back, np.repeat(np.arange(1, 33, dtype=np.uint8), part))
    io.read(file, bytearray(8)).wait()
    assert len(io._live) == 0


# --- misuse ---


def test_options_out_of_range():
    with pytest.raises(ConfigError, match="backend must be one of auto, uring, threads, not 'aio'"):
        aio.Engine(backend="aio")
    with pytest.raises(ConfigError, match="block_bytes must be a multiple of 4096, at most 1 GiB, not 1000"):
        aio.Engine(block_bytes=1000)
    with pytest.raises(ConfigError, match="depth must be between 1 and 1024, not 0"):
        aio.Engine(depth=0)


def test_requests_that_do_not_fit(io, tmp_path):
    file = io.open(tmp_path / "a", 10_000, create=True, label="layers.0.wq")
    with pytest.raises(StorageError, match="the file has 10000 bytes") as refused:
        io.write(file, bytes(9000), 2000)
    assert str(refused.value).startswith(
        f"write of 9000 bytes at offset 2000 of '{tmp_path}/a' (layers.0.wq) is not"
    )
    with pytest.raises(StorageError, match="a read needs writable memory, and this bytes is read-only"):
        io.read(file, bytes(10))
    with pytest.raises(StorageError, match=r"contiguous tensor on the CPU, not one of shape \(3, 2\)"):
        io.read(file, torch.zeros(2, 3).t())
    with pytest.raises(StorageError, match="on meta"):
        io.read(file, torch.zeros(3, device="meta"))
    with pytest.raises(StorageError, match="a plain tensor, not a Odd"):
        io.read(file, torch.zeros(3).as_subclass(type("Odd", (torch.Tensor,), {})))
    with pytest.raises(StorageError, match="not list"):
        io.write(file, [1, 2])
    turned = torch.ones(4, dtype=torch.complex64).conj()
    for view in (turned, turned[:1].imag):  # the bytes are those of another tensor
        with pytest.raises(StorageError, match=r"resolve_conj\(\).resolve_neg\(\)"):
            io.write(file, view)
    with pytest.raises(StorageError, match="references to Python objects"):
        io.read(file, np.array(["a", None], dtype=object))
    with aio.Engine() as other, pytest.raises(StorageError, match="opened by another Engine"):
        other.read(file, bytearray(4))


def test_paths_of_any_bytes(io, tmp_path):
    path = os.path.join(tmp_path, os.fsdecode(b"of \xff"))
    for at in (path + "a", os.fsencode(path + "b")):
        file = io.open(at, 10, create=True)
        io.write(file, b"0123456789").wait()
        with open(at, "rb") as other:
            assert other.read() == b"0123456789"
        with pytest.raises(StorageError, match=r"of \\udcff[ab]' has 10 bytes, expected 20"):
            io.open(at, 20)
    with pytest.raises(StorageError, match="it has a NUL"):
        io.open(f"{tmp_path}/a\0b", 10, create=True)
    assert not (tmp_path / "a").exists()


def test_after_the_end_every_call_says_so_and_nothing_is_made(io, tmp_path):
    file = io.open(tmp_path / "a", 10_000, create=True, label="layers.0.wq")
    other = io.open(tmp_path / "other", 10_000, create=True)
    request, block = io.write(file, bytes(10)), aio.buffer(4096)
    request.wait()
    io.register(block)
    for _ in range(2):
        file.close()
    for call in (lambda: io.read(file, bytearray(4)), lambda: io.write(file, b"4"), lambda: io.flush(file)):
        with pytest.raises(StorageError, match="the file is closed") as refused:
            call()
        assert (refused.value.path, refused.value.label) == (str(tmp_path / "a"), "layers.0.wq")
    before = sorted(tmp_path.iterdir()), descriptors_now()
    assert len(io._live) == 0, "what was refused is not held"
    counters = io.counters()
    for _ in range(2):
        io.close()
    for call in (
        lambda: io.open(tmp_path / "b", 8192, create=True, label="w"),
        lambda: io.open(tmp_path / "a", 10_000, label="w"),
        lambda: io.read(other, bytearray(4)),
        lambda: io.write(other, b"4"),
        lambda: io.flush(other),
        lambda: io.register(aio.buffer(4096)),
    ):
        with pytest.raises(StorageError, match="the I/O engine is closed"):
            call()
    with pytest.raises(StorageError, match="4096 bytes are not registered"):
        io.unregister(block)
    for one in (file, other, io):
        one.close()
    io.settle()
    assert (sorted(tmp_path.iterdir()), len(io._live)) == (before[0], 0)
    assert descriptors_now() < before[1]
    assert request.wait(), "what was done stays done"
    assert request.done()
    assert io.counters() == counters


def test_files_are_never_shared_or_overwritten(io, tmp_path):
    path = tmp_path / "a"
    io.open(path, 5000, create=True)
    assert path.stat().st_size == 5000
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(StorageError, match="File exists; a file is never overwritten") as refused:
        io.open(path, 5000, create=True)
    assert (refused.value.path, refused.value.errno) == (str(path), 17)
    with pytest.raises(StorageError, match=r"\(w\) could not be opened: No such file") as refused:
        io.open(tmp_path / "b", 1, label="w")
    assert refused.value.label == "w"
    with pytest.raises(StorageError, match="has 5000 bytes, expected 6000: it was truncated"):
        io.open(path, 6000)
    with pytest.raises(StorageError, match="not a regular file"):
        io.open("/dev/null", 0)


def test_a_file_system_with_o_direct_warns_of_nothing(io, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        file = io.open(tmp_path / "a", 4096, create=True, direct=False)
        assert not file.direct
        io.write(file, bytes(4096)).wait()
