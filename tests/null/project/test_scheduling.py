"""A worker of the tests that crashes fails one test, and the others are all run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
CONFTEST = """
import pytest

@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from scheduling import FilesThatShare
    return FilesThatShare(config, log)
"""
# A file of tests that stay together, with a crash at its start and at its end; and one whose last test crashes.
SHARED = """
import os, signal, pytest

@pytest.fixture(scope="module")
def shared():
    return 1

@pytest.mark.parametrize("i", range(6))
def test_x(i, shared):
    if i in (0, 5):
        os.kill(os.getpid(), signal.SIGKILL)
"""
SINGLE = """
import os, signal, pytest

@pytest.mark.parametrize("i", range(8))
def test_x(i):
    if i == 7:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_crash_fails_one_test_and_hides_no_other(tmp_path):
    for name, text in {"conftest.py": CONFTEST, "test_shared.py": SHARED, "test_single.py": SINGLE}.items():
        (tmp_path / name).write_text(text)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
    ]
    env = {**os.environ, "PYTHONPATH": str(TESTS)}
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=120, env=env)
    assert "3 failed, 11 passed" in done.stdout, done.stdout + done.stderr
