"""A figure as a table: what a paper says, what is planned here, by how much they differ, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

IN_A_PICTURE = "in a picture"


@dataclass(frozen=True)
class Fact:
    """What a paper says of one number.

    Args:
        low, high: equal for a number; ``high`` is infinite where it says "over". None, both: it shows the number in a
            picture only, and nothing is compared.
        said: in its words, short. ``source``: the document, with the section or table.
    """

    low: float | None
    high: float | None
    said: str
    source: str

    def deviation(self, here: float) -> float | None:
        """By what part ``here`` is larger or smaller than the nearest number that the paper says; None where it says
        none."""
        if self.low is None or self.high is None:
            return None
        nearest = min(max(here, self.low), self.high)
        return here / nearest - 1


def exactly(value: float, said: str, source: str) -> Fact:
    return Fact(value, value, said, source)


def over(value: float, said: str, source: str) -> Fact:
    return Fact(value, math.inf, said, source)


def between(low: float, high: float, said: str, source: str) -> Fact:
    return Fact(low, high, said, source)


def pictured(source: str) -> Fact:
    return Fact(None, None, IN_A_PICTURE, source)


@dataclass(frozen=True)
class FigureRow:
    """One number.

    Args:
        what: it is of. ``shown``: the number here, with its unit.
        here: the number to compare, in the unit of the fact. ``why``: the deviation, or how the number comes about.
    """

    what: str
    fact: Fact
    here: float
    shown: str
    why: str = ""

    def deviates(self) -> str:
        """The deviation, in percent; nothing where there is nothing to compare."""
        by = self.fact.deviation(self.here)
        if by is None:
            return ""
        rounded = round(100 * by)
        return "none" if rounded == 0 else f"{rounded:+d}%"


@dataclass(frozen=True)
class Figure:
    """Some numbers that belong together.

    Args:
        name: for the command line. ``about``: what is planned, in full sentences. ``notes``: below the table.
    """

    name: str
    title: str
    about: str
    rows: Sequence[FigureRow]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """A section of a page, which is also what the command prints."""
        lines = [f"## {self.title}", "", self.about, ""]
        lines += ["| | the paper | here | deviation | why | source |", "|---|---|---|---|---|---|"]
        for row in self.rows:
            cells = (row.what, row.fact.said, row.shown, row.deviates(), row.why, row.fact.source)
            lines.append("| " + " | ".join(cells) + " |")
        for note in self.notes:
            lines += ["", note]
        return "\n".join(lines)


def parameters(count: float) -> str:
    """A number of parameters, short: "7.5B"."""
    if count >= 999.5e9:
        return f"{count / 1e12:.3g}T"
    return f"{count / 1e9:.3g}B"


def gigabytes(nbytes: float) -> str:
    """In the papers' unit: "31.4 GB"."""
    value = nbytes / 1e9
    return f"{value:,.0f} GB" if value >= 100 else f"{value:.1f} GB"
