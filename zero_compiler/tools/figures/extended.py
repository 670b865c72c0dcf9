"""Plans of models too deep to be captured whole: planned with few layers, and extended to all of them.

A model is planned twice, with few layers. Layers are alike, so that each further one adds as much as those did by
which the plans differ. Buffers do not grow that way: later layers use those of earlier ones, and the deeper plan has
them all. So it is with arenas. Where checkpoints may wait on the host, all of them are counted there, and what Programs
hold on the device does not grow: a plan leaves one on the device where its lanes would not hide its way and there is
room.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...cost.timeline import LINK
from ...report.report import Report
from ...report.step import LANES
from .. import planning
from ..planning import Say
from .models import Shape, made

DEPTHS = (2, 4)
# Of layers in tiles, whose plans take longest: they wait for tiles of their own, more than for each other's.
TILED = (1, 2)
MACHINE = "dgx-2-v100"
# As the papers train: products and transfers in half precision. Parameters rest in fp32, which is the master copy.
MIXED: Mapping[str, object] = {"param_dtype": "float16", "reduce_dtype": "float16"}
IN_FILES: Mapping[str, object] = {
    "offload_params": "nvme",
    "offload_grads": "nvme",
    "offload_optimizer": "nvme",
}
ON_HOST: Mapping[str, object] = {
    "offload_params": "host",
    "offload_grads": "host",
    "offload_optimizer": "host",
}


@dataclass(frozen=True)
class Setup:
    """What is planned: a model on so many ranks, each with so many rows a step.

    Args:
        fields: of Config, beside those of ``MIXED``.
        accumulates: gradients of an earlier micro-batch wait whole, as stage 1 has it.
    """

    shape: Shape
    ranks: int
    rows: int
    fields: Mapping[str, object] = field(default_factory=dict)
    accumulates: bool = False

    @property
    def host_layer_bytes(self) -> float:
        """Of one layer on the host of a rank: its checkpoint, and its parameters, gradients and states in fp32 where
        they rest there."""
        shape = self.shape
        rests = 16 * shape.layer_parameters / shape.parts / self.ranks
        checkpoint = 2 * self.rows * shape.tokens * shape.width
        return checkpoint + (rests if self.fields.get("offload_params") == "host" else 0.0)

    def report(self) -> Report:
        """Its plan with all layers; nothing is run and nothing of it is allocated."""
        torch._dynamo.reset()
        model, inputs = made(self.shape, self.rows)
        count = 2 if self.accumulates else 1
        with tempfile.TemporaryDirectory() as folder:
            fields: dict[str, Any] = {**MIXED, **self.fields, "hardware": MACHINE}
            if "nvme" in fields.values():
                fields["nvme_dir"] = folder  # that there is one: nothing is written to it
            return planning.report(model, inputs, self.ranks, "cuda", micro_batches=count, **fields)


@dataclass(frozen=True)
class ExtendedPlan:
    """What the plan of a model with all of its layers has, by name; bytes are those of one rank, times are of a step.

    Args:
        amounts: ``device``, ``host``, ``nvme``: bytes at most. Of ``device``: ``parameters``, ``gradients``,
            ``optimizer`` and ``kept``, together ``states``; ``arena`` and ``programs``. ``forward_us``,
            ``backward_us``, ``update_us``. Bytes of full tensors: ``gathered``, ``reduced``, ``largest gather``,
            ``largest reduction``. ``lane X``: the time that it has to do.
    """

    setup: Setup
    amounts: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        return self.amounts[name]

    @property
    def us(self) -> float:
        """Of a step."""
        return self["forward_us"] + self["backward_us"] + self["update_us"]

    @property
    def serial_us(self) -> float:
        """Of a step in which nothing overlaps: what all lanes have to do, one after the other."""
        return sum(self[f"lane {lane}"] for lane in LANES)

    def tflops(self, us: float | None = None) -> float:
        """Of one device, in the papers' count: of products with weights, two operations for each parameter and token
        in forward, four in backward and two where backward makes the forward again."""
        shape = self.setup.shape
        done = 4 * shape.flops_per_token * self.setup.rows * shape.tokens / shape.parts
        return done / (us or self.us) / 1e6


class Planner:
    """Plans of few layers, each made once for all figures that need it.

    Args:
        say: called with a line when a plan begins.
    """

    def __init__(self, say: Say) -> None:
        self._say = say
        self._known: dict[str, dict[str, float]] = {}

    def extended(self, setup: Setup, depths: tuple[int, int] = DEPTHS) -> ExtendedPlan:
        """The plan of ``setup`` with all layers of its shape, known from plans with ``depths`` layers.

        Raises:
            ZeroError: it cannot be planned.
        """
        return _extended(setup, [self._planned(setup, layers) for layers in depths], depths)

    def whole(self, setup: Setup) -> ExtendedPlan:
        """The plan of ``setup`` itself, with all of its layers.

        Raises:
            ZeroError: it cannot be planned.
        """
        known = self._planned(setup, setup.shape.layers)
        return ExtendedPlan(setup, {**known, "device": _device(known)})

    def most_layers(
        self, setup: Setup, room: Mapping[str, float], depths: tuple[int, int] = DEPTHS
    ) -> ExtendedPlan:
        """The same with as many layers as there is room for.

        Args:
            room: bytes of one rank, by tier; what is not named has no limit.

        Raises:
            ZeroError: it cannot be planned.
        """
        few, more = (
            self.extended(replace(setup, shape=replace(setup.shape, layers=layers)), depths)
            for layers in depths
        )
        most = math.inf
        for tier, nbytes in room.items():
            # The arena of more layers is that of the deeper plan, which `more` has.
            each = (more[tier] - few[tier]) / (depths[1] - depths[0])
            if each > 0:
                most = min(most, depths[1] + (nbytes - more[tier]) / each)
        layers = max(0, math.floor(most))
        return self.extended(replace(setup, shape=replace(setup.shape, layers=layers)), depths)

    def _planned(self, setup: Setup, layers: int) -> dict[str, float]:
        setup = replace(setup, shape=replace(setup.shape, layers=layers))
        key = repr(setup)
        if key not in self._known:
            self._say(f"planning {setup.shape.words()}, {setup.rows} rows on each of {setup.ranks:,} ranks")
            self._known[key] = _amounts(setup, setup.report())
        return self._known[key]


def _extended(setup: Setup, known: list[dict[str, float]], depths: tuple[int, int]) -> ExtendedPlan:
    few, more = known
    far = (setup.shape.layers - depths[0]) / (depths[1] - depths[0])
    amounts = {name: few[name] + far * (more[name] - few[name]) for name in few}
    amounts["arena"] = more["arena"]
    if setup.fields.get("offload_activations") == "host":
        amounts["programs"] = max(few["programs"], more["programs"])
        each = max((more["host"] - few["host"]) / (depths[1] - depths[0]), setup.host_layer_bytes)
        amounts["host"] = more["host"] + (setup.shape.layers - depths[1]) * each
    return ExtendedPlan(setup, {**amounts, "device": _device(amounts)})


def _device(amounts: Mapping[str, float]) -> float:
    return amounts["states"] + amounts["arena"] + amounts["programs"]


def _amounts(setup: Setup, report: Report) -> dict[str, float]:
    memory, step = report.memory, report.step
    arena = memory.arena + memory.host
    again = setup.accumulates and step.given.waits
    forward, backward = _sent(report, "forward"), _sent(report, "backward")
    gathered = [n for n, reduces in (*forward, *backward) if not reduces]
    reduced = [n for n, reduces in backward if reduces]
    return {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "kept": memory.kept,
        "states": memory.at_rest - arena,
        "arena": arena,
        # Gradients that wait whole, and what comes on top, take the place of those that are reduced.
        "programs": memory.accumulating - memory.gradients if again else memory.programs,
        "waiting": memory.waiting if again else 0,
        "host": memory.apart,
        "nvme": memory.files,
        "forward_us": step.forward_us,
        "backward_us": step.backward_us,
        "update_us": step.update_us,
        "gathered": sum(gathered),
        "reduced": sum(reduced),
        "largest gather": max(gathered, default=0),
        "largest reduction": max(reduced, default=0),
        **{f"lane {lane}": us for lane, us in step.alone_us.items()},
    }


def _sent(report: Report, phase: str) -> list[tuple[int, bool]]:
    """Of each transfer between ranks: bytes of full tensors, and whether it is a reduction."""
    timelines = [f.timelines[phase] for f in report.frames if phase in f.timelines]
    spans = [s for t in timelines for s in t.spans if s.lane == LINK]
    return [(s.nbytes, s.label.startswith("reduction")) for s in spans]
