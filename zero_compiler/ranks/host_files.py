"""Files in memory that one process of a host makes for others of the same user, which meet it under a name.

The first that comes under a name makes the files; the others wait until it gives them. Nothing stays behind: the name
is that of a socket that no file system holds (unix(7), "abstract"), and memory is freed when no process has its file
open or mapped any more. The kernel tells those who wait when the first has ended; one of them is the first then.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable

MOST_FILES = 253  # that the kernel passes in one message (SCM_MAX_FD)
_AGAIN_S = 0.01  # between tries, where the first has just begun or ended
_PATIENCE_S = 2.0  # for that
_LOOK_S = 1.0  # how often the first asks whether its files are still wanted


def make_file(title: str, parts: Iterable[memoryview | bytes]) -> int:
    """A file in memory with these ``parts``, one behind the other; ``title`` is shown in /proc.

    Raises:
        OSError: there is no memory, or the system makes no such files.
    """
    fd = os.memfd_create(title, os.MFD_CLOEXEC)
    try:
        for part in parts:
            left = memoryview(part)
            while left:
                left = left[os.write(fd, left) :]
    except BaseException:
        os.close(fd)
        raise
    return fd


class Giver:
    """The first under a name. A context, at whose end another may be the first, unless files are given by then."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener: socket.socket | None = listener

    def __enter__(self) -> Giver:
        return self

    def __exit__(self, *_: object) -> None:
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)  # a process that was forked meanwhile has it open too
            self._listener.close()

    def give(self, files: list[int], takers: int, wanted: Callable[[], bool]) -> None:
        """Give ``files`` (at most ``MOST_FILES``; none says that each is to do without) to whoever has come or comes,
        beside what this process does. They are closed here once ``takers`` other processes have them, or once they
        are not ``wanted`` any more."""
        listener, self._listener = self._listener, None
        assert listener is not None
        threading.Thread(
            target=_serve, args=(listener, files, takers, wanted), name="zero-host-files", daemon=True
        ).start()


def first_or_files(name: str, most: int) -> Giver | list[int]:
    """What a process is under ``name`` (of at most 100 characters), under which at most ``most`` meet: where it is the
    first a :class:`Giver`, else it has the files that the first gives, for which this waits. There are none where the
    first gives none, and where another user has the name.

    Raises:
        OSError: the system makes no such sockets.
    """
    address = f"\0zero-{name}"
    patience = _PATIENCE_S
    while True:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(address)
            listener.listen(most)
            return Giver(listener)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            try:
                asking.connect(address)
                if _user_and_process(asking)[0] != os.getuid():
                    return []
                patience = _PATIENCE_S
                files = _take(asking)
            except ConnectionError:
                files = None
        if files is not None:
            return files
        if patience <= 0.0:  # forked from the first, which has ended, a process keeps the name
            return []
        time.sleep(_AGAIN_S)
        patience -= _AGAIN_S


def _take(asking: socket.socket) -> list[int] | None:
    """The files that the first gives; None where it has ended before. Where this process may not have so many files
    open, none."""
    said, files, *_ = socket.recv_fds(asking, 1, MOST_FILES)
    if said and len(files) == said[0]:
        return files
    for fd in files:
        os.close(fd)
    return [] if said else None


def _serve(listener: socket.socket, files: list[int], takers: int, wanted: Callable[[], bool]) -> None:
    came = {os.getpid()}
    try:
        with listener:
            listener.settimeout(_LOOK_S)
            while len(came) <= takers and wanted():
                process = _give_to_next(listener, files)
                if process is None:
                    time.sleep(_AGAIN_S)
                else:
                    came.add(process)
            listener.shutdown(socket.SHUT_RDWR)
            while _give_to_next(listener, files) is not None:  # who came before that
                pass
    finally:
        for fd in files:
            os.close(fd)


def _give_to_next(listener: socket.socket, files: list[int]) -> int | None:
    """Wait for the next that asks for ``files``, and give it these: its process. None where nobody has come in time, or
    one that has ended since."""
    try:
        asking, _ = listener.accept()
        with asking:
            user, process = _user_and_process(asking)
            if user != os.getuid():
                return None
            socket.send_fds(asking, [bytes([len(files)])], files)
            return process
    except OSError:
        return None


def _user_and_process(peer: socket.socket) -> tuple[int, int]:
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, user, _ = struct.unpack("3i", raw)
    return user, process
