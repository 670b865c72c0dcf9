"""The plan of ``zero-compiler plan``: within what the hardware has, or the least change of what was asked that fits."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ..cost import hardware
from ..cost.hardware import HardwareSpec
from ..errors import MemoryBudgetError, ZeroError
from ..ir import plan_file
from ..report.memory import Memory
from ..report.report import Report
from ..report.verdict import Verdict, verdict_of
from . import absent_device, planning
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
        replicas: of the model, which share the ranks.
        micro_batches: of a step.
    """

    source: ModelSource
    world: int
    device: str
    fields: Mapping[str, object]
    batch: int | None = None
    replicas: int = 1
    micro_batches: int = 1

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

    def report(self, budget_bytes: int | None, say: Say) -> Report:
        """Its plan within so many bytes of the device, or without a limit.

        Raises:
            ZeroError: there is none.
        """
        fields = {k: v for k, v in self.fields.items() if k != "memory_budget_bytes"}
        if budget_bytes is not None:
            if self.micro_batches > 1:
                # What a call may take, beside the gradients of those before it.
                budget_bytes = max(0, budget_bytes - self.rest().gradients)
            fields["memory_budget_bytes"] = budget_bytes
        report = planning.report(
            self.source.model,
            self.source.inputs(self.batch),
            self.world,
            self.device,
            replicas=self.replicas,
            micro_batches=self.micro_batches,
            say=say,
            **fields,
        )
        return replace(report, model=self.source.about)

    def rest(self) -> Memory:
        """What rests between steps."""
        return planning.rest(
            self.source.model, self.world, self.device, replicas=self.replicas, **self.fields
        )


@dataclass(frozen=True)
class Change:
    """What is asked otherwise: fields of Config, the number of ranks, rows of a batch, replicas, or micro-batches."""

    fields: Mapping[str, object] = field(default_factory=dict)
    world: int | None = None
    batch: int | None = None
    replicas: int | None = None
    micro_batches: int | None = None

    def flags(self) -> str:
        """As it is given on the command line."""
        given = {
            "world": self.world,
            "batch": self.batch,
            "replicas": self.replicas,
            "gradient_accumulation_steps": self.micro_batches,
            **self.fields,
        }
        return " ".join(f"--{k.replace('_', '-')} {v}" for k, v in given.items() if v is not None)

    def of(self, asked: Asked) -> Asked:
        """``asked`` with it."""
        fields = {**asked.fields, **self.fields}
        if fields.get("nvme_dir") == _DIRECTORY:
            fields["nvme_dir"] = tempfile.gettempdir()  # that there is one: nothing is written to it
        return replace(
            asked,
            fields=fields,
            world=self.world or asked.world,
            batch=self.batch or asked.batch,
            replicas=self.replicas or asked.replicas,
            micro_batches=self.micro_batches or asked.micro_batches,
        )


_DIRECTORY = "DIR"  # for the user to name


def fitting_report(asked: Asked, say: Say) -> Report:
    """The plan of what is asked, with the verdict on it; see :func:`_fitting`.

    A device that is not here, of which no hardware was named, is that of a preset.
    """
    device = absent_device.plannable(asked.device)
    if asked.fields.get("hardware") is not None or not absent_device.is_absent(device):
        return _fitting(asked, say)
    preset = absent_device.PRESET
    report = _fitting(replace(asked, fields={**asked.fields, "hardware": preset}), say)
    assert report.verdict is not None  # of every report that is planned
    assumed = replace(report.verdict, assumed=f"there is no {device.type} device here")
    return replace(report, verdict=assumed)


def _fitting(asked: Asked, say: Say) -> Report:
    """The plan of what is asked within ``memory_budget_bytes``, by default what the hardware has less its reserve.

    Where there is no plan within that default, or Ctrl-C ends the search for one, the one without a budget; its verdict
    has the least that was found, and the least change that fits.

    Raises:
        MemoryBudgetError: there is no plan within a budget that was given.
        ZeroError: what is asked cannot be planned.
    """
    if asked.fields.get("plan") is not None:
        return _as_decided(asked, say)
    if asked.budget_bytes is not None or asked.machine.plannable_bytes is None:
        return _with_change(asked, asked.report(asked.budget_bytes, say), say)
    least, change = None, ""
    try:
        return _with_change(asked, asked.report(asked.machine.plannable_bytes, say), say)
    except MemoryBudgetError as refused:
        least = refused.peak_bytes
    except KeyboardInterrupt:
        change = "interrupted before a plan was found that fits"
    say("planning without a budget: no plan was found that fits the device")
    report = asked.report(None, say)
    verdict = report.verdict
    assert verdict is not None  # of every report that is planned
    if verdict.fits is False:
        verdict = verdict if least is None else _with_least(verdict, least)
        report = replace(report, verdict=replace(verdict, change=change))
    return report if change else _with_change(asked, report, say)


def _as_decided(asked: Asked, say: Say) -> Report:
    """The plan that a file has decided, within the budget that it was made within unless another one was given; where
    it does not fit, with the least change of what would be planned without the file.

    Raises:
        MemoryBudgetError: it does not fit a budget that was given.
        ZeroError: it cannot be planned so.
    """
    without = replace(asked, fields={k: v for k, v in asked.fields.items() if k != "plan"})
    made_within = plan_file.load(str(asked.fields["plan"])).decisions.made_for.memory_budget_bytes
    if asked.budget_bytes is not None:
        return _with_change(without, asked.report(asked.budget_bytes, say), say)
    try:
        report = asked.report(made_within, say)
    except MemoryBudgetError:  # since it was edited
        report = asked.report(None, say)
    return _with_change(without, report, say)


def _with_change(asked: Asked, report: Report, say: Say) -> Report:
    """A report; where its plan does not fit, with the least change that does, or why none is named."""
    verdict = report.verdict
    assert verdict is not None
    if verdict.fits is not False:
        return report
    try:
        change = _least_change(asked, say)
    except KeyboardInterrupt:
        change = "interrupted before a change was found that fits"
    return replace(report, verdict=replace(verdict, change=change))


def _with_least(verdict: Verdict, least_bytes: int) -> Verdict:
    """The verdict on a plan without a budget, with the least that was found within one."""
    device, *others = verdict.tiers
    device = replace(device, needed_bytes=least_bytes, unlimited_bytes=device.needed_bytes)
    return replace(verdict, tiers=(device, *others))


def _least_change(asked: Asked, say: Say) -> str:
    """In words: of changes, the smallest first, the first whose plan fits."""
    spec, tried = asked.machine, 0
    room = spec.plannable_bytes
    if room is not None and asked.budget_bytes is not None:
        room = min(room, asked.budget_bytes)
    for change in _changes(asked, _rest_fits(asked, spec)):
        then = change.of(asked)
        if not _rest_fits(then, spec):
            continue
        if tried == MOST_PLANS:
            return f"no change was found that fits, of {tried} that were planned"
        say(f"looking for the least change that fits: {change.flags()}")
        found: Report | None = None
        try:
            found = then.report(room, say)
        except ZeroError:  # it does not fit, or not together with what else is asked
            pass
        tried += 1
        if found is None or found.verdict is None or found.verdict.fits is False:
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
    if room is not None and asked.budget_bytes is not None and asked.budget_bytes > room:
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
