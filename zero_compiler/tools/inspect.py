"""``zero.inspect``: the plan of a model, before or after its first call."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..cost import hardware, processors
from ..cost.placed_hardware import PlacedHardware
from ..cost.tier_placement import TRANSFERS
from ..errors import CaptureError, ShardError, ZeroError
from ..optim.optimizer_cost import stepped
from ..params.modules import sharded_models_of
from ..plan.budget import memory_of
from ..ranks.mesh import SHARD
from ..ranks.peer_connections import working
from ..report.decisions import decisions_of
from ..report.frame import Frame
from ..report.memory import Memory
from ..report.report import Report
from ..report.step import MicroBatches
from ..report.verdict import Verdict, verdict_of
from ..sharded.call_protocol import NOTHING_CAPTURED
from ..sharded.sharded_model import ShardedModel
from ..storage.resident_memory import Footprint
from .calibration_advice import advice

UNKNOWN = "this machine (`zero-compiler calibrate` measures it)"


class _FrameIsPlanned(Exception):
    """Ends a capture once the first frame is planned."""


@working("zero.inspect")
def inspect(model: nn.Module, example_inputs: object = None) -> Report:
    """The programs, bytes and peaks of a sharded model.

    Args:
        model: a sharded module, compiled or not.
        example_inputs: a tuple of positional arguments or a dict of keyword arguments; with them the plan is
            made without running or allocating anything, of the first frame that is captured. Without
            them the frames compiled so far are shown.

    Raises:
        ShardError: nothing in ``model`` is sharded.
        CaptureError: nothing of its forward can be captured.
    """
    sharded_models = sharded_models_of(model) if isinstance(model, nn.Module) else None
    if sharded_models is None:
        raise ShardError(
            f"zero.inspect takes a sharded nn.Module, plain or compiled, not {type(model).__name__}"
        )
    if not sharded_models:
        raise ShardError("zero.inspect: nothing in this model is sharded; call zero.shard(model) first")
    if example_inputs is not None:
        frames = _plan(getattr(model, "_orig_mod", model), example_inputs, sharded_models)
    else:
        frames = [f for p in sharded_models for f in p.frames]
    return report_of(
        sharded_models, frames, example_inputs is not None, _footprint(sharded_models), here=True
    )


def _footprint(sharded_models: Sequence[ShardedModel]) -> Footprint | None:
    """What this process has beside the plan of all of these: what it had when the last of them was sharded, without the
    shards of any, and what was compiled since; None where it was not measured of all."""
    sharded_models = sorted(sharded_models, key=lambda p: p.identity.serial)
    found = [p.footprint for p in sharded_models if p.footprint is not None]
    if len(found) < len(sharded_models):
        return None
    before = sum(p.shards_in_memory() for p in sharded_models[:-1])
    return Footprint(
        max(0, found[-1].had - before),
        max(f.pages for f in found),
        sum(f.compiled for f in found),
        max(f.compiling for f in found),
        sum(f.frames for f in found),
    )


def report_of(
    sharded_models: Sequence[ShardedModel],
    frames: list[Frame],
    planned_only: bool,
    footprint: Footprint | None = None,
    here: bool = False,
    given: MicroBatches | None = None,
) -> Report:
    """The report of one sharded model from its frames.

    Args:
        given: to one rank in a step of a plan without ranks, which is planned with its update; None: not known.
        footprint: of the process that runs it; None: another one will, or it was not measured.
        here: this machine runs it, and not one that a plan is made for.
    """
    first = sharded_models[0]
    spec = first.hardware
    frames, update = stepped(sharded_models, frames, always=given is not None)
    given = given or MicroBatches()
    programs = [p for f in frames for p in f.programs.values()]
    memory = memory_of(sharded_models, programs, max((f.kept_bytes for f in frames), default=0))
    return Report(
        rank=first.group.rank,
        world=first.group.world,
        stage=first.config.stage,
        memory=replace(memory, footprint=footprint),
        params=[row for p in sharded_models for row in _rows(p)],
        frames=frames,
        planned_only=planned_only,
        transport=first.storage.transport.name,
        transport_reason=first.storage.transport.reason,
        placement=tuple(line for p in sharded_models for line in p.tiers.placed.why),
        copies=first.group.copies,
        tensor_ranks=first.group.tensor.world if first.group.tensor is not None else 1,
        hosts=spec.hosts if isinstance(spec, PlacedHardware) else None,
        hosts_of_shards=spec.spreads[SHARD].hosts if isinstance(spec, PlacedHardware) else None,
        update=update,
        verdict=_verdict(first, memory, memory.peak_of(given), bool(frames), here),
        decisions=decisions_of(sharded_models, frames),
        given=given,
        hardware=first.hardware.name,
        calibration=advice(first, frames, planned_only, processors.here()) if here else "",
    )


def _verdict(first: ShardedModel, memory: Memory, peak_bytes: int, planned: bool, here: bool) -> Verdict:
    """Whether a plan with so much memory fits the machine that it was made for."""
    assumed = hardware.is_assumed(first.config.hardware)
    spec = first.hardware
    if assumed and here:  # the numbers of a preset say nothing of its memory
        spec = replace(spec, name=UNKNOWN, memory_bytes=None, host_memory_bytes=None, nvme_bytes=None)
    needed = {"device": peak_bytes, "host": memory.apart, "nvme": memory.files}
    why = "this machine was not calibrated" if assumed and not here else ""
    return verdict_of(spec, needed, assumed=why, planned=planned)


def _rows(sharded_model: ShardedModel) -> list[dict[str, Any]]:
    return [
        {
            "name": info.name,
            "shape": list(info.shape),
            "dtype": str(info.layout.dtype).removeprefix("torch."),
            "placement": info.placed(sharded_model.group),
            "local_bytes": info.layout.bytes_local(),
            "tiers": {kind: sharded_model.tiers.placed.tier(kind, info.name) for kind in TRANSFERS},
            "gather_dtype": str(info.gather_dtype).removeprefix("torch."),
        }
        for info in sharded_model.params.values()
    ]


def _plan(model: nn.Module, example_inputs: object, sharded_models: Sequence[ShardedModel]) -> list[Frame]:
    from ..compile.backend import compile_frame
    from ..compile.loader import PlanLoader

    for sharded_model in sharded_models:
        sharded_model.group.check_still_valid()
    known = {id(p): len(p.frames) for p in sharded_models}
    decided = [(p, copy.deepcopy(vars(p.agreed))) for p in sharded_models]
    loader = PlanLoader(sharded_models)

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[object]) -> object:
        compile_frame(gm, inputs, {}, loader)  # decides nothing: this rank may be alone
        raise _FrameIsPlanned

    args, kwargs = (), {}
    if isinstance(example_inputs, dict):
        kwargs = example_inputs
    else:
        args = tuple(example_inputs) if isinstance(example_inputs, (list, tuple)) else (example_inputs,)
    compiled = torch.compile(model, backend=backend, dynamic=False)
    for sharded_model in sharded_models:
        sharded_model.protocol.only_planned = True
    try:
        compiled(*args, **kwargs)
        raise CaptureError(NOTHING_CAPTURED)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if isinstance(error.inner_exception, ZeroError):
            raise error.inner_exception from None
        if not isinstance(error.inner_exception, _FrameIsPlanned):
            raise
    finally:
        for sharded_model, agreed in decided:  # it was only looked at
            sharded_model.protocol.only_planned = False
            vars(sharded_model.agreed).update(agreed)
    frames: list[Frame] = []
    for sharded_model in sharded_models:
        frames += sharded_model.frames[known[id(sharded_model)] :]
        del sharded_model.frames[known[id(sharded_model)] :]
    return frames
