"""Makes a checkout importable from its own root.

In the tree, ``passes/`` and ``runtime/`` stand beside ``zero_compiler/``; once installed they lie inside it.
Python started in the root of a checkout finds the checkout's ``zero_compiler`` before any installed one, and
there the two packages would be missing, and so would the compiled modules of a plain install, which lie in
site-packages only. ``install`` adds two import finders to ``sys.meta_path``:

    zero_compiler.passes       <checkout>/passes, and
    zero_compiler.runtime      <checkout>/runtime: at the front, since an editable install of another checkout would
                               give its own, beside the rest of this one
    zero_compiler.runtime._C, zero_compiler.storage._aio, zero_compiler._torch_cpp
                               at the end: the installed ones, where none is built in the checkout

In an installed package nothing is added. After a plain install, Python in the root of a checkout thus runs the
checkout's Python files with the installed engine: whoever edits ``csrc/`` wants an editable install.
"""

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_PACKAGE = Path(__file__).resolve().parent
_ROOT = _PACKAGE.parent
_BESIDE = ("zero_compiler.passes", "zero_compiler.runtime")
_COMPILED = ("zero_compiler.runtime._C", "zero_compiler.storage._aio", "zero_compiler._torch_cpp")


class _BesideFinder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(_ROOT)]) if name in _BESIDE else None


class _CompiledFinder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _COMPILED:
            return None
        folders = name.split(".")[:-1]
        return PathFinder.find_spec(name, [os.path.join(p, *folders) for p in sys.path])


def install() -> None:
    """Adds the finders when this file lies in a checkout. Calling it again does nothing."""
    in_checkout = not (_PACKAGE / "passes").is_dir() and (_ROOT / "passes").is_dir()
    if in_checkout and not any(isinstance(finder, _BesideFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BesideFinder())
        sys.meta_path.append(_CompiledFinder())
