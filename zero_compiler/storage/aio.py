"""Asynchronous file I/O between files and host memory, with O_DIRECT and io_uring where they can be had.

Usable by itself::

    from zero_compiler.storage import aio

    with aio.Engine() as io:
        block = aio.buffer(64 << 20)  # uint8, aligned, pinned where there is an accelerator
        file = io.open("/nvme/states", nbytes=1 << 30, create=True)
        write = io.write(file, block, offset=0, label="layers.0.wq")  # returns at once
        write.wait()  # or write.done()
        io.flush(file)
        io.read(file, block, offset=0).wait()

A request is split into blocks of ``block_bytes``; at most ``depth`` of them, of all requests together, are under way.
Memory, offset and size that are multiples of ``ALIGN`` (4096) move without a copy and without the page cache; a head or
tail that is not, or all of a request whose address and offset differ modulo ``ALIGN``, goes through the page cache: any
request is right, aligned ones are fast. Requests are not ordered among themselves: wait for a write before its bytes
are read. docs/aio.md says more. The C++ side is csrc/include/zero/aio/.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..errors import ConfigError, StorageError
from ..ir.transfers import READ, WRITE
from ..open_files import of_open_files
from ..ranges import Lanes
from . import _aio

__all__ = ["ALIGN", "Engine", "File", "Request", "StorageError", "buffer", "live_bytes", "uring_refusal"]

ALIGN: int = _aio.ALIGN
BACKENDS = ("auto", "uring", "threads")


def uring_refusal() -> str | None:
    """Why ``Engine(backend="uring")`` is not possible here (no liburing, or the kernel refuses), or None."""
    return _aio.uring_refusal()


def buffer(nbytes: int) -> torch.Tensor:
    """Zeroed uint8 memory of ``nbytes`` bytes that begins at a multiple of ``ALIGN``: pinned where there is an
    accelerator, else in huge pages where the kernel has them. Pages are taken when first touched, if not pinned.
    """
    if nbytes < 0:
        raise ConfigError(f"nbytes must be at least 0, not {nbytes}")
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    if torch.accelerator.is_available():
        # It is of whole pages; and torch rounds it up to a power of two, so that a little more may be twice as much.
        pinned = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
        if pinned.data_ptr() % ALIGN == 0:
            return pinned
        pinned = torch.zeros(nbytes + ALIGN, dtype=torch.uint8, pin_memory=True)
        begin = -pinned.data_ptr() % ALIGN
        return pinned[begin : begin + nbytes]
    # Private: a mapping of Python's default kind would be shared with forked children.
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _alive.add(block)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=torch.uint8)  # holds the mapping


_alive: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def live_bytes() -> int:
    """Bytes of the buffers that are alive in this process, which no allocator of torch counts; pinned ones it does."""
    return sum(len(block) for block in list(_alive))


class File:
    """An open file of a fixed size; made by ``Engine.open``. Closing it leaves it on disk."""

    def __init__(
        self,
        engine: Engine,
        core: _aio.File,
        path: str,
        nbytes: int,
        label: str,
        name: str,
        wants_direct: bool,
    ) -> None:
        self._engine = engine
        self._core = core
        self._wants_direct = wants_direct
        self.path = path
        self.nbytes = nbytes
        self.label = label
        self.name = name

    @property
    def direct(self) -> bool:
        """Whether aligned transfers bypass the page cache; False where O_DIRECT was refused or not asked for."""
        return self._core.direct

    @property
    def writable(self) -> bool:
        """False for an existing file that the process may only read."""
        return self._core.writable

    def close(self) -> None:
        """Waits for the requests under way, then closes the file. Again: nothing."""
        with _about(self.path, self.label):
            self._engine._core.close_file(self._core)

    def __enter__(self) -> File:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"aio.File({self.path!r}, nbytes={self.nbytes}, direct={self.direct})"


class Request:
    """A read or write under way; made by ``Engine.read`` and ``Engine.write``."""

    def __init__(
        self,
        engine: Engine,
        file: File,
        memory: object,
        offset: int,
        nbytes: int,
        label: str,
    ) -> None:
        self._engine = engine
        self._core: _aio.Request  # set as the request begins, by the core itself
        self._memory = memory  # kept until the request is done, whatever the caller does
        self._row: Any = None  # of a profile, in which it is under way
        self.file = file
        self.offset = offset
        self.nbytes = nbytes
        self.label = label

    def done(self) -> bool:
        """Whether it is over and its memory free for other use; ``wait`` then returns or raises at once."""
        return self._core.done

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks without the GIL, at most ``timeout`` seconds; Ctrl-C ends the waiting, not the request.

        Returns:
            True when done; False when the time was over.

        Raises:
            StorageError: the request failed; names the file, the byte, the range and the label.
        """
        if not self._core.wait(timeout):
            return False
        self._memory = None
        if self._row is not None:
            self._row.settle()  # the profile may end at any time from here on
        self._engine._forget_done()
        failure = self._core.failure()
        if failure is not None:
            message, errno = failure
            raise StorageError(
                message,
                errno=errno,
                path=self.file.path,
                label=self.label,
                offset=self.offset,
                nbytes=self.nbytes,
            )
        self._engine._warn_if_not_direct(self.file)
        return True

    @property
    def span_ns(self) -> tuple[int, int]:
        """Begin of the first block and end of the last, in nanoseconds of ``time.monotonic_ns``. Once done only."""
        if not self.done():
            raise StorageError("the span of a request is known when it is done: wait for it first")
        return self._core.begin_ns, self._core.end_ns


class Engine:
    """Runs requests on threads of its own; any number of engines may live side by side.

    Args:
        block_bytes: a request is split into blocks of this size, a multiple of ``ALIGN``; None: 4 MiB.
        depth: blocks under way at most, of all requests together (and threads of the back end "threads");
            None: 16.
        backend: "uring" (one thread with a ring of the kernel), "threads", or "auto": "uring" where it can be had.

    Raises:
        ConfigError: an option is out of range, or "uring" cannot be had.

    Methods may be called from any thread. A forked child has none of the engine's threads, so every transfer there
    raises; make an engine of its own. ``close`` (also by ``with``, garbage collection and at exit) waits for blocks
    under way, cancels the rest, ends the threads and closes the files.
    """

    def __init__(
        self, *, block_bytes: int | None = None, depth: int | None = None, backend: str = "auto"
    ) -> None:
        if backend not in BACKENDS:
            raise ConfigError(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")
        refusal = None if backend == "threads" else uring_refusal()
        if backend == "uring" and refusal is not None:
            raise ConfigError(f'backend="uring" is not possible here: {refusal}; use "auto" or "threads"')
        if refusal is not None and "liburing" not in refusal:  # a build without it is no news at run time
            warnings.warn(f"file I/O uses threads: {refusal}", RuntimeWarning, stacklevel=2)
        self.backend = "threads" if backend == "threads" or refusal is not None else "uring"
        self.block_bytes = _aio.DEFAULT_BLOCK_BYTES if block_bytes is None else block_bytes
        self.depth = _aio.DEFAULT_DEPTH if depth is None else depth
        try:
            self._core = _aio.Engine(self.backend, self.block_bytes, self.depth)
        except StorageError as error:
            what_to_do = of_open_files(error.errno)
            if what_to_do is not None:  # a failure of this process, whatever the options are
                raise StorageError(f"{error}; {what_to_do}", errno=error.errno) from None
            raise ConfigError(str(error)) from None
        self._live: deque[Request] = deque()
        self._lanes = Lanes()
        self._registered: list[tuple[int, int, object]] = []
        self._warned = False
        self._closer = weakref.finalize(self, self._core.close)

    def open(
        self,
        path: str | os.PathLike[str],
        nbytes: int,
        *,
        create: bool = False,
        direct: bool = True,
        label: str = "",
        name: str = "",
    ) -> File:
        """Opens a file of ``nbytes`` bytes.

        Args:
            create: make it, with its space allocated, so that a full disk shows now; it must not exist. Without,
                it must exist and have at least ``nbytes`` bytes.
            direct: bypass the page cache where the file system can; where it cannot, a warning says so once.
            label: what the bytes are, for messages; a request's own label comes first.
            name: what messages call the file, where its path says nothing ("/proc/self/fd/3").

        Raises:
            StorageError: names the file and the reason; a file that could not be made whole is removed.
        """
        at, raw = os.fspath(path), os.fsencode(path)
        # A name need not be UTF-8; a message must be.
        name = (name or os.fsdecode(path)).encode("utf-8", "backslashreplace").decode()
        if b"\0" in raw:  # where the kernel would end it
            raise StorageError(f"{name!r} is no path: it has a NUL", path=at, label=label)
        with _about(at, label):
            core = self._core.open(raw, nbytes, create, direct, label, name)
        file = File(self, core, at, nbytes, label, name, direct)
        self._warn_if_not_direct(file)
        return file

    def read(self, file: File, into: object, offset: int = 0, *, label: str = "") -> Request:
        """Starts to fill ``into`` with the file's bytes from ``offset`` on. ``into`` is a contiguous CPU tensor of any
        dtype or a writable buffer (bytearray, array); it must not be touched before the request is done."""
        return self._submit(False, file, into, offset, label)

    def write(self, file: File, data: object, offset: int = 0, *, label: str = "") -> Request:
        """Starts to write ``data``, a contiguous CPU tensor or a buffer, at ``offset`` bytes into the file. It must not
        be changed before the request is done. ``flush`` makes it durable."""
        return self._submit(True, file, data, offset, label)

    def flush(self, file: File) -> None:
        """Blocks until all writes of ``file`` that were started are done and on the device (fdatasync).

        Raises:
            StorageError: the device failed; or a write failed and nobody has waited for it.
        """
        with _about(file.path, file.label):
            self._core.sync(file._core)

    def settle(self) -> None:
        """Blocks until no request of this engine is under way, whatever becomes of each: for who is interrupted, and
        has memory or files that may not be touched any more. Ctrl-C waits for its end."""
        self._core.settle()
        self._forget_done()

    def register(self, memory: object) -> bool:
        """Pins ``memory`` for the life of the engine, so that the ring need not at each block: for staging buffers that
        are used again and again. The engine holds it until ``unregister`` or ``close``; a fork copies it at once.

        Returns:
            Whether all of it is registered. False is no error: the back end has no such thing, its table is full, or
            RLIMIT_MEMLOCK is too low; requests work as before.
        """
        address, nbytes, keep = _memory(memory, into=True)
        if any(begin < address + nbytes and address < begin + size for begin, size, _ in self._registered):
            raise StorageError("this memory, or a part of it, is registered already: unregister it first")
        registered = self._core.register_memory(address, nbytes)
        self._registered.append((address, nbytes, keep))
        return registered

    def unregister(self, memory: object) -> None:
        """Ends ``register`` of the same memory. No request may be using it."""
        address, nbytes, _ = _memory(memory, into=True)
        found = [one for one in self._registered if one[:2] == (address, nbytes)]
        if not found:
            raise StorageError(f"these {nbytes} bytes are not registered with this engine")
        self._core.forget_memory(address, nbytes)
        self._registered.remove(found[0])

    def counters(self) -> dict[str, int]:
        """Totals so far: ``reads``, ``writes`` (requests done), ``bytes_read``, ``bytes_written``, of which
        ``bytes_cached`` went through the page cache, ``short_transfers`` (blocks the system moved in parts), and
        ``in_flight`` (blocks, now)."""
        return self._core.counters()

    def close(self) -> None:
        """Ends the engine; again: nothing. Requests that were not under way yet fail."""
        self._closer()
        self._live.clear()
        self._registered.clear()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("an aio.Engine cannot be pickled or copied: make one in each process")

    def _submit(self, write: bool, file: File, memory: object, offset: int, label: str) -> Request:
        if file._engine is not self:
            raise StorageError(
                f"{file.name!r} was opened by another Engine: open it with the one that moves its bytes",
                path=file.path,
            )
        address, nbytes, keep = _memory(memory, into=not write)
        label = label or file.label
        request = Request(self, file, keep, offset, nbytes, label)
        held, request._row = self._lanes.begin(WRITE if write else READ, label) or (None, None)
        try:
            # Before it begins: Ctrl-C may come between any two lines, and memory that moves must be held by someone.
            self._live.append(request)
            with _about(file.path, label):
                self._core.submit(request, write, file._core, address, nbytes, offset, label, held)
        except BaseException:
            if not hasattr(request, "_core"):
                with contextlib.suppress(IndexError, ValueError):
                    self._live.remove(request)
            raise
        self._forget_done()
        return request

    def _forget_done(self) -> None:
        # A request whose caller dropped it lives here until it is done: its memory is in use. Without a lock, which
        # Ctrl-C could leave taken; by identity, so that two threads at once drop nothing that is under way.
        with contextlib.suppress(IndexError, ValueError):
            while (core := getattr(first := self._live[0], "_core", None)) is not None and core.done:
                first._memory = None
                self._live.remove(first)

    def _warn_if_not_direct(self, file: File) -> None:
        if file._wants_direct and not file.direct and not self._warned:
            self._warned = True
            warnings.warn(
                f"{file.name!r} is on a file system without O_DIRECT: file I/O there goes through the page cache, "
                "which costs a copy and memory",
                RuntimeWarning,
                stacklevel=3,
            )


def _memory(memory: Any, *, into: bool) -> tuple[int, int, object]:
    """Address, size in bytes, and what must be held for as long as they are used."""
    if isinstance(memory, torch.Tensor):
        if type(memory) not in (torch.Tensor, torch.nn.Parameter):
            raise StorageError(
                f"file I/O needs a plain tensor, not a {type(memory).__name__}: pass its local part"
            )
        if memory.device.type != "cpu" or memory.layout != torch.strided or not memory.is_contiguous():
            raise StorageError(
                f"file I/O needs a contiguous tensor on the CPU, not one of shape {tuple(memory.shape)} with layout "
                f"{memory.layout} on {memory.device}: copy it into aio.buffer() first"
            )
        if memory.is_conj() or memory.is_neg():
            raise StorageError(
                "file I/O moves bytes, and those of this tensor are of another one, whose conjugate or negative it is: "
                "pass its resolve_conj().resolve_neg()"
            )
        return memory.data_ptr(), memory.nbytes, memory.untyped_storage()
    if isinstance(memory, np.ndarray) and memory.dtype.hasobject:
        raise StorageError("file I/O moves bytes, and this ndarray holds references to Python objects")
    try:
        array = np.frombuffer(memory, dtype=np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        if isinstance(memory, (bytes, bytearray, memoryview)) and memoryview(memory).nbytes == 0:
            return 0, 0, memory
        raise StorageError(
            f"file I/O needs a CPU tensor or a contiguous buffer, not {type(memory).__name__}: {error}"
        ) from None
    if into and not array.flags.writeable:
        raise StorageError(f"a read needs writable memory, and this {type(memory).__name__} is read-only")
    return array.ctypes.data, array.nbytes, array


@contextlib.contextmanager
def _about(path: str, label: str) -> Iterator[None]:
    """Completes errors from below with what they are about."""
    try:
        yield
    except StorageError as error:
        error.path = path
        error.label = label
        what_to_do = of_open_files(error.errno)
        if what_to_do is not None:
            error.args = (f"{error}; {what_to_do}",)
        raise
