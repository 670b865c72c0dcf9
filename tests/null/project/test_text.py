"""The text of the examples: every file on one side of the split, the same on every run."""

from __future__ import annotations

import importlib
import sys
import sysconfig
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture
def text(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module("text")
    monkeypatch.delitem(sys.modules, "text")
    return module


@pytest.mark.slow
def test_every_file_is_for_training_or_for_validation(text, monkeypatch):
    monkeypatch.setattr(text, "Text", list)  # the files themselves, not their bytes
    training, validation = text.standard_library()
    assert not set(training) & set(validation)
    root = Path(sysconfig.get_path("stdlib"))
    everything = {
        f for f in root.rglob("*.py") if not text._LEFT_OUT & set(f.relative_to(root).parts) and f.is_file()
    }
    assert set(training) | set(validation) == everything
    assert len(training) + len(validation) == len(everything)
    assert 0.02 < len(validation) / len(everything) < 0.1  # one in twenty


def test_the_split_is_the_same_on_every_run(text, monkeypatch, tmp_path):
    names = [f"package/m{k}.py" for k in range(200)]
    left_out = ["test/one.py", "package/tests/one.py", "site-packages/one.py", "package/data.txt"]
    monkeypatch.setattr(text, "Text", list)
    listed, found = Path.rglob, []
    for k, turn in enumerate((sorted, reversed)):  # another place, and another order of the file system
        root = tmp_path / str(k)
        for name in (*names, *left_out):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
        monkeypatch.setattr(sysconfig, "get_path", lambda name, root=root: str(root))
        monkeypatch.setattr(Path, "rglob", lambda *args, turn=turn: turn(list(listed(*args))))
        found.append([[f.relative_to(root).as_posix() for f in files] for files in text.standard_library()])
    assert found[0] == found[1]
    training, validation = found[0]
    assert sorted(training + validation) == sorted(names)
    # Nor does it depend on a seed of hashes.
    assert [text._digest(Path(p)) % 20 for p in FIXED] == list(FIXED.values())


def test_too_few_files_are_an_error(text, monkeypatch, tmp_path):
    (tmp_path / "one.py").write_text("x = 1")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="found only 1 Python files below .*: not enough text"):
        text.standard_library()


# Of one in twenty, those with 0 are for validation.
FIXED = {"ast.py": 0, "enum.py": 0, "heapq.py": 1, "json/decoder.py": 19}
