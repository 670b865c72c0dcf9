"""Memory that large tensors leave goes back to the system, whatever lives on beside them."""

import os
import subprocess
import sys
import textwrap

import pytest

from zero_compiler.storage import heap

GLIBC = "glibc" in (os.confstr("CS_GNU_LIBC_VERSION") or "")

_COME_AND_GO = """
    import torch
    from zero_compiler.storage import heap

    def resident():
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * 4096

    def steps(count):
        kept = []
        for k in range(count):
            large = [torch.ones(8 << 20, dtype=torch.uint8) for _ in range(2)]
            kept += [torch.ones(64) for _ in range(8)]
            del large
        return kept

    del [torch.ones(32 << 20, dtype=torch.uint8)][0]  # glibc's threshold is as high as it gets from here on
    before = resident()
    with heap.apart():
        kept = steps(40)
    print(resident() - before)
    kept += steps(40)
    heap.give_back()
    print(resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not GLIBC, reason="glibc's heap")
def test_tensors_that_come_and_go_leave_nothing():
    command = [sys.executable, "-c", textwrap.dedent(_COME_AND_GO)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    apart, given_back = map(int, done.stdout.split())
    # 640 MiB came and went in each: as often as not all of them would stay.
    assert apart < 24 << 20
    assert given_back < 24 << 20


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_MMAP_THRESHOLD_", "65536"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=65536")],
)
def test_what_the_user_has_set_stays(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    assert heap._libc.__wrapped__() is None
    monkeypatch.delenv(name)
    assert heap._libc.__wrapped__() is not None or not GLIBC
