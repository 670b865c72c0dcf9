"""Imports between rooms run one way, in the order of the table; and no room has a circle of imports in it.

A room is a folder. A file may import what lies in its own room and in those above it in ``ROOMS``. Imports inside
functions and under TYPE_CHECKING count too.
"""

import ast
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from scheduling import shares

ROOT = Path(__file__).resolve().parents[3]
TESTS = ROOT / "tests"

# The order of the rooms. "root" are the files of zero_compiler/ itself but for those of the surface.
ROOMS = (
    "root",
    "ir",
    "ranks",
    "storage",
    "cost",
    "memory",
    "tensors",
    "sharded",
    "replicated",
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
COMPILED = {"zero_compiler.runtime._C", "zero_compiler.storage._aio", "zero_compiler._torch_cpp"}


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


def test_the_session_sees_nothing_that_plans():
    """It is told what is decided of its calls (`compile/call_decisions.py`)."""
    module = "zero_compiler.runtime.session"
    rooms = {room_of(there) for _, there in imports_of(module, FILES[module].read_text())}
    assert rooms <= {"root", "ir", "ranks", "storage", "runtime"}


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


def test_functions_are_short():
    """Of at most 80 lines; above 60 a comment before the function says why it is long."""
    too_long, unexplained = [], []
    for module, path in FILES.items():
        lines = path.read_text().splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length, name = node.end_lineno - node.lineno + 1, f"{module}.{node.name}"
                begin = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                too_long += [name] if length > 80 else []
                explained = lines[begin - 2].lstrip().startswith("# Long: ")
                unexplained += [name] if length > 60 and not explained else []
    assert not too_long
    assert not unexplained


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
        ("zero_compiler.storage.stores", "from zero_compiler.sharded import grads"),
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


def test_no_class_name_occurs_in_two_modules():
    """Also not with an underscore before it in one of them: a name means one thing wherever it is read."""
    places: dict[str, set[str]] = {}
    for module, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), set()).add(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


# Modules whose tests have another name, and which.
TESTED_ELSEWHERE = {
    "zero_compiler._tree": "null/project/test_install.py",
    "zero_compiler.compile.call_decisions": "null/params/test_no_sync.py",  # which Programs are made, and when
    "zero_compiler.compile.loader": "null/runtime/test_pools.py",
    "zero_compiler.compile.phase_lowering": "null/compile/test_budget_search.py",  # counts what is lowered
    # What a report is made of, wherever a plan is made.
    "zero_compiler.report.frame": "null/tools/test_inspect.py",
    "zero_compiler.report.memory": "null/plan/test_budget.py",
    # What stands between a library and the class that its users name is tested by training with that.
    "zero_compiler.integrations.lightning_strategies": "dist/integrations/test_lightning.py",
    # Parts of a sharded model, which only zero.shard puts together.
    "zero_compiler.sharded.agreed_choices": "dist/plan/test_budget.py",
    "zero_compiler.sharded.chunk_storage": "dist/sharded/test_files.py",
    "zero_compiler.sharded.gradient_storage": "dist/sharded/test_files.py",
    "zero_compiler.sharded.managed_parameters": "null/params/test_shard.py",
    "zero_compiler.sharded.model_identity": "dist/ranks/test_call_handshake.py",
    "zero_compiler.sharded.rest_tiers": "null/cost/test_tier_placement.py",
    "zero_compiler.sharded.sharded_model": "null/params/test_shard.py",
    "zero_compiler.sharded.blocking_transfers": "dist/training/test_loop.py",  # eager gathers, every layout
    "zero_compiler.runtime.peer_watchdog": "dist/ranks/test_failing.py",
    "zero_compiler.runtime.session": "dist/training/test_loop.py",  # every kind of call
    "zero_compiler.runtime.reductions": "dist/training/test_loop.py",  # accumulation, sums, no_sync
    # Parts of one analysis, whose numbers are compared where a whole head, loss or operator is tiled.
    "zero_compiler.passes.tiling.column_sums": "null/passes/tiling/test_vocabulary.py",
    "zero_compiler.passes.tiling.head": "null/passes/tiling/test_tile_loss.py",
    "zero_compiler.passes.tiling.tile_graph": "null/passes/tiling/test_tile_loss.py",
    "zero_compiler.passes.tiling.tiled_values": "null/passes/tiling/test_tile_operators.py",
    "zero_compiler.passes.tiling.vocab_tile_loop": "null/passes/tiling/test_vocabulary.py",
}


def has_logic(path: Path) -> bool:
    """Whether a file defines a function, or a class with one."""
    tree = ast.parse(path.read_text())
    return path.name[:2] != "__" and any(isinstance(node, ast.FunctionDef) for node in ast.walk(tree))


def files_named_for(module: str) -> list[Path]:
    """Files of tests with the name of a module, in its room."""
    _, *folders, name = module.split(".")
    room = Path(*folders) if folders else Path(room_of(module))
    return [f for tier in ("null", "dist") if (f := TESTS / tier / room / f"test_{name}.py").exists()]


def test_every_module_with_logic_has_a_file_of_files_named_for_its_name():
    without = {module for module, path in FILES.items() if has_logic(path) and not files_named_for(module)}
    assert without - set(TESTED_ELSEWHERE) == set()
    assert set(TESTED_ELSEWHERE) - without == set(), "these have tests of their own, or are gone"
    assert [file for file in TESTED_ELSEWHERE.values() if not (TESTS / file).exists()] == []


def test_tests_lie_in_rooms():
    """Beside those of the product there are two: whole models beside plain PyTorch, and the project itself."""
    for tier in ("null", "dist"):
        assert not list((TESTS / tier).glob("test_*.py"))
        folders = {p.name for p in (TESTS / tier).iterdir() if list(p.glob("test_*.py"))}
        assert folders <= {*ROOMS, "training", "project"}


def test_files_whose_tests_share_what_one_made_go_to_one_worker():
    found = {p.name for p in (ROOT / "tests").rglob("test_*.py") if shares(p)}
    assert {"test_install.py", "test_loop.py", "test_mesh.py", "test_tensor_parallel.py"} <= found
    assert not {"test_layers.py", "test_models.py", "test_faults.py"} & found


def test_every_folder_with_code_is_installed():
    """A plain install has the packages that pyproject.toml lists, and no others."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {module.rpartition(".")[0] or module for module in FILES}
    assert sorted(listed) == sorted(folders)
