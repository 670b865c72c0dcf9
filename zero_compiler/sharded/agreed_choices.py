"""What the ranks of a sharded model have agreed on for its plans: decided once, then held to by all of them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class AgreedChoices:
    """Decisions of all ranks of one sharded model.

    Args:
        kept: whether the memory budget keeps a weight of stage 3 gathered, by its name.
        tile_bytes: most bytes of a weight that are gathered at a time, by its name; None: it is gathered whole.
        distances: texts of other decisions, by what is decided: how far ahead gathers start, by phase and order of
            units, among them.
        shown: what tensor-parallel ranks showed of their graphs, by what this one showed.
        reduces_each: gradients of micro-batches do not wait for each other where the choice is left to the plan, since
            whole ones do not fit the memory budget.
        attempt: to compile the model. What ranks told each other in an earlier one counts no more.
    """

    kept: dict[str, bool] = field(default_factory=dict)
    tile_bytes: dict[str, int | None] = field(default_factory=dict)
    distances: dict[str, str] = field(default_factory=dict)
    shown: dict[str, list[str]] = field(default_factory=dict)
    reduces_each: bool = False
    attempt: int = 0

    def forget(self) -> None:
        """Nothing is decided: no rank could compile this model, and none holds a Program of it. All ranks do alike."""
        self.kept.clear()
        self.tile_bytes.clear()
        self.distances.clear()
        self.shown.clear()
        self.reduces_each = False
        self.attempt += 1
