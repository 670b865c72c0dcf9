"""The NVMe tier: tensors at rest in files, and where each of them lies.

A file belongs to one rank of one run: it has no name, so no other run can open it and nothing is left of it when
the process ends, however it ends. Each tensor has a handle over a shared mapping of the file, which works anywhere
a tensor does, and a place that direct transfers use, many times faster.

One owner a file: the two ways never overlap in time. A direct read finds what was written through the mapping (the
kernel writes dirty pages back first), and a mapped read what was written directly (it drops the pages).
:meth:`FileStore` tries both on every new file before anything relies on it.

One process a file, too: in a forked child handles can be read, what it writes through them stays its own, as with
other memory, and direct transfers are errors.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import math
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from zero_compiler.errors import StorageError
from zero_compiler.open_files import of_open_files

from ..alignment import BLOCK_BYTES, block_aligned
from .aio import Engine, File, Request
from .aio import buffer as aio_buffer
from .checksums import Checksums


@dataclass(frozen=True)
class FileSpan:
    """Bytes of a file beside bytes of a buffer: ``nbytes`` at ``offset``, and at ``at`` in the buffer."""

    store: FileStore
    offset: int
    nbytes: int
    at: int
    label: str


def merged(spans: Iterable[FileSpan]) -> list[FileSpan]:
    """Spans that follow each other both in the file and in the buffer are one transfer."""
    out: list[FileSpan] = []
    for s in spans:
        last = out[-1] if out else None
        if (
            last is not None
            and last.store is s.store
            and last.offset + last.nbytes == s.offset
            and last.at + last.nbytes == s.at
        ):
            few = last.label if last.label.endswith("...") else f"{last.label} ..."
            out[-1] = FileSpan(s.store, last.offset, last.nbytes + s.nbytes, last.at, few)
        else:
            out.append(s)
    return out


@dataclass(frozen=True)
class Region:
    """Where one tensor lies in a store; ``tensor`` is its handle, over a mapping of its own."""

    store: FileStore
    label: str
    offset: int
    nbytes: int  # whole blocks: the last one is the tensor's alone
    tensor: torch.Tensor

    def fill(self, values: torch.Tensor, start: int = 0) -> None:
        """Write ``values`` directly, from byte ``start`` on, a multiple of the block; blocks until that is done.

        Raises:
            StorageError: they do not fit, or the write failed.
        """
        raw = values.detach().to(self.tensor.dtype).contiguous().view(-1).view(torch.uint8)
        if start + raw.numel() > self.nbytes:
            raise StorageError(
                f"{self.label} has room for {self.nbytes:,} bytes in its file, not for {start + raw.numel():,}"
            )
        buffer = aio_buffer(min(_FILL_BYTES, self.nbytes))
        with self.store.whole():
            self._fill(raw, buffer, self.offset + start)

    def _fill(self, raw: torch.Tensor, buffer: torch.Tensor, begin: int) -> None:
        for at in range(0, raw.numel(), buffer.numel()):
            part = raw[at : at + buffer.numel()]
            buffer[: part.numel()].copy_(part)
            size = block_aligned(part.numel())
            buffer[part.numel() : size].zero_()
            self.store.write(FileSpan(self.store, begin + at, size, 0, self.label), buffer).wait()

    def span(self, start: int, nbytes: int, at: int) -> FileSpan:
        """Bytes from ``start`` on, which is a multiple of the block; the length is rounded up to whole blocks."""
        return FileSpan(self.store, self.offset + start, block_aligned(nbytes), at, self.label)


_FILL_BYTES = 8 << 20  # memory that filling a region takes
_GROWTH_BYTES = 1 << 30  # the largest file that is made without knowing that it will be full

# Regions by the address of their handle's memory: a tensor that was put in place of one is none.
_regions: weakref.WeakValueDictionary[int, FileStore] = weakref.WeakValueDictionary()


def region_of(tensor: torch.Tensor) -> Region | None:
    """The region whose handle ``tensor`` is, or is a view of from its beginning; None for any other tensor."""
    if not _regions or tensor.device.type != "cpu" or tensor.numel() == 0 or isinstance(tensor, FakeTensor):
        return None
    # Not by untyped_storage(): that makes a Python object, which owns the storage beside the tensor for as long as it
    # is there, so that the memory of a gradient that was dropped would never look free to the engine again.
    at = int(tensor.data_ptr() - tensor.storage_offset() * tensor.element_size())
    store = _regions.get(at)
    region = store.regions.get(at) if store is not None else None
    # torch moves storages that it sends to another process: what lies at the address of a handle may be another's.
    return region if region is not None and region.tensor.data_ptr() == at else None


class FileStore:
    """A file of this rank that holds tensors one after the other.

    Args:
        engine: what reads and writes it (``zero_compiler.storage.aio.Engine``).
        directory: where it is made (``Config.nvme_dir``).
        nbytes: its size, which is allocated now.
        label: what it holds, for messages.
        keep: give it a name, and leave it behind.
        checksums: what is read directly must be what was written directly; what was written through a handle is not
            checked until it is written directly again.

    Raises:
        StorageError: the directory takes no file, has no room for this one, or is on a file system where a mapping of a
            file does not agree with reads and writes. Nothing is left behind.

    ``name`` is what messages call the file.
    """

    def __init__(
        self,
        engine: Engine,
        directory: str,
        nbytes: int,
        label: str,
        keep: bool = False,
        checksums: bool = False,
    ) -> None:
        self.engine, self.directory, self.label = engine, directory, label
        self.regions: dict[int, Region] = {}
        self._end = 0
        self._checksums = Checksums(block_aligned(max(nbytes, 1))) if checksums else None
        # Of handles: the DTensors over them, which see what eager code writes, and versions when bytes were last known.
        self._watched: dict[int, weakref.ref[torch.Tensor]] = {}
        self._versions: dict[int, int] = {}
        self.nbytes = block_aligned(max(nbytes, 1))
        self._pid, self._keep = os.getpid(), keep
        self.fd, self.path = _make(directory, self.nbytes, label, keep)
        self.name = f"{label} in nvme_dir={directory}"
        if keep:
            self.name += f", {os.path.basename(self.path)}"
        closing = contextlib.ExitStack()
        closing.callback(os.close, self.fd)
        self._closer = weakref.finalize(self, closing.close)
        try:
            self.mapping = self._mapped()
            self.file = self._opened(direct=True)
            if not self._coherent():
                self.file.close()
                self.file = self._opened(direct=False)
                if not self._coherent():
                    raise StorageError(
                        f"nvme_dir={directory!r} is on a file system where what is written to a file is not seen by a "
                        f"mapping of it, or the other way round, so it cannot hold {label}; give another nvme_dir",
                        path=directory,
                        label=label,
                    )
        except BaseException:
            if hasattr(self, "file"):
                self.file.close()
            self.remove()
            raise
        closing.callback(_close_file, self.file, self._pid)

    def _opened(self, direct: bool) -> File:
        return self.engine.open(self.path, self.nbytes, direct=direct, label=self.label, name=self.name)

    def _mapped(self) -> Mapping:
        """The whole file; every handle shares it, for a mapping takes a descriptor."""
        try:
            return Mapping(self.fd, self.nbytes)
        except OSError as error:
            what = of_open_files(error.errno)
            problem = (
                f"nvme_dir={self.directory!r} takes files that cannot be mapped into memory, which {self.label} need"
                if what is None
                else f"the file of {self.label} in nvme_dir={self.directory!r} could not be mapped into memory"
            )
            raise StorageError(
                f"{problem}: {error.strerror}; {what or 'give another nvme_dir'}",
                errno=error.errno or 0,
                path=self.directory,
                label=self.label,
            ) from error

    def _coherent(self) -> bool:
        """Whether transfers and the mapping see each other's writes on this file system. Leaves zeros."""
        buffer, seen = aio_buffer(BLOCK_BYTES), self.mapping.bytes
        try:
            seen[:4] = b"mmap"
            self.engine.read(self.file, buffer, 0, label=self.label).wait()
            if bytes(buffer[:4].numpy()) != b"mmap":
                return False
            buffer[:4].copy_(torch.frombuffer(bytearray(b"file"), dtype=torch.uint8))
            self.engine.write(self.file, buffer, 0, label=self.label).wait()
            return seen[:4] == b"file"
        finally:
            seen[:4] = bytes(4)

    @property
    def room(self) -> int:
        """Bytes that nothing has been given yet."""
        return self.nbytes - self._end

    def allocate(self, label: str, shape: Iterable[int], dtype: torch.dtype) -> Region:
        """A place for a tensor, and its handle: zeros."""
        shape = tuple(shape)
        nbytes = math.prod(shape) * dtype.itemsize
        offset, size = self._end, block_aligned(max(nbytes, 1))
        if size > self.room:
            raise StorageError(f"{label} has no room left in {self.name}, of {self.nbytes:,} bytes")
        self._end += size
        # A storage of its own for each, by which it is known, and of its size, which is what is saved of it.
        raw = torch.frombuffer(self.mapping.bytes, dtype=torch.uint8, count=max(nbytes, 1), offset=offset)
        tensor = raw[:nbytes].view(dtype).view(shape)
        region = Region(self, label, offset, size, tensor)
        at = tensor.untyped_storage().data_ptr()
        self.regions[at] = region
        _regions[at] = self
        return region

    def read(self, span: FileSpan, buffer: torch.Tensor) -> Request | Checked:
        """Start to read a span of this file into its place in ``buffer``.

        Raises:
            StorageError: this is a forked child.
        """
        self._check_process()
        part = buffer[span.at : span.at + span.nbytes]
        request = self.engine.read(self.file, part, span.offset, label=span.label)
        if self._checksums is None:
            return request
        self._forget_mapped(self._checksums, span)
        return Checked(request, self._checksums, span, part)

    def write(self, span: FileSpan, buffer: torch.Tensor) -> Request:
        """Start to write it from there.

        Raises:
            StorageError: this is a forked child.
        """
        self._check_process()
        part = buffer[span.at : span.at + span.nbytes]
        if self._checksums is not None:
            self._forget_mapped(self._checksums, span)
            self._checksums.record(span.offset, part)
        return self.engine.write(self.file, part, span.offset, label=span.label)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """What breaks off inside leaves no transfer under way."""
        try:
            yield
        except BaseException:
            settle([self.engine])
            raise

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StorageError(
                f"{self.name} belong to the process that made them, and this is a forked child, which can read "
                "parameters and states in files and not compute or step with them; make the model in the child, or use "
                'the start method "spawn"',
                path=self.path,
                label=self.label,
            )

    def watch(self, region: Region, tensor: torch.Tensor) -> None:
        """``tensor`` is what eager code writes through to ``region`` from here on."""
        if self._checksums is not None:
            at = region.tensor.data_ptr()
            self._look(at, region, self._checksums)
            self._watched[at] = weakref.ref(tensor)
            self._versions[at] = self._version(at, region)

    def written(self, region: Region) -> None:
        """What was counted as a write through the handle since the last transfer was a direct one."""
        if self._checksums is not None:
            at = region.tensor.data_ptr()
            self._versions[at] = self._version(at, region)

    def _version(self, at: int, region: Region) -> int:
        """Grows with every write through the handle: autograd counts those of a DTensor, and of what is under it, which
        has a count of its own in a parameter."""
        seen = self._watched.get(at)
        watched = seen() if seen is not None else None
        under = getattr(watched, "_local_tensor", None)
        return sum(t._version for t in (region.tensor, watched, under) if t is not None)

    def _forget_mapped(self, checksums: Checksums, span: FileSpan) -> None:
        """Nothing is known of regions in ``span`` whose handles were written to."""
        for at, region in self.regions.items():
            if region.offset < span.offset + span.nbytes and span.offset < region.offset + region.nbytes:
                self._look(at, region, checksums)

    def _look(self, at: int, region: Region, checksums: Checksums) -> None:
        version = self._version(at, region)
        if self._versions.setdefault(at, 0) != version:
            checksums.forget(region.offset, region.nbytes)
            self._versions[at] = version

    def remove(self) -> None:
        """Close it, and leave no file behind, kept ones too."""
        self.close()
        if self._keep:
            with contextlib.suppress(OSError):
                os.unlink(self.path)

    def close(self) -> None:
        """Close the file; handles stay readable for as long as they live. Idempotent."""
        self.regions.clear()
        self._closer()


class Mapping:
    """A file of ``nbytes`` that is mapped for as long as anything lies over ``bytes``.

    In a forked child it becomes the child's own: what is written there is not in the file.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.bytes = mmap.mmap(fd, nbytes)
        at = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))
        own = os.dup(fd)  # the one that Python's object has is hidden
        _mapped[self.bytes] = at, nbytes, own, os.getpid()
        weakref.finalize(self.bytes, os.close, own)


_mapped: weakref.WeakKeyDictionary[mmap.mmap, tuple[int, int, int, int]] = weakref.WeakKeyDictionary()
# <sys/mman.h> of Linux; not in Python's. No memory is set aside for what a child might write.
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000


def _make_own() -> None:
    """In a forked child: private mappings in the same places."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    for at, nbytes, fd, pid in list(_mapped.values()):
        if pid == os.getppid():  # what is private already stays as it is
            how = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
            if libc.mmap(at, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, how, fd, 0) != at:
                # What this child writes would be in its parent's file. An exception here would only be printed.
                os.write(
                    2, b"zero_compiler: a forked child could not have its own copy of files in nvme_dir\n"
                )
                os._exit(1)


os.register_at_fork(after_in_child=_make_own)


def settle(engines: Iterable[Engine]) -> None:
    """Wait until none of ``engines`` moves anything; nothing under way can fail to be known by this."""
    for engine in engines:
        with contextlib.suppress(StorageError):  # a forked child, where nothing is under way
            engine.settle()


def _close_file(file: File, pid: int) -> None:
    if os.getpid() == pid:  # in a forked child its descriptors end with the process
        file.close()


class Checked:
    """A read whose bytes are compared with the sums of what was written, once it is done."""

    def __init__(self, request: Request, checksums: Checksums, span: FileSpan, part: torch.Tensor) -> None:
        self._request, self._checksums, self._span, self._part = request, checksums, span, part

    def done(self) -> bool:
        return self._request.done()

    def wait(self) -> None:
        """Wait for the read.

        Raises:
            StorageError: it failed, or the file holds other bytes than were written.
        """
        self._request.wait()
        at = self._checksums.differs(self._span.offset, self._part)
        if at is not None:
            raise StorageError(
                f"{self._span.label}: the bytes at {at:,} in {self._span.store.name} are not those that were written; "
                "the disk is faulty, or something else wrote there (a write through p.data or to state_dict() is not "
                "seen by nvme_checksums: write p itself under torch.no_grad(), or call load_state_dict); go on from a "
                "checkpoint on a sound disk",
                label=self._span.label,
                offset=at,
            )


def watch(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """``tensor``, a DTensor over ``local``, is what eager code writes through, where that rests in a file."""
    if (region := region_of(local)) is not None:
        region.store.watch(region, tensor)


def _make(directory: str, nbytes: int, label: str, keep: bool) -> tuple[int, str]:
    """A new file of ``nbytes``, allocated; its descriptor and a path that opens it."""
    with contextlib.suppress(StorageError):
        return _made(directory, nbytes, label, keep)
    gc.collect()  # files of models that are gone stay until then: modules and what they are sharded by hold each other
    return _made(directory, nbytes, label, keep)


def _made(directory: str, nbytes: int, label: str, keep: bool) -> tuple[int, str]:
    try:
        stat = os.statvfs(directory)
        if stat.f_blocks and nbytes > (room := stat.f_bavail * stat.f_frsize):  # ramfs says nothing
            raise StorageError(
                f"nvme_dir={directory!r} has {room:,} bytes free, and {label} need {nbytes:,}; free some, or give "
                "another nvme_dir",
                errno=errno.ENOSPC,
                path=directory,
                label=label,
            )
        fd, path = _open_new(directory, label, keep)
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except BaseException:
            os.close(fd)
            if keep:
                os.unlink(path)
            raise
        return fd, path
    except OSError as error:
        what = of_open_files(error.errno) or "give a directory that can be written to and has room"
        raise StorageError(
            f"nvme_dir={directory!r} takes no file of {nbytes:,} bytes for {label}: {error.strerror}; {what}",
            errno=error.errno or 0,
            path=directory,
            label=label,
        ) from error


def _open_new(directory: str, label: str, keep: bool) -> tuple[int, str]:
    flags = os.O_RDWR | os.O_CLOEXEC
    name = "".join(c if c.isalnum() else "-" for c in label)
    path = os.path.join(directory, f"zero-{os.getpid()}-{os.urandom(4).hex()}-{name}")
    if keep:
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        with contextlib.suppress(
            OSError
        ):  # not every file system has locks; see `kept_files.py` for who asks
            fcntl.flock(fd, fcntl.LOCK_SH)
        return fd, path
    with contextlib.suppress(OSError):  # not every file system has files without a name
        fd = os.open(directory, flags | os.O_TMPFILE, 0o600)
        return fd, f"/proc/self/fd/{fd}"
    fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)
    return fd, f"/proc/self/fd/{fd}"


class Nvme:
    """The NVMe tier of one sharded model on this rank: its I/O engine and its files.

    Args:
        directory: ``Config.nvme_dir``.
        rank: for messages.
        keep: ``Config.nvme_keep``.
        checksums: ``Config.nvme_checksums``.
    """

    def __init__(self, directory: str, rank: int, keep: bool, checksums: bool = False) -> None:
        self.directory, self.rank, self.keep, self.checksums = directory, rank, keep, checksums
        self.engine = Engine()
        self.stores: weakref.WeakSet[FileStore] = weakref.WeakSet()
        self._grown: list[FileStore] = []
        self._closer = weakref.finalize(self, _close, self.engine, self.stores)

    def store(self, what: str, nbytes: int, keep: bool | None = None) -> FileStore:
        """A new file for ``what``; it lives as long as the store that is returned, or longer where it is to be kept.

        Args:
            keep: None: as the tier keeps its files.
        """
        made = FileStore(
            self.engine,
            self.directory,
            nbytes,
            f"{what} of rank {self.rank}",
            self.keep if keep is None else keep,
            self.checksums,
        )
        self.stores.add(made)
        return made

    def grow(self, label: str, shape: Iterable[int], dtype: torch.dtype) -> Region:
        """A place in a file that is made when there is need: where the sum of what is to come is not known."""
        need = block_aligned(math.prod(shape := tuple(shape)) * dtype.itemsize)
        if need > _GROWTH_BYTES // 8:  # it would leave much of a file that others share
            return self.store("parameters", need).allocate(label, shape, dtype)
        store = next((s for s in self._grown if s.room >= need), None)
        if store is None:
            made = self._grown[-1].nbytes if self._grown else 0
            store = self._more(need, max(need, min(2 * made, _GROWTH_BYTES)))
            self._grown.append(store)
        return store.allocate(label, shape, dtype)

    def _more(self, need: int, wanted: int) -> FileStore:
        """A file of ``wanted`` bytes, or of what is needed now where there is no room for more."""
        try:
            return self.store("parameters", wanted)
        except StorageError:
            if wanted == need:
                raise
            return self.store("parameters", need)

    def close(self) -> None:
        self._closer()


def _close(engine: Any, stores: weakref.WeakSet[FileStore]) -> None:
    for store in list(stores):
        store.close()
    engine.close()
