"""Plan files: what ``save_json`` and ``zero-compiler plan --json`` write, of which a run takes the decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from ..json_fields import read_json, shown
from .decisions import PlanDecisions, WeightDecisions

_WRITE_ONE = (
    "`zero.inspect(...).save_json(PATH)` and `zero-compiler plan MODEL --json PATH` write one that is right"
)


@dataclass(frozen=True)
class PlanFile:
    """The decisions of a file, and where it lies."""

    path: str
    decisions: PlanDecisions

    def refuse(self, problem: str) -> ConfigError:
        """The error that the plan cannot be held to, to be raised.

        Args:
            problem: a clause, and what to do.
        """
        return ConfigError(f"plan {self.path!r}: {problem}")

    def check_weights(self, found: Mapping[str, tuple[Sequence[int], str]]) -> None:
        """The weights of the plan are those of a model: by name, each with its shape and the name of its dtype.

        Raises:
            ConfigError: naming the first that differs.
        """
        wanted = self.decisions.weights
        for name in wanted:
            if name not in found:
                raise self.refuse(
                    f"it was made for another model: this one has no parameter {shown(name)}; make a plan of this one"
                )
        for name, (shape, dtype) in found.items():
            if name not in wanted:
                raise self.refuse(
                    f"it was made for another model: it has no parameter {shown(name)}; make a plan of this one"
                )
            row = wanted[name]
            if (row.shape, row.dtype) != (tuple(shape), dtype):
                raise self.refuse(
                    f"it was made for another model: parameter {shown(name)} is {row.dtype}{list(row.shape)} there and "
                    f"{dtype}{list(shape)} here; make a plan of this one"
                )

    def weight(self, name: str) -> WeightDecisions:
        """What was decided of a weight that is known to be in it."""
        return self.decisions.weights[name]


def load(path: str) -> PlanFile:
    """The decisions of a plan file; what else is in it follows from them, and is not read.

    Raises:
        ConfigError: there is no such file, it is no plan, or a decision is none.
    """

    def decisions_in(data: object) -> PlanDecisions:
        if not isinstance(data, dict) or "decisions" not in data:
            raise ConfigError("it is no plan: it has no 'decisions'")
        if data["decisions"] is None:
            raise ConfigError("it has no decisions, since nothing was planned when it was written")
        return PlanDecisions.from_dict(data["decisions"])

    try:
        return PlanFile(path, read_json(Path(path), decisions_in, _WRITE_ONE))
    except ConfigError as error:
        raise ConfigError(f"plan {error}") from None


def digest_at(path: str | None) -> str:
    """Stands for the decisions of a file; "" where none is given."""
    return "" if path is None else load(path).decisions.digest
