"""Runs mypy on the product, each file under the name by which it is imported.

    python tests/run_mypy.py [options of mypy]

passes/ and runtime/ stand beside zero_compiler/ in the tree and are imported as parts of it. mypy's command line takes
the name of a module from where its file lies; mypy itself takes pairs of a file and a name. The pairs follow from the
table in pyproject.toml by which an installation finds the same folders.
"""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

from mypy import build, main
from mypy.errors import CompileError
from mypy.modulefinder import BuildSource

ROOT = Path(__file__).resolve().parents[1]


def sources() -> list[BuildSource]:
    """Every file of the product with the name of its module; of a compiled module, the stub."""
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    found = []
    for package, folder in folders.items():
        for path in sorted([*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.pyi")]):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            module = ".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)])
            found.append(BuildSource(str(path.relative_to(ROOT)), module))
    return found


def check(arguments: list[str]) -> int:
    """Prints what mypy says; gives the status of a process."""
    os.chdir(ROOT)
    files = sources()
    _, options = main.process_options(arguments)
    options.fast_module_lookup = True  # names of modules are looked up among the files first
    try:
        messages = build.build(files, options).errors
    except CompileError as error:
        messages = error.messages
    for message in messages:
        print(message)
    print(f"mypy: {len(messages)} messages about {len(files)} files")
    return int(bool(messages))


if __name__ == "__main__":
    sys.exit(check(sys.argv[1:]))
