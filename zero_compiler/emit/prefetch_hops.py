"""Where chunks that rest on another tier set out for the device: each hop some units ahead of what needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from ..ir import facts, ops
from ..ir.facts import ParamRef
from ..ir.instructions import Fetch, Instruction, WaitFetch
from ..passes.base import ParamPlan


class Fetches:
    """Where the hops of a gather's chunks go, from the gather back to the tier where they rest.

    *Stage* 0 are the gathers, in their order; stage 1 is the last hop of each, stage 2 the one before it. Boundary 0 of
    a stage stands at the top, boundary ``j`` behind the start of unit ``j - 1`` in the stage before. A hop starts at
    one of its boundaries; it is waited for right before the stage before starts with the unit. At distance 1, behind
    the start of the unit before: then a lane is at work as long as there is anything left to move, and the chunks of
    two units at most lie in its pool.

    Args:
        steps: of the scheduled graph.
        ahead: distance of each unit, by stage from 1 on, in the order of the gathers; 1 for what is not there.
    """

    def __init__(
        self, steps: list[fx.Node], params: Mapping[ParamRef, ParamPlan], ahead: Sequence[Sequence[int]] = ()
    ) -> None:
        nodes = [s for s in steps if not isinstance(s, list) and s.target is ops.gather]
        self._hops = [_hops(node, params) for node in nodes]
        self._units: list[list[int]] = []
        for k, node in enumerate(nodes):
            if k and facts.unit(nodes[k - 1]) == facts.unit(node):
                self._units[-1].append(k)
            else:
                self._units.append([k])
        self._last = {unit[-1]: u for u, unit in enumerate(self._units)}
        # By stage and boundary, the units that start there.
        self._begin: list[dict[int, list[int]]] = [{}]
        for stage in range(1, max(self._hops, default=0) + 1):
            far = ahead[stage - 1] if stage <= len(ahead) else [1] * len(self._units)
            begin: dict[int, list[int]] = {}
            for u, distance in enumerate(far):
                begin.setdefault(max(0, u - distance + 1), []).append(u)
            self._begin.append(begin)
        self.starts: dict[tuple[int, int], int] = {}  # instruction that starts each hop of each gather
        self.waits: dict[tuple[int, int], int] = {}  # and the one that waits for it

    def before(self, index: int, at: int) -> list[Instruction]:
        """Instructions in front of gather ``index``, the first of them number ``at``."""
        out: list[Instruction] = []
        if index == 0:
            for stage in range(len(self._begin) - 1, 0, -1):
                self._pass(stage, 0, at, out)
        if self._hops[index]:
            self._wait(index, self._hops[index] - 1, at, out)
        return out

    def after(self, index: int, at: int) -> list[Instruction]:
        """Instructions behind it."""
        out: list[Instruction] = []
        if index in self._last:
            self._pass(1, self._last[index] + 1, at, out)
        return out

    def _pass(self, stage: int, boundary: int, at: int, out: list[Instruction]) -> None:
        """Start what starts at a boundary of a stage."""
        if stage >= len(self._begin):
            return
        for u in self._begin[stage].get(boundary, ()):
            for k in self._units[u]:
                hop = self._hops[k] - stage
                if hop > 0:
                    self._wait(k, hop - 1, at, out)
                if hop >= 0:
                    self.starts[k, hop] = at + len(out)
                    out.append(Fetch(k, hop))
            self._pass(stage + 1, u + 1, at, out)

    def _wait(self, index: int, hop: int, at: int, out: list[Instruction]) -> None:
        self.waits[index, hop] = at + len(out)
        out.append(WaitFetch(index, hop))


def _hops(node: fx.Node, params: Mapping[ParamRef, ParamPlan]) -> int:
    """How many steps the chunks of a gather take to the device: parameters of one bucket take the same. Second shards
    are there."""
    if facts.over_host(node):
        return 0
    return min(len(params[r].path) for r in facts.params(node))
