"""File I/O on storage that fails: full, broken, truncated, read-only, without O_DIRECT, stacked."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
from faults import mounted, run_with_faults, small_disk, small_tmpfs, takes_o_direct
from marks import thorough
from null.io_common import filled

from zero_compiler.errors import StorageError
from zero_compiler.storage import aio

MiB = 1 << 20


@pytest.fixture
def io(backend):
    with aio.Engine(backend=backend, block_bytes=256 << 10, depth=4) as engine:
        yield engine


def round_trip(io, path, nbytes=3 * MiB + 5) -> aio.File:
    file = io.open(path, nbytes, create=True)
    out, back = filled(nbytes), aio.buffer(nbytes)
    io.write(file, out).wait()
    io.flush(file)
    io.read(file, back).wait()
    assert torch.equal(out, back)
    return file


# --- kinds of file systems ---


def test_on_tmpfs(io, tmp_path):
    with small_tmpfs(tmp_path / "m", "8m") as folder:
        round_trip(io, folder / "a")
        io.close()


def test_without_o_direct_it_works_and_says_so_once(io, tmp_path):
    with mounted(tmp_path / "m", "-t", "ramfs", "ramfs") as folder:
        if takes_o_direct(folder / "probe"):
            pytest.skip("this kernel's ramfs takes O_DIRECT")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            file = round_trip(io, folder / "a")
            again = round_trip(io, folder / "b")
        assert not file.direct
        assert not again.direct
        assert [str(one.message) for one in seen] == [
            f"'{folder}/a' is on a file system without O_DIRECT: file I/O there goes through the page cache, which costs "
            "a copy and memory"
        ]
        assert seen[0].filename == __file__
        assert io.counters()["bytes_cached"] == 4 * (3 * MiB + 5)
        io.close()


def test_on_an_overlay(io, tmp_path):
    for name in ("lower", "upper", "work"):
        (tmp_path / name).mkdir()
    old = filled(MiB, 1)
    (tmp_path / "lower" / "old").write_bytes(old.numpy().tobytes())
    options = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    with mounted(tmp_path / "m", "-t", "overlay", "-o", options, "overlay") as folder:
        round_trip(io, folder / "a")
        # A file of the lower layer is copied up when it is opened for writing: both descriptors see the copy.
        file = io.open(folder / "old", MiB)
        back = aio.buffer(MiB)
        io.read(file, back).wait()
        assert torch.equal(back, old)
        new = filled(MiB, 2)
        io.write(file, new).wait()
        io.write(file, new[:100], 4096 + 7).wait()
        io.read(file, back).wait()
        want = new.clone()
        want[4096 + 7 : 4096 + 107] = new[:100]
        assert torch.equal(back, want)
        assert (folder / "old").read_bytes() == want.numpy().tobytes()
        io.close()


def test_a_read_only_file_system(io, tmp_path):
    with small_tmpfs(tmp_path / "m", "8m") as folder:
        (folder / "a").write_bytes(bytes(10_000))
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        with pytest.raises(StorageError, match="could not be made: Read-only file system") as refused:
            io.open(folder / "b", 10, create=True)
        assert refused.value.errno == errno.EROFS
        file = io.open(folder / "a", 10_000)
        assert not file.writable
        back = aio.buffer(10_000)
        io.read(file, back).wait()
        with pytest.raises(StorageError, match="could only be opened for reading"):
            io.write(file, back)
        io.close()


# --- no space ---


def test_a_full_disk_shows_when_a_file_is_made(io, tmp_path):
    with small_tmpfs(tmp_path / "m", "4m") as folder:
        with pytest.raises(
            StorageError, match=r"\(wq\) could not be given its 8388608 bytes: No space left"
        ) as refused:
            io.open(folder / "a", 8 * MiB, create=True, label="wq")
        assert "free space there or choose another directory" in str(refused.value)
        assert refused.value.errno == errno.ENOSPC
        assert os.listdir(folder) == []
        round_trip(io, folder / "a")
        io.close()


def test_a_disk_that_fills_up_in_mid_run(io, tmp_path):
    """A sparse file of another program has no space of its own: its pages are taken as they are written."""
    with small_tmpfs(tmp_path / "m", "4m") as folder:
        with open(folder / "a", "wb") as sparse:
            sparse.truncate(8 * MiB)
        file = io.open(folder / "a", 8 * MiB)
        request = io.write(file, filled(8 * MiB), label="layers.0.wq")
        with pytest.raises(StorageError, match=r"\(layers.0.wq\) failed at byte \d+: No space left") as full:
            request.wait()
        error = full.value
        assert (error.path, error.label) == (str(folder / "a"), "layers.0.wq")
        assert (error.offset, error.nbytes, error.errno) == (0, 8 * MiB, errno.ENOSPC)
        io.flush(file)  # the failure is known
        io.write(file, filled(8 * MiB), label="again")
        with pytest.raises(StorageError, match=r"\(again\) failed at byte"):
            io.flush(file)
        block = aio.buffer(MiB)
        io.read(file, block).wait()  # the engine goes on; which blocks found room is not said
        assert io.counters()["in_flight"] == 0
        io.close()


# --- broken and truncated ---


def test_a_disk_that_cannot_read_a_block(io, tmp_path):
    """The blocks of a loop device whose backing file was cut answer with EIO."""
    with small_disk(tmp_path / "m", 32) as folder:
        file = round_trip(io, folder / "a", 16 * MiB)
        image = tmp_path / "m.img"
        os.truncate(image, 64 << 10)
        back = aio.buffer(16 * MiB)
        with pytest.raises(
            StorageError, match=r"\(layers.0.wq\) failed at byte \d+: Input/output error"
        ) as broken:
            io.read(file, back, label="layers.0.wq").wait()
        error = broken.value
        assert (error.errno, error.path, error.label) == (errno.EIO, str(folder / "a"), "layers.0.wq")
        assert (error.offset, error.nbytes) == (0, 16 * MiB)
        os.truncate(image, 32 * MiB)  # the disk is back, with holes: so is the engine
        request = io.read(file, back[:4096].fill_(7))
        request.wait()
        assert not back[:4096].any()
        io.close()


def test_a_truncated_file(io, tmp_path):
    file = round_trip(io, tmp_path / "a", 4 * MiB)
    os.truncate(tmp_path / "a", MiB + 100)
    back = aio.buffer(4 * MiB)
    with pytest.raises(StorageError, match="should have 4194304 bytes: it was truncated") as cut:
        io.read(file, back, label="wq").wait()
    assert (cut.value.label, cut.value.errno) == ("wq", 0)
    io.read(file, back[:MiB].zero_()).wait()
    assert torch.equal(back[:MiB], filled(4 * MiB)[:MiB])
    with pytest.raises(StorageError, match="has 1048676 bytes, expected 4194304"):
        io.open(tmp_path / "a", 4 * MiB)


def test_a_removed_file_stays_readable_and_cannot_be_opened_again(io, tmp_path):
    file = round_trip(io, tmp_path / "a", MiB)
    os.unlink(tmp_path / "a")
    back = aio.buffer(MiB)
    io.read(file, back).wait()
    assert torch.equal(back, filled(MiB))
    with pytest.raises(StorageError, match="could not be opened: No such file or directory"):
        io.open(tmp_path / "a", MiB)


# --- system calls that fail ---

PROGRAM = """
    from zero_compiler.storage import aio
    io = aio.Engine(backend="threads", block_bytes=65536, depth=3)
    file = io.open(r"{path}", 1 << 20, create=True)
    block, back = aio.buffer(1 << 20), aio.buffer(1 << 20)
    block.random_()
    try:
        io.write(file, block, label="wq").wait()
        io.flush(file)
        io.read(file, back, label="wq").wait()
        print("equal" if (block == back).all() else "different", io.counters()["short_transfers"] > 10)
    except aio.StorageError as error:
        print(error.errno, error)
"""


@pytest.mark.parametrize(
    ("call", "number", "said"),
    [
        ("pread", errno.EIO, "read of 1048576 bytes at offset 0 of 'PATH' (wq) failed at byte"),
        ("pwrite", errno.EIO, "write of 1048576 bytes at offset 0 of 'PATH' (wq) failed at byte"),
        ("pwrite", errno.ENOSPC, "No space left on device; free space there or choose another directory"),
        ("fdatasync", errno.EIO, "flush of 'PATH' failed: Input/output error"),
    ],
)
@pytest.mark.slow
@pytest.mark.parametrize("first", [*thorough(1), 7])
def test_calls_that_fail(tmp_path, call, number, said, first):
    path = tmp_path / "target.bin"
    first = 1 if call == "fdatasync" else first
    done = run_with_faults(
        tmp_path, PROGRAM.format(path=path), call=call, path="target.bin", errno=number, first=first
    )
    assert done.stdout.startswith(f"{number} "), done.stdout + done.stderr
    assert said.replace("PATH", str(path)) in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("call", ["pread", "pwrite"])
def test_calls_that_move_less_than_asked_go_on(tmp_path, call):
    done = run_with_faults(
        tmp_path, PROGRAM.format(path=tmp_path / "target.bin"), call=call, path="target.bin", errno=0
    )
    assert done.stdout == "equal True\n", done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("call", ["pread", "pwrite"])
def test_calls_that_are_interrupted_are_repeated(tmp_path, call):
    body = PROGRAM.format(path=tmp_path / "target.bin")
    what = {"call": call, "path": "target.bin", "errno": errno.EINTR}
    done = run_with_faults(tmp_path, body, count=90, **what)
    assert done.stdout == "equal False\n", done.stdout + done.stderr
    os.unlink(tmp_path / "target.bin")
    done = run_with_faults(tmp_path, body, **what)
    said = f"{errno.EINTR} {'read' if call == 'pread' else 'write'} of 1048576 bytes at offset 0 of"
    assert done.stdout.startswith(said), "repeated for a while, then told: " + done.stderr


@pytest.mark.slow
def test_a_process_killed_in_a_write_leaves_a_file_that_says_its_size(tmp_path):
    """Space is there from the start: what is lost is bytes not yet flushed, never the file's shape."""
    body = f"""
        import os, signal
        from zero_compiler.storage import aio
        io = aio.Engine()
        file = io.open(r"{tmp_path}/a", 64 << 20, create=True)
        block = aio.buffer(64 << 20).fill_(7)
        io.write(file, block[: 1 << 20]).wait()
        io.flush(file)
        io.write(file, block)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(body)], check=False, timeout=120)
    assert done.returncode == -9
    with aio.Engine() as io:
        file = io.open(tmp_path / "a", 64 * MiB)
        back = aio.buffer(64 * MiB)
        io.read(file, back).wait()
        assert (back[:MiB] == 7).all()
        assert ((back == 7) | (back == 0)).all()
