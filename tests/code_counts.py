"""Counts of the product's code, of this checkout or of a commit: ``python tests/code_counts.py [COMMIT]``.

What is counted says how much there is to read and how much of it is typed, and is the same whatever the comments say:
statements of Python without docstrings and bare annotations, statements of C++ by their semicolons, ``Any`` in
annotations, functions by their lines, and methods of classes.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("zero_compiler/", "passes/", "runtime/")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(
    commit: str | None = None, folders: tuple[str, ...] = PRODUCT, ends: str = ".py"
) -> dict[str, str]:
    """Text of the tracked files of some folders, by path: as they lie in the checkout, or as a commit has them."""
    tree = ["ls-tree", "-r", "--name-only", commit] if commit else ["ls-files", "-co", "--exclude-standard"]
    paths = [p for p in _git(*tree).splitlines() if p.startswith(folders) and p.endswith(tuple(ends.split()))]
    if commit:
        return {path: _git("show", f"{commit}:{path}") for path in paths}
    return {path: (ROOT / path).read_text() for path in paths if (ROOT / path).exists()}


def _git(*args: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *args], check=True, capture_output=True, text=True).stdout


def statements(tree: ast.AST) -> int:
    """Statements, without docstrings and annotations that assign nothing."""
    return sum(isinstance(node, ast.stmt) and not _says_only(node) for node in ast.walk(tree))


def _says_only(node: ast.stmt) -> bool:
    if isinstance(node, ast.AnnAssign):
        return node.value is None
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def annotations(tree: ast.AST) -> Iterator[ast.expr]:
    """Every annotation: of arguments, of what functions return, of variables."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, Function) and node.returns is not None:
            yield node.returns


def any_annotations(tree: ast.AST) -> int:
    """How often ``Any`` stands in annotations."""
    inside = (node for annotation in annotations(tree) for node in ast.walk(annotation))
    return sum(getattr(node, "id", getattr(node, "attr", None)) == "Any" for node in inside)


def long_functions(tree: ast.AST, lines: int) -> list[tuple[str, int]]:
    """Functions of more than so many lines, with theirs."""
    found = (
        (n.name, (n.end_lineno or n.lineno) - n.lineno + 1) for n in ast.walk(tree) if isinstance(n, Function)
    )
    return [(name, count) for name, count in found if count > lines]


def methods(tree: ast.AST) -> dict[str, int]:
    """How many methods each class has, properties and those of operators among them."""
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return {c.name: sum(isinstance(node, Function) for node in c.body) for c in classes}


def cpp_statements(text: str) -> int:
    """Semicolons, without those of comments and of quoted text."""
    text = re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', "", text, flags=re.DOTALL)
    return text.count(";")


def main(commit: str | None = None) -> None:
    """Print all counts."""
    trees = {path: ast.parse(text) for path, text in sources(commit).items()}
    cpp = sources(commit, ("csrc/",), ".cpp .h .cc .hpp")
    cpp = {path: text for path, text in cpp.items() if "/test" not in path}
    print(f"statements of Python: {sum(map(statements, trees.values())):,} in {len(trees)} files")
    print(f"statements of C++: {sum(map(cpp_statements, cpp.values())):,} in {len(cpp)} files")
    print(f"Any in annotations: {sum(map(any_annotations, trees.values())):,}")
    for lines in (80, 60):
        found = [(path, *f) for path, tree in trees.items() for f in long_functions(tree, lines)]
        print(f"functions of more than {lines} lines: {len(found)}")
        for path, name, count in sorted(found, key=lambda f: -f[2]):
            print(f"  {count:>4} {path} {name}")
    large = [(n, path, name) for path, tree in trees.items() for name, n in methods(tree).items() if n > 15]
    print(f"classes of more than 15 methods: {len(large)}")
    for count, path, name in sorted(large, reverse=True):
        print(f"  {count:>4} {path} {name}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
