"""What the ranks of a sharded model have agreed on for its plans: decided once, then held to by all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..ir.plan_file import PlanFile


@dataclass
class AgreedChoices:
    """Decisions of all ranks of one sharded model.

    Args:
        kept: whether the memory budget keeps a weight of stage 3 gathered, by its name.
        quantised: whether a weight that may travel in 8 bits does, by its name; it does where nothing is said.
        tile_bytes: most bytes of a weight that are gathered at a time, by its name; None: it is gathered whole.
        decided: texts of other decisions, by what is decided: how far ahead gathers start (by phase and order of
            units), what a budget chooses, which plan is held to.
        shown: what tensor-parallel ranks showed of their graphs, by what this one showed.
        reduces_each: gradients of micro-batches do not wait for each other where the choice is left to the plan, since
            whole ones do not fit the memory budget.
        plan: the file whose decisions all of them hold to, if any.
        attempt: to compile the model. What ranks told each other in an earlier one counts no more.
    """

    kept: dict[str, bool] = field(default_factory=dict)
    quantised: dict[str, bool] = field(default_factory=dict)
    tile_bytes: dict[str, int | None] = field(default_factory=dict)
    decided: dict[str, str] = field(default_factory=dict)
    shown: dict[str, list[str]] = field(default_factory=dict)
    reduces_each: bool = False
    plan: PlanFile | None = None
    attempt: int = 0

    def forget(self) -> None:
        """Nothing is decided: no rank could compile this model, and none holds a Program of it. All ranks do alike."""
        self.kept.clear()
        self.quantised.clear()
        self.tile_bytes.clear()
        self.decided.clear()
        self.shown.clear()
        self.reduces_each = False
        self.plan = None
        self.attempt += 1
