"""File I/O and processes: nothing is left behind, and forks, Ctrl-C and sandboxes are told."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from null.io_common import BACKENDS, descriptors_now, settles, threads_now

from zero_compiler.storage import aio

# --- nothing is left behind ---


def ran(body, timeout):
    """A process of its own that has run ``body``."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)],
        check=False,
        timeout=timeout,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_nothing_leaks_over_a_thousand_requests_and_engines(backend, tmp_path):
    with aio.Engine(backend=backend, block_bytes=4096, depth=4) as io:
        file = io.open(tmp_path / "warm", 1 << 16, create=True)
        block = aio.buffer(1 << 16)
        io.write(file, block).wait()
        threads, descriptors = threads_now(), descriptors_now()
        for k in range(1000):
            request = io.write(file, block) if k % 2 else io.read(file, block)
            if k % 3:
                request.wait()
        io.flush(file)
        io.read(file, block).wait()
        assert len(io._live) == 0
        assert settles(threads_now, threads + 4)  # a ring may have helpers of the kernel
        assert descriptors_now() == descriptors
    gc.collect()
    assert settles(threads_now, threads)
    threads, descriptors = threads_now(), descriptors_now()
    resident = []
    for k in range(1000):
        io = aio.Engine(backend=backend, block_bytes=4096, depth=2)
        file = io.open(tmp_path / "many", 8192, create=k == 0)
        io.register(block)
        io.write(file, block[:8192])
        if k % 2:
            io.close()
        del io, file
        if k in (200, 999):
            gc.collect()
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    assert settles(threads_now, threads)
    assert settles(descriptors_now, descriptors)
    assert resident[1] - resident[0] < 8 << 20, "resident memory grew"


@pytest.mark.slow
def test_an_exception_leaves_no_thread_file_or_memory(backend, tmp_path):
    gc.collect()
    threads, descriptors, nbytes = threads_now(), descriptors_now(), aio.live_bytes()

    def loop():
        with aio.Engine(backend=backend) as io:
            file = io.open(tmp_path / "a", 8 << 20, create=True)
            io.register(aio.buffer(1 << 20))
            for _ in range(20):
                io.write(file, aio.buffer(8 << 20))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as raised:
        loop()
    assert raised.tb is not None  # its frames still hold the engine and the file
    assert settles(threads_now, threads)
    assert descriptors_now() == descriptors
    assert settles(aio.live_bytes, nbytes)  # of buffers that were written, and of the one that was registered


@pytest.mark.slow
def test_a_program_that_ends_without_closing_ends(backend, tmp_path):
    body = f"""
        from zero_compiler.storage import aio
        io = aio.Engine(backend="{backend}")
        file = io.open(r"{tmp_path}/a", 64 << 20, create=True)
        io.write(file, aio.buffer(64 << 20))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(body)], check=True, timeout=120)


# --- processes ---


@pytest.mark.slow
def test_a_forked_child_gets_a_clear_error_and_makes_its_own(backend, tmp_path):
    body = f"""
        import os, sys
        from zero_compiler.storage import aio
        io = aio.Engine(backend="{backend}")
        file = io.open(r"{tmp_path}/a", 1 << 20, create=True)
        block = aio.buffer(1 << 20)
        pending = io.write(file, block)
        child = os.fork()
        if child == 0:
            for call in (
                lambda: io.read(file, block), lambda: io.flush(file), lambda: io.open(r"{tmp_path}/b", 1, create=True),
                lambda: file.close(), lambda: io.register(block),
            ):
                try:
                    call()
                    print("no error"); sys.stdout.flush(); os._exit(1)
                except aio.StorageError as error:
                    assert "forked child: make an Engine of its own here" in str(error), error
            io.close()
            with aio.Engine(backend="{backend}") as own:
                mine = own.open(r"{tmp_path}/c", 1 << 20, create=True)
                own.write(mine, block).wait()
            sys.exit(0)  # finalizers run, and hang nowhere
        _, status = os.waitpid(child, 0)
        pending.wait()
        io.write(file, block).wait()
        io.flush(file)
        sys.exit(os.waitstatus_to_exitcode(status))
    """
    done = ran(body, 120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_engine_does_not_travel_to_a_spawned_process(io):
    for send in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="make one in each process"):
            send(io)


@pytest.mark.slow
def test_ctrl_c_ends_the_waiting_and_not_the_request(backend, tmp_path):
    """One small block at a time: the request takes seconds on any disk."""
    body = f"""
        import _thread, signal, threading, time
        signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs without it
        from zero_compiler.storage import aio
        io = aio.Engine(backend="{backend}", block_bytes=4096, depth=1)
        file = io.open(r"{tmp_path}/a", 1 << 30, create=True)
        block = aio.buffer(1 << 30)
        request = io.write(file, block)
        threading.Timer(0.2, _thread.interrupt_main).start()
        began = time.monotonic()
        try:
            request.wait()
            print("finished first")
        except KeyboardInterrupt:
            print("interrupted", time.monotonic() - began < 5, request.done())
        small = io.read(file, block[:8192])
        threading.Timer(0.2, _thread.interrupt_main).start()
        threading.Timer(0.4, io.close).start()  # before that, no end is near
        try:
            io.settle()
            assert False
        except KeyboardInterrupt:
            print(request.done(), small.done(), io.counters()["in_flight"])
        io.close()
    """
    done = ran(body, 200)
    assert done.stdout.splitlines() == ["interrupted True False", "True True 0"], done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64", reason="the filter is for x86-64"
)
def test_a_sandbox_that_refuses_io_uring_means_threads_said_once(tmp_path):
    if "uring" not in BACKENDS:
        pytest.skip(f"no io_uring here: {aio.uring_refusal()}")
    body = f"""
        import ctypes, struct, warnings
        libc = ctypes.CDLL(None, use_errno=True)
        # if (nr == 425 /* io_uring_setup */) return EPERM; else allow
        steps = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050000 | 1), (0x06, 0, 0, 0x7FFF0000)]
        code = b"".join(struct.pack("HBBI", *step) for step in steps)
        keep = ctypes.create_string_buffer(code)
        program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(keep)))
        assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
        assert libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()  # seccomp filter
        from zero_compiler.storage import aio
        with warnings.catch_warnings(record=True) as seen:
            for _ in range(3):
                io = aio.Engine()
                assert io.backend == "threads"
                file = io.open(r"{tmp_path}/a", 8192, create=_ == 0)
                io.write(file, aio.buffer(8192)).wait()
        print(*(str(one.message) for one in seen), sep="|")
        try:
            aio.Engine(backend="uring")
        except ValueError as error:
            print(error)
    """
    done = ran(body, 120)
    lines = done.stdout.splitlines()
    assert lines == [
        "file I/O uses threads: the kernel refuses io_uring: Operation not permitted",
        'backend="uring" is not possible here: the kernel refuses io_uring: Operation not permitted; use "auto" or "threads"',
    ], done.stdout + done.stderr
