"""What would shorten a step: for whatever bounds it, changes of what was asked, each of them planned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ..cost.timeline import COMPUTE, HOST, LINK, READ, WRITE
from ..errors import ZeroError
from ..report.report import Report
from ..report.verdict import amount
from .fitting_plan import Asked, Change
from .planning import Say

_BATCHES = (2, 4)  # times the rows that were asked for
_MICRO_BATCHES = 4
_STATES = ("offload_params", "offload_grads", "offload_optimizer", "offload_activations")


@dataclass(frozen=True)
class Effect:
    """What a change brings.

    Args:
        ratio: predicted time of a step after it, for as much work as before, by that before.
        us: by how much a step takes longer.
        peak_bytes: by how much more the device holds.
        more_work: a step does more than before.
    """

    change: Change
    ratio: float
    us: float
    peak_bytes: int
    unit: str
    more_work: bool
    fits: bool | None

    def text(self) -> str:
        """ "--batch 4: 0.71 of the time a token, +9.1 GB on the device"."""
        sign = "-" if self.peak_bytes < 0 else "+"
        time = (
            f"{self.ratio:.2f} of the time a {self.unit.removesuffix('s')}"
            if self.more_work
            else f"{self.us / 1e3:+,.1f} ms a step"
        )
        beside = "; does not fit" if self.fits is False else ""
        return f"{self.change.flags()}: {time}, {sign}{amount(abs(self.peak_bytes))} on the device{beside}"


def with_help(asked: Asked, report: Report, say: Say) -> Report:
    """The report with what would help, the best first; Ctrl-C ends the planning of more changes."""
    budget_bytes = next((f.config.memory_budget_bytes for f in report.frames), None)
    lines: list[Effect] = []
    refused: list[str] = []
    try:
        for effect in _effects(asked, report, budget_bytes, refused, say):
            lines.append(effect)
    except KeyboardInterrupt:
        refused.append("the rest was not planned: interrupted")
    shown = [e.text() for e in sorted(lines, key=lambda e: (e.fits is False, e.ratio))]
    return replace(report, helps=(*shown, *refused))


def _effects(
    asked: Asked, report: Report, budget_bytes: int | None, refused: list[str], say: Say
) -> Iterator[Effect]:
    before = report.step
    for change in _changes(asked, report):
        say(f"planning what would help: {change.flags()}")
        try:
            made = change.of(asked).report(budget_bytes, say)
        except ZeroError:  # not within the budget, or not together with what else is asked
            refused.append(f"{change.flags()}: no plan of it was found that fits")
            continue
        after = made.step
        yield Effect(
            change,
            after.us_each / before.us_each,
            after.us - before.us,
            made.peak_bytes - report.peak_bytes,
            after.done[1],
            after.done[0] != before.done[0],
            made.verdict.fits if made.verdict is not None else None,
        )


def _changes(asked: Asked, report: Report) -> Iterator[Change]:
    """What could shorten a step that is bound by what this one is bound by."""
    bound = report.step.bound
    if asked.batch is not None:
        yield from (Change(batch=asked.batch * n) for n in _BATCHES)
    single = any(
        plan.gather_dtype is torch.float32 for frame in report.frames for plan in frame.params.values()
    )
    if bound in (COMPUTE, LINK) and single and asked.fields.get("param_dtype") is None:
        yield Change({"param_dtype": "bfloat16"})
    if bound == LINK:
        if report.transport != "shared" and asked.fields.get("gather_dtype") is None and asked.stage > 0:
            yield Change({"gather_dtype": "int8"})
        if asked.stage == 3 and asked.fields.get("offload_params") in (None, "none"):
            yield Change({"stage": 2})
        if (asked.world // asked.replicas) % 2 == 0:
            yield Change(replicas=asked.replicas * 2)
    if bound in (READ, WRITE, HOST):
        for name in _STATES:
            tier = asked.fields.get(name)
            if tier == "nvme" and asked.device != "cpu":
                yield Change({name: "host"})
            elif tier in ("host", "nvme"):
                yield Change({name: "none"})
    if bound != COMPUTE:
        yield Change(micro_batches=asked.micro_batches * _MICRO_BATCHES)
