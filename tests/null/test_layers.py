"""Imports run one way: errors, config -> ir -> cost, layout, shard -> passes -> program -> runtime.

A file may import what ranks below it or beside it. ``TOP`` is the front door: it sees all. Imports inside
functions and under TYPE_CHECKING count too.
"""

import ast
from pathlib import Path

import pytest
from conftest import shares

ROOT = Path(__file__).resolve().parents[2]

TOP = 100
RANKS = {
    "_tree": 0,
    "errors": 0,
    "open_files": 0,
    "kept_files": 0,
    "whole": 3,
    "full_weight": 3,
    "config": 1,
    "ir": 2,
    "flags": 2,
    "foreach": 3,
    "fused": 3,
    "unscale": 3,
    "guards": 4,
    "windows": TOP,
    "calibrate": TOP,
    "measure_links": TOP,
    "measuring": 0,
    "hardware": 2,
    "arena": 3,
    "assign": 3,
    "cost": 3,
    "keeping": 7,
    "layout": 3,
    "failing": 3,
    "group": 3,
    "agreement": 3,
    "peers": 3,
    "peer_waits": 3,
    "store_clients": 0,
    "store_requests": 0,
    "peer_links": 3,
    "held": 4,
    "random_rows": 3,
    "headers": 3,
    "mesh": 3,
    "telling": 4,
    "tensor_parallel": 4,
    "copies": 4,
    "transforms": 4,
    "other_memory": 4,
    "one_backward": 5,
    "eager": 4,
    "grads": 4,
    "recompile_limit": 4,
    "modules": 4,
    "placing": 3,
    "plain": 4,
    "policy": 4,
    "reading": 4,
    "captured_writes": 4,
    "penalties": 4,
    "refusals": 4,
    "row_writes": 4,
    "shard": 4,
    "tiling": 4,
    "transport": 4,
    "openings": 4,
    "building": 5,
    "load": 5,
    "optimizer": TOP,
    "overlap": TOP,
    "capture": 5,
    "passes": 6,
    "cut": 7,
    "emit": 7,
    "ends": 7,
    "generated": 3,
    "inside": 7,
    "workspaces": 6,
    "fetches": 7,
    "live": 7,
    "recount": 7,
    "storages": 7,
    "sized": 7,
    "slots": 7,
    "program": 7,
    "picture": 7,
    "prefetch": 7,
    "report": 7,
    "saving": 7,
    "schedule": 7,
    "scratch": 7,
    "segments": 7,
    "verify": 7,
    "accumulation": 7,
    "beside": 7,
    "broken": 4,
    "budget": 7,
    "simulate": 7,
    "stepping": TOP,
    "runtime": 8,
    "runtime._aio": 0,
    "runtime.aio": 2,
    "runtime.checksums": 2,
    "runtime.guarded": 3,
    "runtime.heap": 0,
    "runtime.landing": 3,
    "runtime.parcels": 3,
    "runtime.resident": 1,
    "runtime.stores": 3,
    "runtime.streaming": 3,
    "runtime.turns": 0,
    "elementwise": 3,
    "files": 4,
    "updates": 5,
    "__init__": TOP,
    "__main__": TOP,
    "backend": TOP,
    "loader": 9,
    "frame_state": 10,
    "lowering": 11,
    "fitting": 12,
    "compiled": 10,
    "cli": TOP,
    "construct": TOP,
    "inspect": TOP,
    "io_bench": TOP,
    "planning": TOP,
}
# What a rank alone does not forbid.
NEVER = {("runtime", "passes"), ("passes", "runtime")}


def unit_of(module: str) -> str:
    """The row of RANKS for a dotted name: zero_compiler.ir.ops -> ir, zero_compiler -> __init__.

    A module of a package may have a row of its own."""
    parts = module.split(".")
    own = ".".join(parts[1:3])
    return own if own in RANKS else parts[1] if len(parts) > 1 else "__init__"


def is_module(name: str) -> bool:
    folder = ROOT / "zero_compiler"
    return name in RANKS or (folder / f"{name}.py").exists() or (folder / name).is_dir()


def imports_of(module: str, source: str, is_package: bool) -> list[tuple[int, str]]:
    """Line and row of RANKS of everything that a file imports from this project. ``from zero_compiler import x``
    means the module x where there is one, else the public name x of zero_compiler itself."""
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
            if base == "zero_compiler":
                targets = [base + "." + a.name if is_module(a.name) else base for a in node.names]
            else:
                below = base.removeprefix("zero_compiler.")
                targets = [f"{base}.{a.name}" if f"{below}.{a.name}" in RANKS else base for a in node.names]
        else:
            continue
        for target in targets:
            head = target.split(".")[0]
            if head in ("passes", "runtime"):
                found.append((node.lineno, f"the top-level name {head}"))
            elif head == "zero_compiler":
                found.append((node.lineno, unit_of(target)))
    return found


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    here = unit_of(module)
    if here not in RANKS:
        return [
            f"{module}: unknown module: add {here!r} to RANKS in tests/null/test_layers.py, at the rank where it belongs"
        ]
    wrong = []
    for line, there in imports_of(module, source, is_package):
        if there.startswith("the top-level name"):
            wrong.append(
                f"{module}:{line} imports {there}, which only exists in a checkout's root: use zero_compiler.*"
            )
        elif there not in RANKS:
            wrong.append(
                f"{module}:{line} imports zero_compiler.{there}, which is not in RANKS in tests/null/test_layers.py"
            )
        elif RANKS[there] > RANKS[here] or (here, there) in NEVER:
            wrong.append(f"{module}:{line} imports {there}, but {here} may not see it")
    return wrong


def files() -> list[tuple[str, Path]]:
    found = []
    for folder, package in (
        ("zero_compiler", "zero_compiler"),
        ("passes", "zero_compiler.passes"),
        ("runtime", "zero_compiler.runtime"),
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if parts[-1] == "__init__":
                parts = parts[:-1]
            found.append((".".join([package, *parts]), path))
    return found


def test_imports_run_one_way():
    found = files()
    assert {"zero_compiler", "zero_compiler.passes", "zero_compiler.runtime"} <= {
        module for module, _ in found
    }
    wrong = [
        line
        for module, path in found
        for line in violations(module, path.read_text(), path.name == "__init__.py")
    ]
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("zero_compiler.ir.ops", "from zero_compiler.cost import CostModel"),
        ("zero_compiler.ir.ops", "from zero_compiler import cost"),
        ("zero_compiler.ir.ops", "from ..passes import base"),
        ("zero_compiler.ir.ops", "import zero_compiler"),
        ("zero_compiler.ir.ops", "from zero_compiler import Config"),
        ("zero_compiler.cost", "def f():\n    from zero_compiler.shard import x"),
        ("zero_compiler.passes.tile", "import zero_compiler.runtime.session"),
        ("zero_compiler.runtime.session", "from zero_compiler.passes import base"),
        ("zero_compiler.runtime.session", "from zero_compiler import backend"),
        ("zero_compiler.backend", "from passes.base import Pass"),
        ("zero_compiler.surprise", ""),
    ],
)
def test_upward_import_is_found(module, source):
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("zero_compiler.ir.dump", "from . import facts\nfrom .ops import x\nfrom ..errors import ZeroError"),
        (
            "zero_compiler.passes.tile",
            "from zero_compiler.passes.base import Pass\nfrom zero_compiler import cost, ir",
        ),
        ("zero_compiler.runtime.session", "import torch\nfrom zero_compiler.program import Program"),
        ("zero_compiler.backend", "from zero_compiler import passes, runtime\nfrom zero_compiler import cli"),
    ],
)
def test_downward_import_passes(module, source):
    assert violations(module, source) == []


def test_files_whose_tests_share_what_one_made_go_to_one_worker():
    found = {p.name for p in (ROOT / "tests").glob("*/test_*.py") if shares(p)}
    assert {"test_install.py", "test_loop.py", "test_mesh.py", "test_tensor_parallel.py"} <= found
    assert not {"test_layers.py", "test_models.py", "test_faults.py"} & found
