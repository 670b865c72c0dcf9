"""The plan of ``zero-compiler plan``: within what the hardware has, or the least change of what was asked that fits."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ..cost import hardware
from ..cost.hardware import HardwareSpec
from ..errors import MemoryBudgetError, ZeroError
from ..report.report import Memory, Report
from ..report.verdict import Verdict, verdict_of
from . import planning
from .limits import MOST_RANKS
from .model_source import ModelSource
from .planning import Say

# Changes that are planned at most, of those whose bytes at rest fit: each takes as long as a plan.
MOST_PLANS = 6
_DOUBLINGS = 10  # of the ranks


@dataclass(frozen=True)
class Asked:
    """What is to be planned.

    Args:
        source: the model and its inputs.
        world: ranks. ``device``: kind of device that computes.
        fields: of :class:`~zero_compiler.Config`; those that were given.
        batch: rows of the inputs, where the source makes them.
    """

    source: ModelSource
    world: int
    device: str
    fields: Mapping[str, object]
    batch: int | None = None

    @property
    def machine(self) -> HardwareSpec:
        named = self.fields.get("hardware")
        return hardware.load(None if named is None else str(named))

    @property
    def stage(self) -> int:
        return int(str(self.fields.get("stage", 3)))

    @property
    def budget_bytes(self) -> int | None:
        given = self.fields.get("memory_budget_bytes")
        return None if given is None else int(str(given))

    def cuts_unasked(self, report: Report) -> bool:
        """Whether a plan of this has weights in tiles, and neither a budget nor ``tile_bytes`` was given."""
        return self.budget_bytes is None and self.fields.get("tile_bytes") is None and _cuts(report)

    def report(self, budget_bytes: int | None, say: Say) -> Report:
        """Its plan within so many bytes of the device, or without a limit.

        Raises:
            ZeroError: there is none.
        """
        fields = {k: v for k, v in self.fields.items() if k != "memory_budget_bytes"}
        if budget_bytes is not None:
            fields["memory_budget_bytes"] = budget_bytes
        inputs = self.source.inputs(self.batch)
        report = planning.report(self.source.model, inputs, self.world, self.device, say=say, **fields)
        return replace(report, model=self.source.about)

    def rest(self) -> Memory:
        """What rests between steps."""
        return planning.rest(self.source.model, self.world, self.device, **self.fields)


@dataclass(frozen=True)
class Change:
    """What is asked otherwise: fields of Config, the number of ranks, or rows of a batch."""

    fields: Mapping[str, object] = field(default_factory=dict)
    world: int | None = None
    batch: int | None = None

    def flags(self) -> str:
        """As it is given on the command line."""
        given = {"world": self.world, "batch": self.batch, **self.fields}
        return " ".join(f"--{k.replace('_', '-')} {v}" for k, v in given.items() if v is not None)

    def of(self, asked: Asked) -> Asked:
        """``asked`` with it."""
        fields = {**asked.fields, **self.fields}
        if fields.get("nvme_dir") == _DIRECTORY:
            fields["nvme_dir"] = tempfile.gettempdir()  # that there is one: nothing is written to it
        return replace(asked, fields=fields, world=self.world or asked.world, batch=self.batch or asked.batch)


_DIRECTORY = "DIR"  # for the user to name


def fitting_report(asked: Asked, say: Say) -> Report:
    """The plan of what is asked within ``memory_budget_bytes``, by default what the hardware has less its reserve.

    Weights are cut into tiles where a budget or ``tile_bytes`` was given, and not by default: each tile is one more
    transfer. Where there is no plan, or Ctrl-C ends the search for one, the one without a budget; its verdict has the
    least that was found, and the least change that fits.

    Raises:
        MemoryBudgetError: there is no plan within a budget that was given.
        ZeroError: what is asked cannot be planned.
    """
    if asked.budget_bytes is not None or asked.machine.plannable_bytes is None:
        return _with_change(asked, asked.report(asked.budget_bytes, say), None, say)
    within, least, change = None, None, ""
    try:
        within = asked.report(asked.machine.plannable_bytes, say)
        if not asked.cuts_unasked(within):
            return _with_change(asked, within, None, say)
    except MemoryBudgetError as refused:
        least = refused.peak_bytes
    except KeyboardInterrupt:
        change = "interrupted before a plan was found that fits"
    say("planning without a budget: no plan with whole weights was found that fits the device")
    report = asked.report(None, say)
    verdict = report.verdict
    assert verdict is not None  # of every report that is planned
    if verdict.fits is False:
        verdict = verdict if least is None else _with_least(verdict, least)
        report = replace(report, verdict=replace(verdict, change=change))
    return report if change else _with_change(asked, report, within, say)


def _with_change(asked: Asked, report: Report, within: Report | None, say: Say) -> Report:
    """A report; where its plan does not fit, with the least change that does, or why none is named.

    Args:
        within: see :func:`_least_change`.
    """
    verdict = report.verdict
    assert verdict is not None
    if verdict.fits is not False:
        return report
    try:
        change = _least_change(asked, within, say)
    except KeyboardInterrupt:
        change = "interrupted before a change was found that fits"
    return replace(report, verdict=replace(verdict, change=change))


def _with_least(verdict: Verdict, least_bytes: int) -> Verdict:
    """The verdict on a plan without a budget, with the least that was found within one."""
    device, *others = verdict.tiers
    device = replace(device, needed_bytes=least_bytes, unlimited_bytes=device.needed_bytes)
    return replace(verdict, tiers=(device, *others))


def _least_change(asked: Asked, within: Report | None, say: Say) -> str:
    """In words: of changes, the smallest first, the first whose plan fits.

    Args:
        within: the plan within what the device has, where that has weights in tiles that nobody asked for.
    """
    spec, tried = asked.machine, 0
    room = spec.plannable_bytes
    if room is not None and asked.budget_bytes is not None:
        room = min(room, asked.budget_bytes)
    for change in _changes(asked, _rest_fits(asked, spec)):
        budgeted = "memory_budget_bytes" in change.fields
        then = change.of(asked)
        if (budgeted and within is None and asked.budget_bytes is None) or not _rest_fits(then, spec):
            continue
        if tried == MOST_PLANS:
            return f"no change was found that fits, of {tried} that were planned"
        say(f"looking for the least change that fits: {change.flags()}")
        found: Report | None = None
        try:
            found = within if budgeted and within is not None else then.report(room, say)
        except ZeroError:  # it does not fit, or not together with what else is asked
            pass
        tried += 1
        if found is None or found.verdict is None or found.verdict.fits is False or then.cuts_unasked(found):
            continue
        uses = [use.text() for use in found.verdict.tiers]
        tiles = ["weights in tiles"] if _cuts(found) else []
        step = f"a step of {found.step_us / 1e3:,.0f} ms"
        return f"the least change that fits: {change.flags()} ({'; '.join([', '.join(uses), *tiles, step])})"
    return "no change that was tried fits: more ranks, or another machine, may"


def _cuts(report: Report) -> bool:
    """Whether a weight is gathered in tiles."""
    return any(plan.tile_rows for frame in report.frames for plan in frame.params.values())


def _rest_fits(asked: Asked, spec: HardwareSpec) -> bool:
    """Whether what rests leaves room on every tier."""
    try:
        memory = asked.rest()
    except ZeroError:  # not together with what else is asked
        return False
    needed = {"device": memory.at_rest, "host": memory.apart, "nvme": memory.files}
    return verdict_of(spec, needed).fits is not False


def _changes(asked: Asked, rest_fits: bool) -> Iterator[Change]:
    """What could be asked otherwise, the smallest change first.

    Args:
        rest_fits: activations are what is too much: they go elsewhere first, and batches become smaller.
    """
    if asked.world > 1:
        yield from (Change({"stage": stage}) for stage in (2, 3) if stage > asked.stage)
    room = asked.machine.plannable_bytes
    if room is not None and (asked.budget_bytes is None or asked.budget_bytes > room):
        yield Change({"memory_budget_bytes": room})
    tiers = ["nvme"] if asked.device == "cpu" else ["host", "nvme"]
    directory: dict[str, object] = (
        {} if asked.fields.get("nvme_dir") is not None else {"nvme_dir": _DIRECTORY}
    )
    if rest_fits:
        for tier in tiers:
            yield Change({"offload_activations": tier, **(directory if tier == "nvme" else {})})
        rows = asked.batch or 1
        yield from (Change(batch=n) for n in dict.fromkeys((rows // 2, rows // 8, 1)) if 0 < n < rows)
    for tier in tiers:
        more = directory if tier == "nvme" else {}
        states: dict[str, object] = {"offload_optimizer": tier}
        all_of_it: dict[str, object] = {**states, "offload_params": tier, "offload_grads": tier}
        if asked.stage < 3:
            all_of_it |= {"stage": 3}
        for fields in (states, all_of_it, {**all_of_it, "offload_activations": tier}):
            yield Change({**fields, **more})
    doubled = (asked.world * 2**k for k in range(1, _DOUBLINGS + 1))
    yield from (Change(world=world) for world in doubled if world <= MOST_RANKS)
