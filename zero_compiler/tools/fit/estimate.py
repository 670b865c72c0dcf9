"""Step time and bytes of a setting before it is planned whole.

Two kinds. A *sketch* reckons with what plans of a few layers say of any setting: how long operators take, how much is
gathered, reduced and held, by layer and by rows; a lane has that much to do, and the longest of them is the time. It
ranks thousands of settings in a moment. An *extrapolation* plans the setting itself with one layer and with two, and
takes each further one to add as much as the second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ...config import OPTIMIZERS
from ...cost.hardware import HardwareSpec
from ...cost.lane_simulator import share_cores
from ...cost.tier_placement import cost_us
from ...cost.timeline import COMPUTE, LINK, PYTHON
from ...errors import CaptureError, MemoryBudgetError
from ...report.report import Report
from ..fitting_plan import Asked
from ..model_source import ModelSource
from ..planning import Say, given_of
from .settings import KEPT, REMADE, Setting
from .shallow import Stack, kind_of, shallow, stacks_of

_ROWS = 4  # times the rows of the first plan, in the second that a sketch reckons with
_ARENA = 1.12  # buffers of transfers grow with the second layers of a model, and hardly with the others
_HELD = 0.25  # of what a layer saves, where backward makes again what it can: its input, and what that is made from
WHOLE, LAYERS, SKETCH = "whole plan", "one and two layers", "sketch"


@dataclass(frozen=True)
class Estimate:
    """Predicted time and bytes of a setting on one rank.

    Args:
        us: of a step. ``us_each``: by what all ranks get done in it (tokens, else rows).
        nbytes: of each tier ("device", "host", "nvme") at most.
        how: WHOLE, LAYERS or SKETCH: what it is known from.
    """

    setting: Setting
    us: float
    us_each: float
    nbytes: Mapping[str, int]
    how: str
    unit: str = ""
    report: Report | None = field(default=None, compare=False, repr=False)

    def fits(self, spec: HardwareSpec, device_bytes: int | None) -> bool:
        """Whether the machine has that much; what it does not tell counts as enough."""
        rooms = {"device": device_bytes, "host": spec.host_memory_bytes, "nvme": spec.nvme_bytes}
        return all(room is None or self.nbytes.get(tier, 0) <= room for tier, room in rooms.items())


@dataclass(frozen=True)
class _Amounts:
    """What plans of a setting have, by name; sums and multiples of them."""

    of: Mapping[str, float]

    def plus(self, other: _Amounts, times: float = 1.0) -> _Amounts:
        return _Amounts({k: v + times * other.of[k] for k, v in self.of.items()})

    def __getitem__(self, name: str) -> float:
        return self.of[name]


def _amounts(report: Report) -> _Amounts:
    forward = [f.timelines["forward"] for f in report.frames if "forward" in f.timelines]
    backward = [f.timelines["backward"] for f in report.frames if "backward" in f.timelines]
    links = [s for t in backward for s in t.spans if s.lane == LINK]
    memory, step = report.memory, report.step
    return _Amounts(
        {
            "forward_us": step.forward_us,
            "backward_us": step.backward_us,
            "update_us": step.update_us,
            "forward_compute_us": math.fsum(t.alone_us(COMPUTE) for t in forward),
            "backward_compute_us": math.fsum(t.alone_us(COMPUTE) for t in backward),
            "python_us": math.fsum(t.alone_us(PYTHON) for t in (*forward, *backward)),
            "gathers": sum(s.lane == LINK for t in forward for s in t.spans),
            "gathered": sum(t.nbytes(LINK) for t in forward),
            "reductions": sum(s.label.startswith("reduction") for s in links),
            "reduced": sum(s.nbytes for s in links if s.label.startswith("reduction")),
            "rest": memory.at_rest - memory.arena - memory.host,
            "programs": report.peak_bytes - memory.at_rest,
            "arena": memory.arena + memory.host,
            "host": memory.apart,
            "nvme": memory.files,
            "held": sum(f.held_bytes for f in report.frames),
        }
    )


@dataclass(frozen=True)
class _Rest:
    """Bytes that rest on one rank, by tier and by kind, and how many elements it updates."""

    tiers: Mapping[str, float]
    kinds: Mapping[str, float]
    elements: float


class Estimator:
    """Estimates of settings for one model.

    Args:
        asked: of which the settings are changes.
        any_batch: rows of a rank may be chosen.
        known: sketches of models with the same layers, which it adds to.
    """

    def __init__(
        self, asked: Asked, any_batch: bool, say: Say, known: dict[object, list[_Amounts]] | None = None
    ) -> None:
        self.asked, self.any_batch, self._say = asked, any_batch, say
        self.spec = asked.machine
        self.stacks: list[Stack] = stacks_of(asked.source.model)
        self._known = {} if known is None else known
        self._params = [
            (tuple(p.shape), p.dtype, p.requires_grad) for p in dict.fromkeys(asked.source.model.parameters())
        ]
        self.plans = 0
        self._bases: dict[int, _Amounts] = {}
        self._rests: dict[object, _Rest] = {}
        self._held: dict[int | None, tuple[float, float]] = {}
        self._kind = self._kind_of_layers()
        self._probed()

    @property
    def by_layers(self) -> bool:
        """Whether layers are alike, so that few of them tell of all."""
        return bool(self.stacks)

    def _kind_of_layers(self) -> tuple[object, ...]:
        """Equal for models that differ in the number of their layers alone."""
        one = {stack.path: 1 for stack in self.stacks}
        return kind_of(shallow(self.asked.source.model, one)), *one

    # Plans of few layers ---------------------------------------------------------------------------------------

    def _shallow(self, layers: Mapping[str, int]) -> ModelSource:
        return replace(self.asked.source, model=shallow(self.asked.source.model, layers))

    def _depths(self) -> list[Mapping[str, int]]:
        """One layer of each stack, and for each two of it and one of the others."""
        one = {stack.path: 1 for stack in self.stacks}
        return [one, *({**one, stack.path: 2} for stack in self.stacks)]

    def _probed(self) -> None:
        """Find out whether the model runs with fewer layers."""
        if not self.stacks:
            return
        try:
            self._base(self._rows(0))
        except CaptureError:
            self.stacks = []
            self._kind = self._kind_of_layers()

    def _planned(self, asked: Asked, source: ModelSource) -> Report:
        torch._dynamo.reset()
        self.plans += 1
        return replace(asked, source=source).report(None, lambda line: None)

    def _parts(self, asked: Asked, plan: Callable[[Asked, ModelSource], Report]) -> list[_Amounts]:
        """Amounts of the plans of :meth:`_depths`; of the whole model where layers are not alike."""
        if not self.stacks:
            return [_amounts(plan(asked, self.asked.source))]
        return [_amounts(plan(asked, self._shallow(layers))) for layers in self._depths()]

    def _extrapolated(self, parts: Sequence[_Amounts]) -> _Amounts:
        """What the whole model has."""
        first, *deeper = parts
        whole = first
        for stack, part in zip(self.stacks, deeper, strict=True):
            whole = whole.plus(part.plus(first, -1.0), stack.count - 1)
        arena = max(part["arena"] for part in parts) * (_ARENA if deeper else 1.0)
        return _Amounts({**whole.of, "arena": arena})

    # Sketches --------------------------------------------------------------------------------------------------

    def _rows(self, at: int) -> int | None:
        if not self.any_batch:
            return self.asked.batch
        return _ROWS**at

    def _base(self, rows: int | None) -> list[_Amounts]:
        """Of plans of stage 3 on the device with so many rows."""
        key = self._kind, rows
        if key not in self._known:
            self._say(
                f"planning {'one layer and two' if self.stacks else 'all layers'}, {rows or 'its'} rows"
            )
            fields = {
                k: v for k, v in self.asked.fields.items() if not k.startswith(("offload_", "activation_"))
            }
            asked = replace(
                self.asked,
                world=max(2, self.asked.world),
                replicas=1,
                micro_batches=1,
                batch=rows,
                fields=fields | {"stage": 3},
            )
            self._known[key] = self._parts(asked, self._planned)
        return self._known[key]

    def _at(self, rows: int | None) -> _Amounts:
        """What the whole model has with so many rows: what grows with them grows in equal steps."""
        if rows is None or not self.any_batch:
            return self._extrapolated(self._base(self._rows(0)))
        if rows not in self._bases:
            low, high = (self._extrapolated(self._base(self._rows(at))) for at in (0, 1))
            first, second = 1, _ROWS
            a_row = high.plus(low, -1.0)
            self._bases[rows] = low.plus(a_row, (rows - first) / (second - first))
        return self._bases[rows]

    def _of_layers(self, rows: int | None) -> tuple[float, float]:
        """What a call holds at most beside the layers' own, and what all layers but one add to that."""
        if rows not in self._held:
            self._held[rows] = self._of_layers_anew(rows)
        return self._held[rows]

    def _of_layers_anew(self, rows: int | None) -> tuple[float, float]:
        whole = self._at(rows)["programs"]
        many = sum(stack.count - 1 for stack in self.stacks)
        if not many:
            return whole, 0.0
        per_rows = []
        for at in (0, 1) if self.any_batch else (0,):
            first, *deeper = self._base(self._rows(at))
            per_rows.append(
                math.fsum(
                    (stack.count - 1) * (part["programs"] - first["programs"])
                    for stack, part in zip(self.stacks, deeper, strict=True)
                )
            )
        added = per_rows[0]
        if rows is not None and self.any_batch:
            added += (per_rows[1] - per_rows[0]) * (rows - 1) / (_ROWS - 1)
        return whole - added, added

    def rest(self, setting: Setting) -> dict[str, float]:
        """Bytes of each tier that rest between steps: known without any plan."""
        return dict(self._rest(setting).tiers)

    def _rest(self, setting: Setting) -> _Rest:
        key = setting.ranks, setting.stage, tuple(sorted(setting.tiers.items()))
        if key not in self._rests:
            self._rests[key] = self._rest_anew(setting)
        return self._rests[key]

    def _rest_anew(self, setting: Setting) -> _Rest:
        gather_item = self._gather_item()
        kinds = dict.fromkeys(("params", "grads", "optimizer"), 0.0)
        kept = elements = 0.0
        for shape, dtype, trained in self._params:
            numel = math.prod(shape)
            ranks = setting.ranks if setting.stage and shape else 1
            local = math.ceil(shape[0] / ranks) * (numel / shape[0]) if numel and shape else numel
            kinds["params"] += local * dtype.itemsize
            if trained:
                kinds["grads"] += local * dtype.itemsize
                kinds["optimizer"] += local * self._state_bytes()
                elements += local
            if setting.stage in (1, 2) and setting.ranks > 1:
                kept += numel * (gather_item or dtype.itemsize)
        tiers = {"device": kept, "host": 0.0, "nvme": 0.0}
        for kind, nbytes in kinds.items():
            tier = setting.tier(kind)
            tiers["device" if tier == "none" else tier] += nbytes
        return _Rest(tiers, kinds, elements)

    def _state_bytes(self) -> int:
        return 4 * OPTIMIZERS[str(self.asked.fields.get("optimizer", "adamw"))]

    def _gather_item(self) -> int | None:
        given = self.asked.fields.get("param_dtype")
        return {"float32": 4, "fp32": 4, "float64": 8}.get(str(given), 2) if given is not None else None

    def sketch(self, setting: Setting) -> Estimate:
        """A setting in a moment; see the top of this file."""
        at, spec = self._at(setting.batch), self.spec
        rest = self._rest(setting)
        tiers, kinds = dict(rest.tiers), rest.kinds
        apart = self.asked.device != "cpu"
        gathers = self._link_us("all_gather", setting.ranks, at["gathers"], at["gathered"])
        if setting.stage == 0:
            reduces = self._link_us("all_reduce", setting.world, at["reductions"], at["reduced"])
            gathers = 0.0
        else:
            reduces = self._link_us("reduce_scatter", setting.ranks, at["reductions"], at["reduced"])
            reduces += self._link_us(
                "all_reduce", setting.replicas, at["reductions"], at["reduced"] / setting.ranks
            )
        again = gathers if setting.stage == 3 else 0.0
        first, layers = self._of_layers(setting.batch)
        forward, backward, remade = at["forward_compute_us"], at["backward_compute_us"], 0.0
        moved = 0.0
        if setting.activations == REMADE:
            remade, layers = forward, layers * _HELD
        elif setting.activations != KEPT:
            read, write = spec.links(setting.activations)
            moved = max(read.us(layers), write.us(layers))
            tiers[setting.activations] += layers
            layers = 0.0
        home = setting.tier("params") == "none"
        carried = {
            kind: cost_us(kind, int(kinds[kind]), setting.tier(kind), spec, apart, home) for kind in kinds
        }
        calls = setting.micro_batches
        both = self._together(forward, gathers, max(moved, carried["params"] / 3)) + self._together(
            backward + remade, again + reduces, max(moved, carried["params"] / 3 + carried["grads"])
        )
        moves = rest.elements * (3 * self._params[0][1].itemsize + 2 * self._state_bytes()) if kinds else 0
        memory = spec.memory_bytes_per_us
        if apart and not home:  # the host updates
            memory = min(memory, spec.host_device.bytes_per_us)
        update = max(moves / memory, carried["optimizer"] + carried["params"] / 3)
        python = at["python_us"] if share_cores(spec) else max(0.0, at["python_us"] - both)
        us = calls * (both + python) + update
        moving = at["arena"] if setting.stage == 3 else at["arena"] / 2
        if setting.ranks == 1 and self._gather_item() is None:
            moving = 0.0  # weights are views of what rests
        more = kinds["grads"] if calls > 1 and setting.tier("grads") == "none" else 0.0
        tiers["device"] += moving + first + layers + more
        return self._estimate(setting, us, tiers, SKETCH)

    def _link_us(self, kind: str, ranks: int, count: float, nbytes: float) -> float:
        if ranks == 1 or not nbytes:
            return 0.0
        link = self.spec.collective(kind, ranks)
        return float(count * link.latency_us + nbytes / link.bytes_per_us)

    def _together(self, compute: float, link: float, tier: float) -> float:
        """Of what runs at once: the longest, or, where compute and transfers share cores, the sum of both."""
        return max(compute + link, tier) if share_cores(self.spec) else max(compute, link, tier)

    # Extrapolations and whole plans ----------------------------------------------------------------------------

    def extrapolation(self, setting: Setting) -> Estimate:
        """The setting planned with one layer and with two.

        Raises:
            ZeroError: it cannot be planned.
        """
        asked = self._asked(setting)
        if self._chooses_budget(setting):
            parts = self._parts(asked, self._planned_remade)
            at = self._extrapolated(parts)
            setting = replace(setting, activation_budget_bytes=math.ceil(at["held"] * 1.02))
        else:
            at = self._extrapolated(self._parts(asked, self._planned))
        us = at["forward_us"] + at["backward_us"] + at["update_us"]
        nbytes = {
            "device": at["rest"] + at["arena"] + at["programs"],
            "host": at["host"],
            "nvme": at["nvme"],
        }
        return self._estimate(setting, us, nbytes, LAYERS)

    def _planned_remade(self, asked: Asked, source: ModelSource) -> Report:
        """With as few activations as are found to do."""
        least = 0
        for _ in range(3):
            try:
                fields = {**asked.fields, "activation_budget_bytes": least}
                return self._planned(replace(asked, fields=fields), source)
            except MemoryBudgetError as refused:
                if refused.least_bytes is None or refused.least_bytes <= least:
                    raise
                least = refused.least_bytes
        raise MemoryBudgetError("no plan was found in which backward makes activations again")

    def whole(self, setting: Setting, say: Say) -> Estimate:
        """The setting planned with all layers.

        Raises:
            ZeroError: it cannot be planned.
        """
        asked = self._asked(setting)
        if self._chooses_budget(setting):
            report = self._planned_remade(asked, asked.source)
            budget = report.frames[0].config.activation_budget_bytes if report.frames else None
            setting = replace(setting, activation_budget_bytes=budget)
        else:
            torch._dynamo.reset()
            self.plans += 1
            report = asked.report(setting.memory_budget_bytes, say)
        memory = report.memory
        nbytes = {"device": report.peak_bytes, "host": memory.apart, "nvme": memory.files}
        made = self._estimate(setting, report.step_us, nbytes, WHOLE)
        return replace(made, report=report, us_each=report.step.us_each, unit=report.step.done[1])

    def _chooses_budget(self, setting: Setting) -> bool:
        """Whether activations are to be made again, and nobody has said how many."""
        known = setting.activation_budget_bytes is not None or "activation_budget_bytes" in self.asked.fields
        return setting.activations == REMADE and not known

    def _asked(self, setting: Setting) -> Asked:
        return setting.change(self.asked.fields).of(self.asked)

    def _estimate(self, setting: Setting, us: float, nbytes: Mapping[str, float], how: str) -> Estimate:
        count, unit = self._done(setting)
        return Estimate(
            setting, us, us / max(1, count), {k: math.ceil(v) for k, v in nbytes.items()}, how, unit
        )

    def _done(self, setting: Setting) -> tuple[int, str]:
        """What all ranks get done in a step."""
        rows, tokens = given_of(self.asked.source.inputs(setting.batch))
        calls = setting.world * setting.micro_batches
        return calls * (tokens or rows), "tokens" if tokens else "rows"
