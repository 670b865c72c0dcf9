"""Weights as Hugging Face's libraries keep them: a folder of safetensors files, each written from its start to its end.

A safetensors file is the length of its header (8 bytes, little endian), the header (JSON: of each tensor its dtype,
shape and place in the data) and the data. So a file can be written with no more in memory than a part of one tensor.

Files are written in a folder of their own within the one that they are for, and renamed into that once all are there:
the file by which readers find the others comes last, and that of an earlier export goes first. Whenever the process is
killed, there is either such a file with all that it names, or none.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, NoReturn

import torch

from ..errors import ConfigError, StorageError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_NUMBERED = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_UNFINISHED = ".zero-export"  # the folder in which files are that are being written
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file: its name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WeightFile:
    """A file, with its tensors in the order of their data."""

    name: str
    entries: tuple[TensorEntry, ...]

    def header(self) -> bytes:
        """All that stands before the data, which begin at a multiple of 8 bytes."""
        text: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for entry in self.entries:
            end = at + entry.nbytes
            text[entry.name] = {
                "dtype": DTYPE_NAMES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [at, end],
            }
            at = end
        raw = json.dumps(text, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        return len(raw).to_bytes(8, "little") + raw

    @property
    def data_bytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


def files_of(entries: Sequence[TensorEntry], max_file_bytes: int) -> list[WeightFile]:
    """The files of a model: one, or as many as keep to ``max_file_bytes`` of data each. A tensor of more has a file of
    its own.

    Raises:
        ConfigError: a dtype that safetensors has no name for, or no positive ``max_file_bytes``.
    """
    if not isinstance(max_file_bytes, int) or isinstance(max_file_bytes, bool) or max_file_bytes < 1:
        raise ConfigError(f"max_file_bytes must be a number of bytes above 0, not {max_file_bytes!r}")
    for entry in entries:
        if entry.dtype not in DTYPE_NAMES:
            raise ConfigError(f"{entry.name} is of {entry.dtype}, which a safetensors file cannot hold")
    groups: list[list[TensorEntry]] = [[]]
    size = 0
    for entry in entries:
        if groups[-1] and size + entry.nbytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.nbytes
    names = (
        [SINGLE]
        if len(groups) == 1
        else [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    )
    # The largest elements come first, so that every tensor lies at a multiple of the size of its elements.
    return [
        WeightFile(name, tuple(sorted(group, key=lambda e: -e.dtype.itemsize)))
        for name, group in zip(names, groups, strict=True)
    ]


class WeightsFolder:
    """The files of one export while they are written, for one process.

    :meth:`begin`; for every file in order :meth:`open` and, for its tensors in order, :meth:`write`; :meth:`commit`.
    Whatever happens before that, :meth:`discard` leaves the files of the folder as they were.

    Args:
        folder: where the files are to be; made where it does not exist.
        files: all of them.
        what: the call, for messages.
    """

    def __init__(self, folder: str | os.PathLike[str], files: Sequence[WeightFile], what: str) -> None:
        self._folder = os.fspath(folder)
        self._files, self._what = files, what
        self._lock: int | None = None
        self._file: IO[bytes] | None = None
        self._left = 0  # bytes of the file that is open
        self.unfinished = os.path.join(self._folder, _UNFINISHED)

    def begin(self) -> None:
        """Make the folder, and in it that of unfinished files. Others that are put there are renamed with them.

        Raises:
            StorageError: it cannot be written to, or another export writes there now.
        """
        try:
            os.makedirs(self.unfinished, exist_ok=True)
            lock = os.open(self.unfinished, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            self._refuse(error, self._folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(lock)
                raise StorageError(
                    f"{self._what}: another export writes to {self._folder!r} now; wait for its end, or give another "
                    "folder",
                    path=self._folder,
                ) from None
            # Not every file system has locks.
        self._lock = lock
        for name in os.listdir(self.unfinished):  # of an export that was killed
            os.unlink(os.path.join(self.unfinished, name))

    def open(self, file: WeightFile) -> None:
        """Begin a file, behind the end of the one before; its room on the disk is taken now.

        Raises:
            StorageError: there is no room.
        """
        self._end_file()
        path = os.path.join(self.unfinished, file.name)
        try:
            self._file = open(path, "wb", buffering=0)
            header = file.header()
            with _where_known():
                os.posix_fallocate(self._file.fileno(), 0, len(header) + file.data_bytes)
            self._put(memoryview(header))
        except OSError as error:
            self._refuse(error, path)
        self._left = file.data_bytes

    def write(self, values: torch.Tensor) -> None:
        """The next values of the open file, of a contiguous tensor in memory.

        Raises:
            StorageError: they could not be written.
        """
        raw = values.detach().reshape(-1).view(torch.uint8).numpy().data
        self._left -= len(raw)
        try:
            self._put(memoryview(raw))
        except OSError as error:
            self._refuse(error, self._folder)

    def commit(self) -> None:
        """Rename all files to where they belong, and remove those of an earlier export.

        Raises:
            StorageError: that failed. There is then no file that looks whole.
        """
        try:
            self._end_file()
            final = SINGLE if len(self._files) == 1 else INDEX
            if final == INDEX:
                self._write_index()
            for name in os.listdir(self.unfinished):
                _sync(os.path.join(self.unfinished, name))
            for name in (INDEX, SINGLE):  # readers find nothing from here on
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self._folder, name))
            _sync(self._folder)
            kept = {file.name for file in self._files}
            for name in os.listdir(self._folder):
                if _NUMBERED.fullmatch(name) and name not in kept:
                    os.unlink(os.path.join(self._folder, name))
            for name in sorted(os.listdir(self.unfinished), key=lambda name: name == final):
                if name == final:
                    _sync(self._folder)
                os.replace(os.path.join(self.unfinished, name), os.path.join(self._folder, name))
            _sync(self._folder)
        except OSError as error:
            self._refuse(error, self._folder)
        self.discard()

    def discard(self) -> None:
        """Remove what is unfinished. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._lock is not None:
            shutil.rmtree(self.unfinished, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def _write_index(self) -> None:
        entries = [(file.name, entry) for file in self._files for entry in file.entries]
        index = {
            "metadata": {
                "total_parameters": sum(math.prod(entry.shape) for _, entry in entries),
                "total_size": sum(entry.nbytes for _, entry in entries),
            },
            "weight_map": {entry.name: name for name, entry in entries},
        }
        with open(os.path.join(self.unfinished, INDEX), "w") as file:
            json.dump(index, file, indent=2, sort_keys=True)
            file.write("\n")

    def _end_file(self) -> None:
        if self._file is not None:
            if self._left:
                raise AssertionError(f"{self._left} bytes of {self._file.name} were not written")
            self._file.close()
            self._file = None

    def _put(self, raw: memoryview) -> None:
        assert self._file is not None
        while raw:
            raw = raw[self._file.write(raw) :]

    def _refuse(self, error: OSError, path: str) -> NoReturn:
        raise StorageError(
            f"{self._what}: {path!r} cannot be written: {error.strerror}; give a folder that can be written to and has "
            f"room for {sum(file.data_bytes for file in self._files):,} bytes",
            errno=error.errno or 0,
            path=path,
        ) from error


@contextlib.contextmanager
def _where_known() -> Iterator[None]:
    """Taking room ahead is not known to every file system."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise


def _sync(path: str) -> None:
    """What was written to a file, or the names in a folder, outlives a power failure."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
