"""Where reads of files start: one unit ahead of the gathers that need them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from .ir import facts, ops
from .ir.facts import ParamRef
from .program import Fetch, Instr, WaitFetch


class Fetches:
    """Where reads of files go: those of a unit's chunks start as the gathers of the unit before it do, one layer ahead.

    The wait comes right before the gather. So the disk is at work as long as there is anything left to read, and
    chunks of two units at most lie in the pool.
    """

    def __init__(self, steps: list[Any], params: Mapping[ParamRef, Any]) -> None:
        nodes = [s for s in steps if not isinstance(s, list) and s.target is ops.gather]
        self._filed = [all(params[r].filed for r in facts.params(n)) for n in nodes]
        self._units: list[list[int]] = []
        for k, node in enumerate(nodes):
            if k and facts.unit(nodes[k - 1]) == facts.unit(node):
                self._units[-1].append(k)
            else:
                self._units.append([k])
        # The unit that follows the last gather of each.
        self._following = {unit[-1]: after for unit, after in pairwise(self._units)}
        self.starts: dict[int, int] = {}  # instruction that starts the fetch of each gather

    def before(self, index: int, at: int) -> list[Instr]:
        """Instructions in front of gather ``index``, the first of them number ``at``."""
        first = self._start(self._units[0], at) if index == 0 else []
        return [*first, *([WaitFetch(index)] if self._filed[index] else [])]

    def after(self, index: int, at: int) -> list[Instr]:
        """Instructions behind it."""
        return self._start(self._following.get(index, []), at)

    def _start(self, unit: list[int], at: int) -> list[Instr]:
        filed = [k for k in unit if self._filed[k]]
        self.starts.update((k, at + i) for i, k in enumerate(filed))
        return [Fetch(k) for k in filed]
