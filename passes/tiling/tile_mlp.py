"""Joint graph: the intermediate of an MLP is computed tile by tile."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from zero_compiler.cost.cost import hints
from zero_compiler.ir import dump, facts, ops
from zero_compiler.ir.facts import ParamRef

from ..base import Context
from . import row_propagation
from .head import name_of, weight_of
from .mlp import Chain, Limits, Mlp, chains, weights_of
from .row_propagation import Left


@dataclass(frozen=True)
class TileMlp:
    """Compute the intermediate of an MLP for some tokens at a time, so that all of it never exists.

    An *MLP* is a product with a weight that makes rows wider (or several, as SwiGLU's two), element-wise operators, and
    a product that makes them narrower. Only where a budget asks for it (``tile_mlp``). Backward makes the
    intermediate of a tile again, from the input of the MLP, and adds up gradients of weights over tiles, as TiledMLP
    of "Arctic Long Sequence Training" does (Bekman et al. 2025). Weights are gathered once a phase and stay for all
    tiles; each gradient is reduced once.

    Before::

        %h  = aten.mm %x, %w1t                                f32[16,32]
        %a  = aten.gelu %h                                    f32[16,32]
        %y  = aten.mm %a, %w2t                                f32[16,8]
        %da = aten.mm %dy, %w2                                f32[16,32]
        %dh = aten.gelu_backward %da, %h                      f32[16,32]
        ...                                                   gradients of %x, %w1 and %w2

    After::

        %t  = zero.tiled [%x, %w1t, %w2t]                     per tile: %h, %a, %y
        %y  = getitem %t, 0
        %u  = zero.tiled [%x, %w1t, %dy, %w2, %w1]            per tile: %h and %a again, %da, %dh, gradients
        %dw2, %dw1, %dx = getitem %u

    Refuses: nothing. What is left whole, with the reason in the report: an intermediate that something else reads;
    operators that mix tokens, draw random numbers, or of which nothing is known; experts, whose products have three
    dimensions; weights that are themselves gathered in tiles.
    """

    tile_mlp: bool = False
    tile_bytes: int | None = None
    mlp_bytes: int | None = None
    name: str = "tile-mlp"

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        if not self.tile_mlp:
            return
        tangents, known = facts.depends_on_tangents(graph), hints(graph)
        limits = Limits(self.tile_bytes, self.mlp_bytes)
        for k, chain in enumerate(chains(graph, tangents)):
            try:
                _check(chain, ctx)
                Mlp(graph, chain, tangents, known).replace(ctx.machine, limits, f"mlp{k}")
            except Left as why:
                up = chain.ups[0]
                what = f"{dump.type_text(facts.value(up))}, intermediate of {weights_of(up)}"
                facts.set_note(chain.down, f"left whole: {what}, because {why}")
        graph.eliminate_dead_code()


def _check(chain: Chain, ctx: Context) -> None:
    if free_unbacked_symbols(facts.value(chain.down)):
        raise Left("how many tokens there are depends on data")
    for node in (*chain.ups, chain.down):
        if node.target not in row_propagation._PRODUCTS:
            raise Left(f"{node.target} (of experts, perhaps) is no product of two matrices")
        weight = weight_of(node)
        if weight is not None and weight.target is ops.unshard:
            plan = ctx.params.get(ParamRef(weight.args[3], weight.args[4]))
            if plan is not None and plan.tile_rows:
                raise Left(f"{name_of(weight)} is gathered in tiles itself")
