"""What a memory budget buys: which gathered weights stay, and whether a plan fits at all.

Between stage 3 (every weight released after its last use) and stage 2 (every weight kept until the shards
change) lies a choice for each weight: keeping it costs its bytes and saves its gather in backward. That is a
knapsack (``assign.py``).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from ..alignment import arena_aligned
from ..cost.assign import Option, assign
from ..cost.tier_placement import TRANSFERS
from ..emit.no_sync_program import most_accumulating
from ..errors import MemoryBudgetError
from ..ir import facts
from ..ir.facts import ParamRef
from ..ir.program import Program
from ..memory.arena_extents import ends_by_owner
from ..memory.live import most
from ..memory.transport_workspace import scratch_bytes
from ..passes.base import ParamPlan
from ..report.memory import Memory
from ..sharded.sharded_model import ShardedModel
from .least_memory import least_bytes


@dataclass(frozen=True)
class Candidate:
    """A weight that could be kept: ``nbytes`` of memory save ``saved_us`` a step."""

    name: str
    nbytes: int
    saved_us: float


def choose(candidates: Sequence[Candidate], room_bytes: int) -> frozenset[str]:
    """Names of the candidates to keep within ``room_bytes``, so that the time saved is largest."""
    useful = [c for c in candidates if c.saved_us > 0]
    items = [(Option((0,), c.saved_us), Option((c.nbytes,), 0.0)) for c in useful]
    kept = assign(items, [room_bytes])
    assert kept is not None  # nothing takes nothing
    return frozenset(c.name for c, k in zip(useful, kept, strict=True) if k)


def keep(
    sharded_models: Sequence[ShardedModel],
    params: Mapping[ParamRef, ParamPlan],
    gathered: Iterable[ParamRef],
    room_bytes: int,
    tightest: Callable[[ShardedModel, str, int, str], str],
    over_bytes: Callable[[Mapping[ParamRef, bool]], int],
) -> None:
    """Decide which weights of stage 3 stay gathered from forward to backward; noted in what the ranks of each model
    have agreed on.

    Decided once for a weight, for all ranks by the one with the least room: room depends on the sizes of activations,
    which ranks may legally disagree about, and collectives must not.

    Args:
        tightest: the text of the rank with the least room, for all ranks of a sharded_model (``Loader.tightest``).
        over_bytes: by how many bytes a plan that keeps these weights, and not those, passes the budget. A kept weight
            shares no bucket with those that are not, and offsets are packed anew: it may take more than its own bytes.
    """
    by_key = {p.key: p for p in sharded_models}
    wanted = set(gathered)
    open_ = [
        plan
        for ref, plan in params.items()
        if plan.sharded and plan.stage == 3 and ref.name not in by_key[ref.owner].agreed.kept
    ]
    if not open_:
        return
    candidates = []
    for plan in open_:
        if plan.ref in wanted and plan.world > 1 and not (plan.home or plan.path or plan.tile_rows):
            sharded_model = by_key[plan.ref.owner]
            rows = -(-plan.shape[0] // plan.world) * plan.world
            nbytes = arena_aligned(rows * (plan.numel // plan.shape[0]) * plan.gather_dtype.itemsize)
            us = sharded_model.hardware.collective("all_gather", plan.world, plan.shared).us(nbytes)
            candidates.append(Candidate(f"{sharded_model.identity.serial} {plan.ref.name}", nbytes, us))
    first = sharded_models[0]
    names = [f"{by_key[p.ref.owner].identity.serial} {p.ref.name}" for p in open_]
    key = f"kept/{first.identity.serial}/{len(first.agreed.kept)}"

    def by_ref(kept: Collection[str]) -> dict[ParamRef, bool]:
        return {plan.ref: name in kept for plan, name in zip(open_, names, strict=True)}

    left = room_bytes
    chosen = choose(candidates, left)
    while chosen and (over := over_bytes(by_ref(chosen))) > 0:
        left = min(left - over, sum(c.nbytes for c in candidates if c.name in chosen) - 1)
        chosen = choose(candidates, left) if left > 0 else frozenset()
    text = tightest(first, key, room_bytes, "\n".join(sorted(chosen)))
    for ref, kept in by_ref(set(text.split("\n"))).items():
        by_key[ref.owner].agreed.kept[ref.name] = kept


def _pool_bytes(
    sharded_models: Sequence[ShardedModel], programs: Sequence[Program], moves: bool
) -> tuple[int, int]:
    """Bytes of all pools on the device and of those on its host.

    What peers read, and what a transport keeps, each model has for itself. All else is common to a model, its parts and
    whatever has a Program with them (`runtime/pools.py`).

    Args:
        moves: whether anything is gathered.
    """
    scopes = {p.key: p.scope for p in sharded_models}
    common: dict[
        Any, Any
    ] = {}  # of each scope one that it shares pools with; itself at the end of such a chain

    def first(scope: object) -> Any:
        while (before := common.setdefault(scope, scope)) is not scope:
            scope = before
        return scope

    ends = [ends_by_owner(p) for p in programs]
    for owners in ends:
        found = [first(scopes[owner]) for owner in owners if owner in scopes]
        for scope in found:
            common[scope] = found[0]
    transient, device, host, slots, own, scratch = (Counter[Any]() for _ in range(6))
    for p, owners in zip(programs, ends, strict=True):
        group = next((first(scopes[owner]) for owner in owners if owner in scopes), None)
        transient[group] = max(transient[group], p.transient_bytes)
        device[group] = max(device[group], p.device_bytes)
        host[group] = max(host[group], p.host_bytes)
        for owner, at in owners.items():
            slots[owner] = max(slots[owner], -(-at.slots // p.slots_ranks))
            own[owner] = max(own[owner], at.own)
        for owner, nbytes in scratch_bytes(p, sharded_models).items():
            scratch[owner] = max(scratch[owner], nbytes)
    arenas = sum(pool.total() for pool in (transient, slots, own, scratch))
    return device.total() + (arenas if moves else 0), host.total()


# Long: every field of what is told is counted here, by name.
def memory_of(
    sharded_models: Sequence[ShardedModel],
    programs: Sequence[Program],
    kept_bytes: int,
    accumulates: bool = True,
) -> Memory:
    """Predicted bytes of one rank: what is at rest, and the largest of ``programs``.

    Args:
        accumulates: False: what steps under ``zero.no_sync`` take is not asked for, and left out.
    """
    rest = {kind: Counter[str]() for kind in TRANSFERS}
    assumed = waiting = 0
    kinds: dict[str, None] = {}
    for sharded_model in sharded_models:
        for name, info in sharded_model.params.items():
            local = info.layout.bytes_local()
            tier_of = functools.partial(sharded_model.tiers.placed.tier, name=name)
            rest["params"][tier_of("params")] += local
            param = sharded_model.find(name)
            if param is not None and param.requires_grad:
                waiting += info.layout.bytes_full(info.reduce_dtype)
                rest["grads"][tier_of("grads")] += local
                known = sharded_model.optimizers.get(name)
                if known is not None:
                    states, tier = known.held(sharded_model.key, name)
                else:
                    states = info.layout.chunk_numel * sharded_model.config.state_bytes
                    tier = tier_of("optimizer")
                    assumed += states
                    kinds[sharded_model.config.optimizer] = None
                rest["optimizer"][tier] += states
    gradients = rest["grads"]["none"]
    files, apart = (sum(tiers[tier] for tiers in rest.values()) for tier in ("nvme", "host"))
    largest = max(0, max((most(p, gradients) for p in programs), default=0) - gradients)
    counted = programs if accumulates else ()
    accumulating = max((most_accumulating(p, gradients, waiting) for p in counted), default=waiting)
    # One rank gathers nothing: its weights are views of the shards, unless they are cast.
    moves = any(p.group.world > 1 or p.config.param_dtype is not None for p in sharded_models)
    arena, host = _pool_bytes(sharded_models, programs, moves)
    away = max((p.file_bytes for p in programs), default=0)
    away_to = {p.tiers.activation_tier for p in sharded_models}
    files += away if "nvme" in away_to else 0
    streamers = {
        id(s): s
        for sharded_model in sharded_models
        for s in (*sharded_model.gradients.streamers, *sharded_model.optimizers.values())
    }
    host += sum(s.buffer_bytes for s in streamers.values())
    if any(p.tiers.apart for p in sharded_models):
        apart += host + (away if "host" in away_to else 0)
        host = 0
    kept = kept_bytes if moves else 0
    return Memory(
        rest["params"]["none"],
        gradients,
        rest["optimizer"]["none"],
        kept,
        arena,
        largest,
        host,
        files,
        assumed,
        waiting,
        accumulating,
        apart,
        recorded=sum(p.recorded_bytes for p in programs),
        elsewhere=any(p.group.device.type != "cpu" for p in sharded_models),
        assumed_optimizer=", ".join(kinds),
    )


def accumulation_text(memory: Memory, budget_bytes: int | None, waits: bool) -> str:
    """How often the gradients of a library's micro-batches are reduced, for the report.

    Args:
        waits: whole gradients wait for one reduction.
    """
    if waits:
        fit = "" if budget_bytes is None else f", for which memory_budget_bytes={budget_bytes:,} has room"
        return f"one reduction for all micro-batches; {memory.waiting:,} bytes of whole gradients wait for it{fit}"
    return (
        f"one reduction for each micro-batch, of {memory.waiting:,} bytes of whole gradients: memory_budget_bytes has "
        "no room in which they could wait for the last one"
    )


def check(memory: Memory, budget_bytes: int, where: str, sharded_models: Sequence[ShardedModel]) -> None:
    """A plan must fit.

    Args:
        where: the instruction at which memory peaks, for the message.

    Raises:
        MemoryBudgetError: by how much it does not fit, where the peak is, and which option would help most.
    """
    if memory.peak <= budget_bytes:
        return
    over = memory.peak - budget_bytes
    refused = MemoryBudgetError(
        f"memory_budget_bytes={budget_bytes:,} is {over:,} bytes too small for this rank: the predicted peak is "
        f"{memory.peak:,} bytes, the least that a plan was found for, at {where}; {memory.at_rest:,} of them are at "
        f"rest ({_rest(memory)}, arena {memory.arena:,}) and {memory.programs:,} are "
        f"activations and full gradients of the call; {_advice(memory, sharded_models)}"
    )
    refused.peak_bytes = memory.peak
    raise refused


def check_least(
    memory: Memory, graph: fx.Graph, budget_bytes: int, sharded_models: Sequence[ShardedModel]
) -> None:
    """What every plan takes must fit, whatever is chosen: else no search need begin.

    Args:
        memory: without Programs.
        graph: what is to be planned, as it was captured.

    Raises:
        MemoryBudgetError: by how much it does not, and which option would help most.
    """
    least, operator = least_bytes(memory, graph)
    if least <= budget_bytes:
        return
    over = least - budget_bytes
    rest = f"bytes are at rest ({_rest(memory)})"
    if operator is None:
        what = f"{memory.at_rest:,} {rest}, before anything is gathered or computed"
    else:
        where = facts.module_path(operator)
        inside = f" of {where}" if where else ""
        computing = memory.at_rest - memory.gradients
        what = (
            f"{least:,} bytes are there while one operator runs, which nothing takes apart ({operator.target}{inside}: "
            f"operands and results of {least - computing:,}); {memory.at_rest:,} {rest}"
        )
        memory = replace(memory, programs=least - computing)  # so that advice weighs them
    raise MemoryBudgetError(
        f"memory_budget_bytes={budget_bytes:,} is more than {over:,} bytes too small for this rank: {what}; "
        f"{_advice(memory, sharded_models)}"
    )


def _rest(memory: Memory) -> str:
    return (
        f"parameters {memory.parameters:,}, gradients {memory.gradients:,}, optimizer states {memory.optimizer:,}, "
        f"kept weights {memory.kept:,}, buffers of files {memory.host:,}"
    )


def _advice(memory: Memory, sharded_models: Sequence[ShardedModel]) -> str:
    """Of what can be done, what helps with the most bytes: a batch, ranks or weights of half the size save half of what
    they are counted in, and weights that are released all of it."""
    world = sharded_models[0].group.world
    if any(p.config.stage == 0 for p in sharded_models):  # every rank has all of everything
        on = f"the {world} ranks" if world > 1 else "more ranks than 1"
        rest = f"stage=3, under which {on} share these bytes, would help most"
    else:
        rest = (
            f"more ranks than {world} would help most, which share these bytes, or device_rest_bytes of zero.shard, "
            "which moves them to other tiers"
        )
    options: list[tuple[float, str]] = [
        (
            memory.programs / 2,
            "a smaller batch, or torch.utils.checkpoint on the repeated blocks that have none, would help most",
        ),
        ((memory.optimizer + memory.parameters + memory.gradients) / 2, rest),
    ]
    if any(p.config.stage in (1, 2) for p in sharded_models):
        options.append((memory.kept, "stage=3, which releases gathered weights, would help most"))
    # At stage 0 nothing is gathered: a cast would be a copy more.
    gathered = [i for p in sharded_models if p.config.stage > 0 for i in p.params.values()]
    if any(i.gather_dtype.itemsize > 2 for i in gathered):
        options.append(
            (memory.arena / 2, "param_dtype=torch.bfloat16, which halves gathered weights, would help most")
        )
    return max(options, key=lambda option: option[0])[1]


def peak_at(programs: Sequence[Program], gradients: int) -> str:
    """The instruction after which most bytes are live, in words.

    Args:
        gradients: bytes of all gradients of the model.
    """
    programs = [p for p in programs if p.instrs]
    if not programs:
        return "rest"
    program = max(programs, key=lambda p: most(p, gradients))
    at = max(range(len(program.instrs)), key=program.live.__getitem__)
    instr = program.instrs[at]
    what = " ".join(program.line(instr).split())  # with the modules of a segment, or the names of weights
    others = program.before_bytes + program.again_bytes
    beside = (
        f", beside {others:,} bytes of other frames, into which graph breaks cut the model" if others else ""
    )
    return f"{what} of the {program.phase}{beside}"
