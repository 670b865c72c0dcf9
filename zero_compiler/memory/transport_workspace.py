"""Memory that a transport keeps for itself, beside the arenas, to carry out a Program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..ir.program import Program
from ..ir.transfers import ReduceDesc


def scratch_bytes(program: Program, sharded_models: Sequence[Any]) -> dict[str, int]:
    """Bytes on one rank, at most, of each model's transport, by the model's key; the same on every rank."""
    between = {p.key: p for p in sharded_models if p.storage.transport.between > 1}
    exchanged = {
        p.key: p
        for p in sharded_models
        if p.storage.transport.name == "c10d" and p.group.device.type == "cpu" and p.group.world > 2
    }
    out = _between_hosts(program, between) if between else {}
    return out | (_exchanged(program, exchanged) if exchanged else {})


def _between_hosts(program: Program, sharded_models: Mapping[str, Any]) -> dict[str, int]:
    """One transfer at a time, in room for the largest (csrc/src/hosts_transport.cc)."""
    laid: Counter[str] = Counter()
    within: Counter[str] = Counter()  # of the transport among the ranks of the host
    summed: Counter[str] = Counter()
    packed: Counter[str] = Counter()
    for g in program.gathers:
        if g.owner in sharded_models:
            if g.from_second:
                within[g.owner] = max(within[g.owner], g.sent_bytes)
                continue
            hosts = sharded_models[g.owner].storage.transport.between
            laid[g.owner] = max(laid[g.owner], hosts * g.sent_bytes)
    for r in program.reduces:
        if r.owner in sharded_models:
            sharded_model, chunk = sharded_models[r.owner], _chunk_bytes(r)
            world, hosts = sharded_model.group.world, sharded_model.storage.transport.between
            laid[r.owner] = max(laid[r.owner], chunk if r.replicated else world * chunk)
            summed[r.owner] = max(summed[r.owner], chunk if r.replicated else hosts * chunk)
            if r.wire:  # blocks to and from each host, the sum in float32 and what is added to it
                room = 2 * hosts * r.packed_bytes + 2 * 4 * sum(r.chunk_numels)
                packed[r.owner] = max(packed[r.owner], room)
    return {key: laid[key] + within[key] + summed[key] + packed[key] for key in sharded_models}


def _exchanged(program: Program, sharded_models: Mapping[str, Any]) -> dict[str, int]:
    """Of each reduction under way, the rows that come from all ranks but two (csrc/src/c10d_transport.cc)."""
    under_way: Counter[str] = Counter()
    most: dict[str, int] = dict.fromkeys(sharded_models, 0)
    for of in program.reductions:
        if of is None or of.desc.replicated or of.desc.owner not in sharded_models:
            continue
        r = of.desc
        nbytes = (sharded_models[r.owner].group.world - 2) * _chunk_bytes(r)
        under_way[r.owner] += nbytes * (of.starts - of.completes)
        most[r.owner] = max(most[r.owner], under_way[r.owner])
    return most


def _chunk_bytes(moved: ReduceDesc) -> int:
    return sum(moved.chunk_numels) * getattr(torch, moved.dtype).itemsize
