"""Imports between rooms run one way, in the order of the table; and no room has a circle of imports in it.

A room is a folder. A file may import what lies in its own room and in those above it in ``ROOMS``. Imports inside
functions and under TYPE_CHECKING count too.
"""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from conftest import shares

ROOT = Path(__file__).resolve().parents[2]

# The order of the rooms. "root" are the files of zero_compiler/ itself but for those of the surface.
ROOMS = (
    "root",
    "ir",
    "ranks",
    "storage",
    "cost",
    "memory",
    "tensors",
    "params",
    "construct",
    "passes",
    "emit",
    "report",
    "plan",
    "runtime",
    "compile",
    "optim",
    "tools",
    "integrations",
    "surface",
)
SURFACE = {"zero_compiler", "zero_compiler.__main__", "zero_compiler._tree"}
MOST_FILES = 20  # in one folder
COMPILED = {"zero_compiler.runtime._C", "zero_compiler.storage._aio"}


def files() -> dict[str, Path]:
    """Every module of the product, by its dotted name."""
    found = {}
    for folder, package in (
        ("zero_compiler", "zero_compiler"),
        ("passes", "zero_compiler.passes"),
        ("runtime", "zero_compiler.runtime"),
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)])] = path
    return found


FILES = files()


def room_of(module: str) -> str:
    if module in SURFACE:
        return "surface"
    name = module.split(".")[1]
    return name if name in ROOMS else "root"


def imports_of(module: str, source: str, is_package: bool = False) -> list[tuple[int, str]]:
    """Line and dotted name of every module of this project that a file imports. ``from zero_compiler import x`` means
    the module x where there is one, else the public name x of zero_compiler itself."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                package = package[: len(package) - (node.level - 1)]
                base = ".".join([*package, base] if base else package)
            of_base = [f"{base}.{alias.name}" for alias in node.names]
            targets = [name if name in FILES or name in COMPILED else base for name in of_base]
        else:
            continue
        for target in targets:
            if target.split(".")[0] in ("zero_compiler", "passes", "runtime"):
                found.append((node.lineno, target))
    return found


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    here, wrong = room_of(module), []
    for line, there in imports_of(module, source, is_package):
        if not there.startswith("zero_compiler"):
            wrong.append(
                f"{module}:{line} imports the top-level name {there}, which only exists in a checkout's root: use "
                "zero_compiler.*"
            )
        elif ROOMS.index(room_of(there)) > ROOMS.index(here):
            wrong.append(
                f"{module}:{line} imports {there}, but room {here!r} may not see room {room_of(there)!r}"
            )
    return wrong


def test_imports_between_rooms_run_one_way():
    wrong = [
        line
        for module, path in FILES.items()
        for line in violations(module, path.read_text(), path.name == "__init__.py")
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; none where there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_circle_of_imports():
    graph = {
        module: {
            there
            for _, there in imports_of(module, path.read_text(), path.name == "__init__.py")
            if there != module
        }
        for module, path in FILES.items()
        if room_of(module) != "surface"  # the front door is seen by nobody
    }
    assert not circle(graph)


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})


def test_folders_are_small():
    folders = {path.parent for path in FILES.values()}
    crowded = {str(f.relative_to(ROOT)): len(list(f.glob("*.py"))) for f in folders}
    assert not {name: count for name, count in crowded.items() if count > MOST_FILES}


def test_every_folder_is_a_room():
    folders = {path.name for path in (ROOT / "zero_compiler").iterdir() if (path / "__init__.py").exists()}
    assert folders | {"passes", "runtime", "root", "surface"} == set(ROOMS)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("zero_compiler.ir.ops", "from zero_compiler.cost.cost import CostModel"),
        ("zero_compiler.ir.ops", "from zero_compiler.cost import cost"),
        ("zero_compiler.ir.ops", "from ..passes import base"),
        ("zero_compiler.ir.ops", "import zero_compiler"),
        ("zero_compiler.ir.ops", "from zero_compiler import Config"),
        ("zero_compiler.cost.cost", "def f():\n    from zero_compiler.params.shard import x"),
        ("zero_compiler.passes.tiling.tile_loss", "import zero_compiler.runtime.session"),
        ("zero_compiler.storage.stores", "from zero_compiler.params import grads"),
        ("zero_compiler.runtime.session", "from zero_compiler.compile import backend"),
        ("zero_compiler.compile.backend", "from passes.base import Pass"),
    ],
)
def test_upward_import_is_found(module, source):
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("zero_compiler.ir.dump", "from . import facts\nfrom .ops import x\nfrom ..errors import ZeroError"),
        (
            "zero_compiler.passes.tiling.tile_loss",
            "from zero_compiler.passes.base import Pass\nfrom zero_compiler import cost, ir",
        ),
        (
            "zero_compiler.runtime.session",
            "import torch\nfrom zero_compiler.ir.program import Program\nfrom . import _C",
        ),
        ("zero_compiler.__main__", "from zero_compiler import passes, runtime, shard"),
    ],
)
def test_downward_import_passes(module, source):
    assert violations(module, source) == []


def test_files_whose_tests_share_what_one_made_go_to_one_worker():
    found = {p.name for p in (ROOT / "tests").glob("*/test_*.py") if shares(p)}
    assert {"test_install.py", "test_loop.py", "test_mesh.py", "test_tensor_parallel.py"} <= found
    assert not {"test_layers.py", "test_models.py", "test_faults.py"} & found
