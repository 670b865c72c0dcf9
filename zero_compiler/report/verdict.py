"""Whether a plan fits the hardware that it is made for, tier by tier: the first line of every report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..cost.hardware import HardwareSpec

_PLACES = {"device": "on the device", "host": "on the host", "nvme": "in files"}


def amount(nbytes: float) -> str:
    """A number of bytes in decimal units, short: "286.3 GB"."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        # What rounds up to a thousand of one unit is one of the next.
        if nbytes >= scale * 0.99995:
            return f"{nbytes / scale:,.1f} {unit}"
    return f"{math.ceil(nbytes):,} bytes"


@dataclass(frozen=True)
class TierUse:
    """What one rank takes of a tier.

    Args:
        tier: "device", "host" or "nvme".
        needed_bytes: what the plan takes when it takes most.
        available_bytes: what the hardware has for one rank; None: not known.
        reserve_bytes: of that, what a plan has to leave free.
        unlimited_bytes: what a plan takes that is made without a budget, where ``needed_bytes`` are the least that the
            search for a plan within one has found.
    """

    tier: str
    needed_bytes: int
    available_bytes: int | None
    reserve_bytes: int = 0
    unlimited_bytes: int | None = None

    @property
    def fits(self) -> bool | None:
        """None where the hardware does not say how much there is, unless nothing is needed."""
        if self.available_bytes is None:
            return None if self.needed_bytes else True
        return self.needed_bytes <= max(0, self.available_bytes - self.reserve_bytes)

    def text(self) -> str:
        """ "286.3 GB of 85.9 GB on the device (5.4 GB of it reserved)"."""
        if self.available_bytes is None:
            return f"{amount(self.needed_bytes)} {_PLACES[self.tier]} (how much there is, is not known)"
        aside = [f"{amount(self.reserve_bytes)} of it reserved"] if self.reserve_bytes else []
        if self.unlimited_bytes not in (None, self.needed_bytes):
            aside.append(f"{amount(self.unlimited_bytes)} without a budget")
        within = f"{amount(self.needed_bytes)} of {amount(self.available_bytes)} {_PLACES[self.tier]}"
        return within + (f" ({'; '.join(aside)})" if aside else "")

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values."""
        return {
            "tier": self.tier,
            "fits": self.fits,
            "needed_bytes": self.needed_bytes,
            "available_bytes": self.available_bytes,
            "reserve_bytes": self.reserve_bytes,
            "unlimited_bytes": self.unlimited_bytes,
        }


@dataclass(frozen=True)
class Verdict:
    """Whether one rank's plan fits the hardware.

    Args:
        hardware: name of the machine, as its description has it.
        tiers: the device first; others only where the plan takes bytes of them.
        assumed: why this machine was taken where nobody has said which; "": somebody has.
        planned: Programs are known; else ``tiers`` have what rests between steps alone.
        change: what would fit where this does not, or why nothing is named; "": nobody has looked.
    """

    hardware: str
    tiers: tuple[TierUse, ...]
    assumed: str = ""
    planned: bool = True
    change: str = ""

    @property
    def fits(self) -> bool | None:
        """None: it is not known."""
        found = [use.fits for use in self.tiers]
        if False in found:
            return False
        return True if self.planned and None not in found else None

    def line(self) -> str:
        """All of it in one line."""
        if self.fits is not None:
            what = f"{'fits' if self.fits else 'does not fit'} {self.hardware}"
        elif self.planned:
            what = f"not known whether it fits {self.hardware}"
        else:
            what = f"not planned yet; at rest on {self.hardware}"
        # Of a plan that does not fit, what is too much comes first.
        uses = sorted(self.tiers, key=lambda use: use.fits is not False)
        aside = f" (taken because no hardware was named and {self.assumed})" if self.assumed else ""
        change = f"; {self.change}" if self.change else ""
        return f"{what}{aside}: {', '.join(use.text() for use in uses)}{change}"

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values."""
        return {
            "fits": self.fits,
            "hardware": self.hardware,
            "assumed": bool(self.assumed),
            "planned": self.planned,
            "tiers": [use.to_dict() for use in self.tiers],
            "change": self.change,
            "line": self.line(),
        }


def verdict_of(
    spec: HardwareSpec, needed_bytes: Mapping[str, int], *, assumed: str = "", planned: bool = True
) -> Verdict:
    """The verdict on a plan whose ranks take so many bytes of each tier ("device", "host", "nvme") of ``spec``."""
    available = {"device": spec.memory_bytes, "host": spec.host_memory_bytes, "nvme": spec.nvme_bytes}
    tiers = tuple(
        TierUse(
            tier,
            needed_bytes.get(tier, 0),
            None if there is None else int(there),
            spec.reserve_bytes if tier == "device" else 0,
        )
        for tier, there in available.items()
        if tier == "device" or needed_bytes.get(tier, 0)
    )
    return Verdict(spec.name, tiers, assumed, planned)
