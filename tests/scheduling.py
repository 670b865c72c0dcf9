"""How tests are dealt out to several workers, and what becomes of those of a worker that crashed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadScopeScheduling

# What one test of such a file makes serves the others: one worker runs them all, or each would make it again.
SHARES = re.compile(r'^cases = Cases\(__name__|scope="module"', re.MULTILINE)


def shares(path: Path) -> bool:
    """Whether tests of a file share what one of them has made."""
    return SHARES.search(path.read_text()) is not None


class FilesThatShare(LoadScopeScheduling):  # type: ignore[misc]
    """Tests one by one, but for those of files that share something, which stay together."""

    def __init__(self, config: Any, log: Any) -> None:
        super().__init__(config, log)
        self._root = Path(str(config.rootpath))
        self._shares: dict[str, bool] = {}

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        if file not in self._shares:
            self._shares[file] = shares(self._root / file)
        return file if self._shares[file] else nodeid

    def remove_node(self, node: Any) -> str | None:
        """The test in which a worker crashed, if it did; it fails, and what that worker had not begun goes to others.

        The class above hands out again whatever that worker ever had. For tests that are done it then waits for ever.
        """
        units = self.assigned_work.pop(node)
        crashed = next((test for unit in units.values() for test, done in unit.items() if not done), None)
        if crashed is None:
            return None
        units[self._split_scope(crashed)][crashed] = True
        self.workqueue.update({scope: unit for scope, unit in units.items() if not all(unit.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed

    def schedule(self) -> None:
        """As above, and no worker is left with a single test: one begins a test when it knows what comes next."""
        super().schedule()
        for node in self.nodes:
            self._reschedule(node)
