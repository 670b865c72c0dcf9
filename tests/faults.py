"""Storage that fails: small file systems mounted for a test, system calls that fail on demand in a child process, and Ctrl-C
anywhere."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@contextlib.contextmanager
def mounted(at: Path, *arguments: str) -> Iterator[Path]:
    """``mount ARGUMENTS at`` for a while; skips the test, with the reason, where mounting is refused."""
    at.mkdir(parents=True, exist_ok=True)
    if shutil.which("mount") is None:
        pytest.skip("needs the mount command")
    done = subprocess.run(["mount", *arguments, str(at)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"mounting is refused: {done.stderr.strip()}")
    try:
        yield at
    finally:
        # Lazily: a ring of the kernel lets go of its files a moment after it is closed.
        subprocess.run(["umount", "-l", str(at)], check=True)


def small_tmpfs(at: Path, size: str) -> contextlib.AbstractContextManager[Path]:
    """A file system in memory with so much space ("4m")."""
    return mounted(at, "-t", "tmpfs", "-o", f"size={size}", "tmpfs")


def takes_o_direct(path: Path) -> bool:
    """Whether files beside ``path``, which is made, can be opened past the page cache."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def small_disk(at: Path, megabytes: int) -> Iterator[Path]:
    """An ext4 file system in the file ``at.img``: whoever truncates that file makes blocks unreadable."""
    image = at.with_suffix(".img")
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("needs mkfs.ext4")
    with open(image, "wb") as file:
        file.truncate(megabytes << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True)
    with mounted(at, "-o", "loop", str(image)):
        yield at


SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* FAULT_CALL: pread, pwrite or fdatasync. FAULT_PATH: a part of the file's path. FAULT_FIRST: the number of the first
   call that fails. FAULT_COUNT: how many fail. FAULT_ERRNO: how; 0: it moves about half of the bytes; -1: it moves all
   of them, a third of a second late. */
static int strikes(const char* call, int fd) {
  static int count;
  const char* want = getenv("FAULT_CALL");
  if (!want || strcmp(want, call)) return 0;
  char link[64], path[4096] = {0};
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  if (readlink(link, path, sizeof path - 1) < 0 || !strstr(path, getenv("FAULT_PATH"))) return 0;
  int now = __atomic_add_fetch(&count, 1, __ATOMIC_RELAXED), first = atoi(getenv("FAULT_FIRST"));
  return now >= first && now - first < atoi(getenv("FAULT_COUNT"));
}
#define TRANSFER(name, type)                                                    \
  ssize_t name(int fd, type data, size_t size, off_t offset) {                  \
    ssize_t (*real)(int, type, size_t, off_t) = dlsym(RTLD_NEXT, #name);        \
    if (strikes(#name, fd)) {                                                   \
      int error = atoi(getenv("FAULT_ERRNO"));                                  \
      if (error < 0) { usleep(333333); return real(fd, data, size, offset); }   \
      if (error) { errno = error; return -1; }                                  \
      if (size > 8192) size = size / 2 / 4096 * 4096; /* O_DIRECT wants this */ \
    }                                                                           \
    return real(fd, data, size, offset);                                        \
  }
TRANSFER(pread, void*)
TRANSFER(pwrite, const void*)
int fdatasync(int fd) {
  int (*real)(int) = dlsym(RTLD_NEXT, "fdatasync");
  if (strikes("fdatasync", fd)) { errno = atoi(getenv("FAULT_ERRNO")); return -1; }
  return real(fd);
}
"""


def run_with_faults(
    scratch: Path, body: str, *, call: str, path: str, errno: int, first: int = 1, count: int = 1 << 30
) -> subprocess.CompletedProcess[str]:
    """Runs Python code in a child where a system call on files whose path contains ``path`` fails from its ``first``
    time on, ``count`` times: with ``errno``, or, where that is 0, by moving fewer bytes, or where it is -1, a third of a
    second late. Code under test must use the back end "threads": a ring makes no such calls. It may set
    ``os.environ["FAULT_CALL"]`` to say when."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    shim = scratch / "faults.so"
    (scratch / "faults.c").write_text(SHIM)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", str(shim), str(scratch / "faults.c"), "-ldl"], check=True
    )
    env = os.environ | {
        "LD_PRELOAD": str(shim),
        "FAULT_CALL": call,
        "FAULT_PATH": path,
        "FAULT_ERRNO": str(errno),
        "FAULT_FIRST": str(first),
        "FAULT_COUNT": str(count),
    }
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)], env=env, capture_output=True, text=True, check=False
    )


class Interrupt:
    """KeyboardInterrupt before line number ``at`` of those that run in ``files``."""

    def __init__(self, at: int, files: tuple[str, ...]) -> None:
        self.left, self._files = at, files

    def __enter__(self) -> Interrupt:
        self._was = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(self._was)

    def _called(self, frame: Any, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.endswith(self._files) else None

    def _line(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self._line
