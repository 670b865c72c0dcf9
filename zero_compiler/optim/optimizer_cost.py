"""What the optimizer's step adds to a plan: the turns that it takes, and when they run.

Where a ``zero.optimizer`` has been made these are its own sub-groups. Where not, they are those that an optimizer of
the kind that ``Config.optimizer`` names would have, and the plan says that it assumes so: in a plan for another machine
always; in that of a model that is trained here where something that an update needs rests off the device. A plain torch
optimizer over what lies on the device is eager code, which ``zero.inspect`` leaves out of its Programs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from torch.distributed.tensor import DTensor

from ..cost.hardware import HardwareSpec
from ..cost.simulate import UpdateTurn, simulate
from ..cost.timeline import Timeline
from ..ir.program import Program
from ..report.frame import Frame, Update
from ..sharded.managed_parameters import sized_as_local
from ..sharded.sharded_model import ShardedModel
from .optimizer import sub_group_bytes, sub_groups_of, tier_of
from .updates import Entry, Piece, label_of

_STATE_ITEM_BYTES = 4  # of an element of a state that is assumed

# A spec has the speed of a copy. A CPU reads memory before it writes to it, so that a copy moves half as much again as
# is read and written; an update writes where it has read. (AdamW of 168 million parameters took 79 ms of 120 planned.)
_IN_PLACE = 1.5


def stepped(
    sharded_models: Sequence[ShardedModel], frames: Sequence[Frame], always: bool = False
) -> tuple[list[Frame], Update | None]:
    """The frames with the updates that run while their backward does, and the update that follows.

    Args:
        always: also where everything that an optimizer of no ``zero.optimizer`` needs lies on the device.
    """
    early, late, what = _turns(sharded_models, _tiled(frames), always)
    if not early and not late:
        return list(frames), None
    reduced = [_reduced(f) for f in frames]
    shared = {key for key, n in Counter(key for keys in reduced for key in keys).items() if n > 1}
    out, count = [], 0
    for frame, keys in zip(frames, reduced, strict=True):
        # Not a weight of two frames: which of them is through with it is only known when they run.
        own = keys - shared
        mine = [turn for turn in early if turn.names <= own]
        if mine:
            early = [turn for turn in early if not turn.names <= own]
            count += len(mine)
            timeline = _timeline(sharded_models[0], frame.programs["backward"], mine, frame)
            frame = replace(frame, timelines={**frame.timelines, "backward": timeline})
        out.append(frame)
    rest = [*early, *late]  # at the end of backward, or behind it
    step = Program("update", 0, 0, [], [], [], [], [], 0)
    return out, Update(what, count, len(rest), _timeline(sharded_models[0], step, rest))


def _reduced(frame: Frame) -> set[tuple[str, str]]:
    program = frame.programs.get("backward")
    return {(r.owner, name) for r in program.reduces for name in r.names} if program is not None else set()


def _tiled(frames: Sequence[Frame]) -> set[tuple[str, str]]:
    """Parameters whose gradients come in tiles."""
    programs = [f.programs["backward"] for f in frames if "backward" in f.programs]
    return {(r.owner, name) for p in programs for r in p.reduces if r.tile is not None for name in r.names}


def _timeline(
    sharded_model: ShardedModel, program: Program, turns: Sequence[UpdateTurn], frame: Frame | None = None
) -> Timeline:
    return simulate(
        program,
        sharded_model.hardware,
        sharded_model.group.world,
        checksums=sharded_model.config.nvme_checksums,
        params=None if frame is None else len(frame.params),
        turns=turns,
        files_budget=sharded_model.tiers.files_budget,
    )


def _turns(
    sharded_models: Sequence[ShardedModel], tiled: Collection[tuple[str, str]], always: bool
) -> tuple[list[UpdateTurn], list[UpdateTurn], str]:
    """Turns that run as soon as gradients are final, those that run in ``step()``, and what they are known from."""
    keys = {
        id(param): (sharded_model, name)
        for sharded_model in sharded_models
        for name in sharded_model.params
        if (param := sharded_model.find(name)) is not None and param.requires_grad
    }
    spec = sharded_models[0].hardware
    early: list[UpdateTurn] = []
    late: list[UpdateTurn] = []
    told: dict[str, None] = {}
    known = {id(o): o for sharded_model in sharded_models for o in sharded_model.optimizers.values()}
    for optimizer in known.values():
        for sub_group in optimizer.sub_groups:
            state_bytes = [d.itemsize for d in sub_group.states.tensors.values()]
            turn = _turn(sub_group.pieces, keys, state_bytes, optimizer.early, tiled, spec)
            if turn is not None:
                (early if optimizer.early else late).append(turn)
        when = ", overlap=True" if optimizer.early else ""
        told[f"{optimizer.cls.__name__} of zero.optimizer{when}"] = None
    entries = [
        _assumed(sharded_model, name, param)
        for sharded_model in sharded_models
        for name in sharded_model.params
        if name not in sharded_model.optimizers and id(param := sharded_model.find(name)) in keys
    ]
    config = sharded_models[0].config
    state_bytes = [_STATE_ITEM_BYTES] * (config.state_bytes // _STATE_ITEM_BYTES)
    assumed = [
        turn
        for pieces in sub_groups_of(entries, True, sub_group_bytes(sharded_models))
        if (turn := _turn(pieces, keys, state_bytes, False, tiled, spec)) is not None
    ]
    away = any(
        sharded_model.tiers.on_host(name) for sharded_model in sharded_models for name in sharded_model.params
    )
    elsewhere = away or any(t.buffered or t.copied_bytes for t in assumed)
    if elsewhere or (always and assumed):
        late += assumed
        by = (
            f"{config.optimizer} of zero.optimizer, overlap=False"
            if elsewhere
            else f"{config.optimizer}, fused"
        )
        told[f"assumed: {by}; {len(state_bytes)} fp32 states a parameter"] = None
    return early, late, "; ".join(told)


def _assumed(sharded_model: ShardedModel, name: str, param: DTensor) -> Entry:
    """A parameter as an optimizer would take it that keeps two states."""
    tier = tier_of({}, sharded_model, name)
    item = sharded_model.params[name].layout.dtype.itemsize
    streamed = {
        kind: item for kind in ("params", "grads") if sharded_model.tiers.placed.tier(kind, name) == "nvme"
    }
    if tier != "none":
        count = sharded_model.config.state_bytes // _STATE_ITEM_BYTES
        streamed |= {f"state {k}": _STATE_ITEM_BYTES for k in range(count)}
    return Entry(param, name, tier, {}, streamed)


def _turn(
    pieces: Sequence[Piece],
    keys: dict[int, tuple[ShardedModel, str]],
    state_bytes: Sequence[int],
    early: bool,
    tiled: Collection[tuple[str, str]],
    spec: HardwareSpec,
) -> UpdateTurn | None:
    """What updating ``pieces`` at once moves and computes."""
    names: dict[tuple[str, str], None] = {}
    filed: set[tuple[str, str]] = set()
    us = read = written = copied = 0.0
    for piece in pieces:
        entry = piece.entry
        if id(entry.param) not in keys:
            continue  # of no sharded model, or frozen
        sharded_model, name = keys[id(entry.param)]
        names[sharded_model.key, name] = None
        numel, item = piece.numel, sized_as_local(entry.param).element_size()
        states = sum(state_bytes)
        param = item * (sharded_model.tiers.placed.tier("params", name) == "nvme")
        by_file = sharded_model.tiers.goes_by_file(name, early, (sharded_model.key, name) in tiled)
        if by_file:
            filed.add((sharded_model.key, name))
        grad = item * by_file
        in_files = states * (entry.tier == "nvme")
        read += numel * (param + grad + in_files)
        written += numel * (param + in_files)
        copied += (
            numel
            * states
            * (sharded_model.tiers.apart and entry.tier != "none" and not sharded_model.tiers.on_host(name))
        )
        us += numel * (3 * item + 2 * states) / _memory(spec, sharded_model, name)
    if not names:
        return None
    return UpdateTurn(
        label_of(pieces),
        frozenset(names),
        us + spec.kernel_us,
        int(read),
        int(written),
        int(copied),
        frozenset(filed),
    )


def _memory(spec: HardwareSpec, sharded_model: ShardedModel, name: str) -> float:
    """Bytes a microsecond of the memory in which an update runs. That of an accelerator's host is not in a spec: it is
    taken to be as fast as the link that ends there."""
    if sharded_model.tiers.on_host(name):
        return min(spec.memory_bytes_per_us, spec.host_device.bytes_per_us)
    return spec.memory_bytes_per_us * (1.0 if sharded_model.tiers.apart else _IN_PLACE)
