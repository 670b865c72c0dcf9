"""``make setup`` compiles the engine again, and says so, where pip has put another torch into the environment."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def tree(tmp_path):
    """A tree whose set-up is done, with torch 2.13.0 as the last set-up found it."""
    for name in ("Makefile", "constraints.txt", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    stamps = tmp_path / ".venv" / ".zero"
    for folder in (stamps, tmp_path / ".venv" / "bin", tmp_path / "build", tmp_path / "tests" / "null"):
        folder.mkdir(parents=True)
    (stamps / "constraints.txt").write_text("numpy==2.4.6\ntorch==2.13.0+cpu\n")
    (tmp_path / "build" / "installed-by").write_text(f"{tmp_path}/.venv\n")
    for stamp in ("venv", "liburing", "tools", "package"):
        (stamps / stamp).touch()
    return tmp_path


def would_run(tree: Path, version: str) -> str:
    """What ``make setup`` would run, where the environment's Python says that its torch is ``version``."""
    python = tree / ".venv" / "bin" / "python"
    python.write_text(f"#!/bin/sh\necho {version}\n")
    python.chmod(0o755)
    made = ["make", "--dry-run", "setup", f"VENV={tree}/.venv"]
    return subprocess.run(made, cwd=tree, text=True, capture_output=True, check=True).stdout


def test_the_same_torch_compiles_nothing(tree):
    assert "compil" not in would_run(tree, "2.13.0+cpu")


def test_another_torch_has_the_engine_compiled_again(tree):
    commands = would_run(tree, "2.14.1+cu130")
    assert "torch is 2.14.1+cu130 now; what was compiled for 2.13.0+cpu is compiled again for it" in commands
    assert "[3/3] compiling the engine" in commands
