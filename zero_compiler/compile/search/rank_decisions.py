"""What rank 0 has decided for all ranks of a search: a rank that compiles again holds to it and asks nobody."""

from __future__ import annotations

from ...plan import schedule
from ..frame_state import FrameState

# Orders of measures for a budget of memory: tiles of weights after all others; before fewer activations are saved; or
# that, and backward may run costly operators again.
LAST, FIRST, RECOMPUTE = "last", "first", "recompute"


class RankDecisions:
    """Decisions on the plan of a frame, by what they are about."""

    def __init__(self, state: FrameState) -> None:
        self.state = state

    def decided(self, what: str) -> bool | None:
        """What was decided for all ranks before, if anything was."""
        text = self.state.settled(self.key(what)) if self.state.first is not None else None
        return None if text is None else text == str(True)

    def is_held_to(self, what: str) -> bool:
        """Whether it was decided for all ranks to do so, and not found later that another order of measures, which does
        without, takes less time."""
        order = self.state.settled(self.key("order")) if self.state.first is not None else None
        return bool(self.decided(what)) and order in (None, LAST)

    def agreed(self, what: str, wanted: bool) -> bool:
        """What was decided for all ranks, now by rank 0 or before."""
        state = self.state
        if state.first is None:
            return wanted
        before = self.decided(what)
        if before is not None:
            return before
        return bool(state.loader.decide(state.first, self.key(what), str(wanted)) == str(True))

    def key(self, what: str) -> str:
        """By weights and not by units, which change when weights are tiled: what was decided before that is found by a
        rank that compiles again, alone."""
        return schedule.key_of(what, [f"{ref.owner}:{ref.name}" for ref in self.state.choice.order])
