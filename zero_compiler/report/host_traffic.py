"""What a plan does to have less traffic between hosts, and what that costs and saves: lines of a report."""

from __future__ import annotations

from ..cost.timeline import duration
from .frame import Frame


def second_shard_lines(frame: Frame) -> list[str]:
    """How many weights have second shards, the memory that these take, and the time of the gathers of backward."""
    if frame.config.second_shard is None or "backward" not in frame.programs:
        return []
    within = [g for p in frame.programs.values() for g in p.gathers if g.from_second]
    if not within:
        return [
            "no weight has a second shard: the ranks that hold its parts are on one host, or it stays gathered, or "
            "backward gathers none, or this is a copy of a model"
        ]
    names = {(g.owner, name) for g in within for name in g.names}
    plans = [plan for ref, plan in frame.params.items() if (ref.owner, ref.name) in names]
    nbytes = sum(plan.second_numel * plan.gather_dtype.itemsize for plan in plans)
    ranks = within[0].host_ranks
    sent = sum(g.sent_bytes * (ranks - 1) for g in within)
    others = sum(not (g.from_second or g.kept or g.home) for g in frame.programs["backward"].gathers)
    now_us, instead_us = frame.within_host_us
    lines = [
        f"{len(names)} of {len(frame.params)} weights have second shards on the {ranks} ranks of each host: "
        f"{nbytes:,} bytes a rank, counted with the weights kept gathered",
        f"in backward {sent:,} bytes of them come to a rank, all from its own host, in {duration(now_us)} of the link "
        f"instead of {duration(instead_us)} from all ranks",
    ]
    return lines + ([f"{others} gathers of backward come from all ranks"] if others else [])


def packed_sum_lines(frame: Frame) -> list[str]:
    """How many bytes go from host to host for sums of gradients, where they do so packed."""
    asked = frame.config.reduce_between_hosts_dtype
    if asked is None or "backward" not in frame.programs:
        return []
    packed = [r for p in frame.programs.values() for r in p.reduces if r.wire]
    if not packed:
        return [
            f"no gradient goes between hosts in {asked}: the ranks that hold parts of it are on one host, or hold it "
            "whole, or it is summed in float64, or this is a copy of a model"
        ]
    sent = sum((r.hosts - 1) * r.packed_bytes for r in packed)
    whole = sum((r.hosts - 1) * r.summed_bytes for r in packed)
    return [
        f"sums of gradients go between {packed[0].hosts} hosts in {asked}: {sent:,} bytes from a rank instead of "
        f"{whole:,}, which other hosts add up in float32"
    ]
