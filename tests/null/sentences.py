"""Sentences of errors as they stand in the source, and which of them a test in this folder quotes."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parents[1]


def _pieces(node: ast.expr) -> list[str]:
    """The literal parts of a string, in order."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return [p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str)]


def sentences(path: Path, raisers: Collection[str]) -> dict[str, int]:
    """Literal parts of what a file gives to ``raisers`` as the last argument, joined by ``*``, and the line."""
    found: dict[str, int] = {}
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef) or function.name in raisers:
            continue
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in raisers:
                parts = [p.strip() for p in _pieces(call.args[-1])]
                sentence = "*".join(p for p in parts if p)
                other = found.setdefault(sentence, call.lineno)
                assert other == call.lineno, f"{path.name}: lines {other} and {call.lineno} say the same"
    return found


@cache
def _quoted() -> list[str]:
    """Every string of a test, as it reads without the backslashes of a pattern."""
    strings = []
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.JoinedStr, ast.Constant)):
                strings.append(re.sub(r"\\(\W)", r"\1", " ".join(_pieces(node))))
    return strings


def untested(path: Path, raisers: Collection[str]) -> list[str]:
    """Sentences of a file that no test quotes whole, each with its line."""
    found = sentences(path, raisers)
    assert found, f"no error is raised in {path}"
    patterns = {s: re.compile(".*".join(map(re.escape, s.split("*")))) for s in found}
    return [
        f"{path.name}:{line}: {sentence}"
        for sentence, line in found.items()
        if not any(patterns[sentence].search(text) for text in _quoted())
    ]
