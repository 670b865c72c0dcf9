"""Forward or backward graph: ranks of a host keep parts of full weights, and backward gathers those."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from zero_compiler.ir import facts, ops
from zero_compiler.ir.facts import ParamRef

from .base import Context, ParamPlan


@dataclass(frozen=True)
class SecondShards:
    """Keep this rank's part of each weight that backward gathers, and gather it there among the ranks of the host (hpZ
    of ZeRO++, Wang et al. 2023, section 3.2).

    Before, in forward and in backward::

             zero.release %w                    %w.full = zero.gather [w]

    After::

             zero.keep_part %w                  %w.full = zero.gather [w] over host
             zero.release %w

    A weight that stays gathered is there in backward anyway, and has no second shard. Of one that is gathered in tiles
    every tile has its own part. What forward does not gather (an `autograd.Function` may read a weight in its backward
    alone) backward gathers from all ranks; and so it does what it gathers whole though the rest of the plan has it in
    tiles.

    Refuses: nothing.
    """

    name: str = "second-shards"

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        if ctx.phase == "forward":
            _keep_parts(graph, ctx)
        elif ctx.phase == "backward":
            _gather_parts(graph, ctx)


def second_sharded(
    forward: fx.Graph, backward: fx.Graph, gathered: frozenset[ParamRef], params: Mapping[ParamRef, ParamPlan]
) -> frozenset[ParamRef]:
    """Parameters of which forward is to leave second shards: it gathers them, and so does backward, whether because its
    graph reads them (in a region that it runs again, say) or as one of those ``gathered`` anyway.

    Args:
        forward, backward: the graphs of both phases, as the partition of the joint graph has them.
    """
    return frozenset(
        ref for ref in _read(forward) & (_read(backward) | gathered) if ref in params and params[ref].second
    )


def _read(graph: fx.Graph) -> frozenset[ParamRef]:
    marks = graph.find_nodes(op="call_function", target=ops.unshard)
    return frozenset(ParamRef(n.args[3], n.args[4]) for n in marks if n.users)


def _keep_parts(graph: fx.Graph, ctx: Context) -> None:
    for release in graph.find_nodes(op="call_function", target=ops.release):
        elements = release.args[0]
        refs = facts.params(elements[0].args[0].args[0])
        parts = [e for e in elements if _has_second(refs[e.args[1]], ctx)]
        if parts:
            with graph.inserting_before(release):
                graph.call_function(ops.keep_part, (parts,))


def _gather_parts(graph: fx.Graph, ctx: Context) -> None:
    for gather in graph.find_nodes(op="call_function", target=ops.gather):
        refs = facts.params(gather)
        whole = facts.tile(gather) is None and any(ctx.params[ref].tile_rows for ref in refs)
        if all(_has_second(ref, ctx) for ref in refs) and ctx.params[refs[0]].released and not whole:
            gather.args = (*gather.args[:5], "host")


def _has_second(ref: ParamRef, ctx: Context) -> bool:
    return ref in ctx.second and ctx.params[ref].second > 0
