"""Forward or backward graph: ranks of a host keep parts of full weights, and backward gathers those."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from zero_compiler.ir import facts, ops

from .base import Context


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
    every tile has its own part. What forward has not read, if anything, backward gathers from all ranks; and so it does
    what it gathers whole though the rest of the plan has it in tiles.

    Refuses: nothing.
    """

    name: str = "second-shards"

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        if ctx.phase == "forward":
            _keep_parts(graph, ctx)
        elif ctx.phase == "backward":
            _gather_parts(graph, ctx)


def _keep_parts(graph: fx.Graph, ctx: Context) -> None:
    for release in graph.find_nodes(op="call_function", target=ops.release):
        elements = release.args[0]
        refs = facts.params(elements[0].args[0].args[0])
        parts = []
        for element in elements:
            ref = refs[element.args[1]]
            if ctx.params[ref].second and (ctx.later is None or ref in ctx.later):
                parts.append(element)
        if parts:
            with graph.inserting_before(release):
                graph.call_function(ops.keep_part, (parts,))


def _gather_parts(graph: fx.Graph, ctx: Context) -> None:
    kept = {ref for ref in ctx.reads if ref in ctx.params and ctx.params[ref].second}
    for gather in graph.find_nodes(op="call_function", target=ops.gather):
        refs = facts.params(gather)
        whole = facts.tile(gather) is None and any(ctx.params[ref].tile_rows for ref in refs)
        if kept.issuperset(refs) and ctx.params[refs[0]].released and not whole:
            gather.args = (*gather.args[:5], "host")
