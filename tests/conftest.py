"""How tests are dealt out to several workers, what they know of the machine, and how they spare its time."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from dist.spawn import collect_seldom

VARIANTS = 2  # of a slow test of one process
ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="run tests marked thorough too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--thorough"):
        return
    left_out = {item for item in items if item.get_closest_marker("thorough")}
    left_out |= not_sampled([item for item in items if item not in left_out])
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def not_sampled(items: list[pytest.Item]) -> set[pytest.Item]:
    """Of a slow test with more variants than ``VARIANTS`` those that are left to --thorough: the rest lies evenly among
    them. Those of ranks are not concerns of this: what looks like variants are cases that share their processes."""
    variants: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("dist"):
            variants.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = set()
    for of in variants.values():
        kept = {round(k * (len(of) - 1) / (VARIANTS - 1)) for k in range(VARIANTS)}
        left_out |= {item for k, item in enumerate(of) if k not in kept}
    return left_out


def pytest_configure(config: pytest.Config) -> None:
    """Plans are those of the preset "laptop", whatever processor this machine has and was measured on it."""
    cache = tempfile.TemporaryDirectory()
    config.add_cleanup(cache.cleanup)
    folder = Path(cache.name) / "zero_compiler"
    folder.mkdir()
    (folder / "plans").touch()  # no folder: what one test finds is not what another one does
    shutil.copy(ROOT / "zero_compiler" / "presets" / "laptop.json", folder / "hardware.json")
    os.environ["XDG_CACHE_HOME"] = cache.name
    # Else each rank compiles and loads a library to ask whether its compiler knows this processor's vectors.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


def pytest_collection_finish() -> None:
    gc.collect()
    collect_seldom()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from scheduling import FilesThatShare

    return FilesThatShare(config, log)
