"""One file knows what differs between the supported versions of torch."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from zero_compiler import torch_versions

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = ("zero_compiler", "passes", "runtime")
HERE = ROOT / "zero_compiler" / "torch_versions.py"


def test_the_range_is_that_of_the_package():
    first, past = ((f"{a}.{b}") for a, b in (torch_versions.FIRST, torch_versions.PAST_LAST))
    expected = f"torch>={first},<{past}"
    assert expected in PROJECT["project"]["dependencies"]
    assert expected in PROJECT["build-system"]["requires"]


def test_what_ci_runs_lies_in_the_range():
    text = (ROOT / ".ci" / "run").read_text()
    releases = re.findall(
        r"\b(\d+\.\d+)\.\d+\b", " ".join(re.findall(r"^(?:supported|latest)=.*$", text, re.M))
    )
    assert len(releases) >= 5
    for release in releases:
        assert torch_versions.FIRST <= tuple(map(int, release.split("."))) < torch_versions.PAST_LAST


@pytest.mark.parametrize(
    ("version", "is_in"),
    [("2.10.0", False), ("2.11.0", True), ("2.13.0+cpu", True), ("2.15.0+cu130", True), ("2.16.0", False)],
)
def test_supported(monkeypatch, version, is_in):
    monkeypatch.setattr(torch_versions.torch, "__version__", version)
    assert torch_versions.supported() is is_in


def asks(source: str) -> list[int]:
    """Lines that ask whether torch has a name: ``hasattr(torch.x, "name")``, or ``getattr`` with a default."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1):
            continue
        is_question = node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3)
        if is_question and isinstance(node.args[1], ast.Constant):
            asked = ast.unparse(node.args[0])
            if re.match(r"(torch|dist|_functorch)(\.\w+)*$", asked):
                found.append(node.lineno)
    return found


def test_no_other_file_asks_whether_torch_has_a_name():
    found = {
        str(path.relative_to(ROOT)): lines
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if path != HERE and (lines := asks(path.read_text()))
    }
    assert not found


def test_such_questions_are_found():
    assert asks(
        'x = getattr(torch._C, "_name", None)\nhasattr(torch.config, "y")\ngetattr(torch, name, 0)'
    ) == [1, 2]
