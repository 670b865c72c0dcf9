"""How tests are dealt out to several workers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

# What one test of such a file makes serves the others: one worker runs them all, or each would make it again.
SHARES = re.compile(r'^cases = Cases\(__name__|scope="module"', re.MULTILINE)


def shares(path: Path) -> bool:
    """Whether tests of a file share what one of them has made."""
    return SHARES.search(path.read_text()) is not None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    root = Path(str(config.rootpath))
    files: dict[str, bool] = {}

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            if file not in files:
                files[file] = shares(root / file)
            return file if files[file] else nodeid

    return Scheduling(config, log)
