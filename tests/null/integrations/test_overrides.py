"""What is replaced in other libraries: each replacement stands in the docs, and says when its place has moved."""

from __future__ import annotations

import ast
import dataclasses
import sys
import types
from pathlib import Path

import pytest

from zero_compiler.errors import IntegrationError
from zero_compiler.integrations import overrides

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("override", overrides.OVERRIDES, ids=lambda o: o.name)
def test_every_override_stands_in_the_docs(override):
    rows = [
        line
        for line in (ROOT / "docs" / "with-your-tools.md").read_text().splitlines()
        if override.name in line
    ]
    assert any(override.tested.replace(",", ", ") in row for row in rows), f"no row of {override.name}"


@pytest.fixture
def library(monkeypatch):
    """A library with one function, and a table that replaces it."""
    made, user = types.ModuleType("somelib.part"), types.ModuleType("somelib.user")
    made.work = user.work = lambda model, flag=False: ("original", model)
    monkeypatch.setitem(sys.modules, "somelib", types.ModuleType("somelib"))
    monkeypatch.setitem(sys.modules, "somelib.part", made)
    monkeypatch.setitem(sys.modules, "somelib.user", user)
    row = overrides.Override("somelib", ">=1,<2", "somelib.part", "work", ("model",), "there is no seam")
    monkeypatch.setattr(overrides, "_version", lambda name: "1.5")
    monkeypatch.setattr(overrides, "OVERRIDES", (row,))
    return made, user, row


def test_a_function_is_replaced_once_wherever_it_was_imported(library):
    made, user, _ = library
    for _ in range(2):
        overrides.replace("somelib.part.work", lambda original: lambda model: ("replaced", *original(model)))
    assert made.work(1) == user.work(1) == ("replaced", "original", 1)


def test_a_static_method_stays_one(library, monkeypatch):
    made, _, row = library
    made.Worker = type("Worker", (), {"work": staticmethod(lambda model: ("original", model))})
    row = dataclasses.replace(row, attribute="Worker.work")
    monkeypatch.setattr(overrides, "OVERRIDES", (row,))
    overrides.replace(row.name, lambda original: lambda model: ("replaced", *original(model)))
    assert made.Worker.work(1) == made.Worker().work(1) == ("replaced", "original", 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"attribute": "gone"}, "zero replaces somelib.part.gone, which somelib 1.5 does not have"),
        ({"parameters": ("model", "mesh")}, "which somelib 1.5 has without the parameter 'mesh'"),
    ],
)
def test_a_place_that_has_moved_is_said(library, monkeypatch, change, said):
    row = dataclasses.replace(library[2], **change)
    monkeypatch.setattr(overrides, "OVERRIDES", (row,))
    with pytest.raises(IntegrationError, match="install somelib >=1,<2, with which this was tested") as error:
        overrides.replace(row.name, lambda original: original)
    assert said in str(error.value)


def test_libraries_are_imported_by_the_integrations_alone():
    theirs = {
        "accelerate",
        "trl",
        "peft",
        "lightning",
        "pytorch_lightning",
        "lightning_fabric",
        "transformers",
    }
    for path in (ROOT / "zero_compiler").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            found = {n.partition(".")[0] for n in names} & theirs
            assert not found or path.parent.name == "integrations", f"{path} imports {found}"
